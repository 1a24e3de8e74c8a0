"""From text to tokens: an unfinished Megatron data set in the work folder, which every format is then made from."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardwise.data.reading.megatron import UnfinishedIndex, written_dtype
from shardwise.data.reading.sources import Source
from shardwise.data.samples.sampler import IntArray
from shardwise.errors import DataError
from shardwise.files import to_disk
from shardwise.prepare.batches import Position, TextBatch, text_batches
from shardwise.prepare.work import Work
from shardwise.prepare.workers import Rows, Workers, tokenize

PREFIX = "tokens"
"""The prefix of the data set in the work folder."""
COMMIT_SECONDS = 1.0
"""The most work that a killed process loses."""


@dataclass(frozen=True)
class Cut:
    """How text becomes sequences of tokens.

    Attributes:
        sentences: each sentence is a sequence, and tokenized by itself; else each document is one.
        end: the id that closes a document, None for none.
        longest: a document of so many tokens is ended and another begun.
    """

    sentences: bool
    end: int | None
    longest: int | None = None


@dataclass(frozen=True)
class Written:
    """What is in the files.

    Attributes:
        open_sequence, open_document: tokens of those that are not at their end.
    """

    tokens: int = 0
    sequences: int = 0
    documents: int = 0
    open_sequence: int = 0
    open_document: int = 0


@dataclass(frozen=True)
class Progress:
    """What of the source has been read and what was made of it."""

    read: Position
    written: Written


def write_tokens(
    source: Source,
    workers: Workers,
    work: Work,
    cut: Cut,
    vocab_size: int,
    begin: Progress,
    save: Callable[[Progress], None],
    advance: Callable[[int], None],
) -> Progress:
    """Tokenizes the source from `begin` on; returns the progress at its end, when tokens.bin and tokens.idx are there.

    Args:
        save: makes a progress durable; the files are durable already.
        advance: is called with the bytes of text that were read.

    Raises:
        ChangedError: the text up to `begin` is another one. DataError: as the source; a disk is full.
    """
    with contextlib.ExitStack() as files:
        with work.writing():
            index = _open(files, work.folder, vocab_size, begin.written)
        writer = _Writer(index, cut, begin.written)
        progress, saved = begin, time.monotonic()
        batches = _after(text_batches(source, cut.sentences), begin.read, advance)
        for batch, rows in workers.each(functools.partial(_tokenized, literally=cut.sentences), batches):
            with work.writing():
                writer.add(batch, rows)
                progress = Progress(batch.after, writer.written)
                if time.monotonic() - saved >= COMMIT_SECONDS:
                    _commit(index, progress, save)
                    saved = time.monotonic()
            advance(batch.after.bytes - batch.before.bytes)
        with work.writing():
            _commit(index, progress, save)
            with (work.folder / f"{PREFIX}.idx").open("wb") as idx:
                index.write_index(idx)
                to_disk(idx)
    return progress


class ChangedError(DataError):
    """The text that was read before has changed."""


def _tokenized(batch: TextBatch, literally: bool) -> Rows:
    return tokenize(batch.texts, literally)


def _after(batches: Iterator[TextBatch], begin: Position, advance: Callable[[int], None]) -> Iterator[TextBatch]:
    """The batches after a position, which must be the same text as before."""
    if not begin.batches:
        yield from batches
        return
    for batch in batches:
        if batch.after.batches == begin.batches:
            if batch.after != begin:
                break
            advance(begin.bytes)
            yield from batches
            return
    raise ChangedError("the text has changed since its preparation began")


def _open(files: contextlib.ExitStack, folder: Path, vocab_size: int, written: Written) -> UnfinishedIndex:
    """The files, cut to what the saved progress says that they hold."""
    held = {
        "bin": written_dtype(vocab_size).itemsize * written.tokens,
        "sizes": 4 * written.sequences,
        "documents": 8 * (written.documents + 1) if written.documents else 0,
    }

    def opened(kind: str) -> BinaryIO:
        path = folder / f"{PREFIX}.{kind}"
        path.touch()
        if path.stat().st_size < held[kind]:
            raise ChangedError(f"{path} is shorter than it was")
        file = files.enter_context(path.open("r+b"))
        file.truncate(held[kind])
        file.seek(0, os.SEEK_END)
        return file

    tokens, sizes, documents = map(opened, held)
    return UnfinishedIndex(tokens, sizes, documents, vocab_size, written.sequences, written.documents)


def _commit(index: UnfinishedIndex, progress: Progress, save: Callable[[Progress], None]) -> None:
    for file in index.files:
        to_disk(file)
    save(progress)


class _Writer:
    """Adds batches to the files."""

    def __init__(self, index: UnfinishedIndex, cut: Cut, written: Written) -> None:
        self._index, self._cut, self.written = index, cut, written

    def add(self, batch: TextBatch, rows: Rows) -> None:
        """Adds the tokens of a batch, in documents; the next batch continues a document that is open at its end."""
        tokens, sizes = rows
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
        ends = self._ends(batch, starts)
        # The tokens of the batch before each end of a document.
        at = starts[ends]
        if self._cut.sentences:
            lengths, bounds = self._sentences(sizes, ends)
            open_sequence = 0
        else:
            whole = np.diff(at, prepend=-self.written.open_sequence) + (self._cut.end is not None)
            lengths, bounds = whole[whole > 0], np.cumsum(whole > 0)
            open_sequence = len(tokens) - int(at[-1]) if len(at) else self.written.open_sequence + len(tokens)
        open_document = len(tokens) - int(at[-1]) if len(at) else self.written.open_document + len(tokens)
        row = tokens if self._cut.end is None else np.insert(tokens, at, self._cut.end)
        self._index.extend(row, lengths, bounds)
        self.written = Written(
            self.written.tokens + len(row),
            self._index.sequences,
            self._index.documents,
            open_sequence,
            open_document,
        )

    def _ends(self, batch: TextBatch, starts: IntArray) -> IntArray:
        ends = list(batch.ends)
        longest = self._cut.longest
        if longest is not None and not ends and self.written.open_document + int(starts[-1]) >= longest:
            ends.append(len(batch.texts))
        return np.array(ends, dtype=np.int64)

    def _sentences(self, sizes: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
        """Sizes of the sentences that have tokens, and how many lie before each end of a document.

        What closes a document belongs to its last sentence; where that is not of this batch, it is one by itself.
        """
        kept = sizes > 0
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(kept)])[ends]
        lengths = sizes[kept]
        if self._cut.end is None:
            return lengths, before
        alone = np.diff(before, prepend=0) == 0
        lengths[before[~alone] - 1] += 1
        return np.insert(lengths, before[alone], 1), before + np.cumsum(alone)


def as_state(progress: Progress) -> dict[str, Any]:
    return asdict(progress)


def from_state(state: dict[str, Any]) -> Progress:
    return Progress(Position(**state["read"]), Written(**state["written"]))
