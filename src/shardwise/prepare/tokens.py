"""From text to tokens: an unfinished Megatron data set in the work folder, from which every format is then made."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardwise.data.reading.megatron import UnfinishedIndex, written_dtype
from shardwise.data.reading.sources import Source
from shardwise.data.samples.sampler import IntArray
from shardwise.data.tokens.marks import DocumentMarks
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.errors import DataError
from shardwise.files import to_disk
from shardwise.prepare.batches import Position, TextBatch, text_batches
from shardwise.prepare.work import WorkFolder
from shardwise.prepare.workers import TokenRow, Workers, tokenize

PREFIX = "tokens"
"""The prefix of the data set in the work folder."""
COMMIT_SECONDS = 1.0
"""The most work that a killed process loses."""


@dataclass(frozen=True)
class SequenceOptions:
    """How text becomes sequences of tokens.

    Attributes:
        sentences: each sentence is a sequence, and tokenized by itself; else each document is one.
        marks: of each document; sentences have no token that begins them.
        longest: a document with this many tokens is ended, and its rest becomes another document.
    """

    sentences: bool
    marks: DocumentMarks
    longest: int | None = None


@dataclass(frozen=True)
class WrittenCounts:
    """What the files contain.

    Attributes:
        open_document: tokens of the last document, if its end is not written yet.
    """

    tokens: int = 0
    sequences: int = 0
    documents: int = 0
    open_document: int = 0


@dataclass(frozen=True)
class TokenizingProgress:
    """What of the source has been read, and what was written of it."""

    read: Position = field(default_factory=Position)
    written: WrittenCounts = field(default_factory=WrittenCounts)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TokenizingProgress:
        """The progress of which `state` is the `dataclasses.asdict`."""
        # `open_sequence` is in the states of earlier versions.
        written = {name: number for name, number in state["written"].items() if name != "open_sequence"}
        return cls(Position(**state["read"]), WrittenCounts(**written))


def write_tokens(
    source: Source,
    workers: Workers,
    work: WorkFolder,
    sequences: SequenceOptions,
    tokenizer: Tokenizer,
    begin: TokenizingProgress,
    save: Callable[[TokenizingProgress], None],
    advance: Callable[[int], None],
) -> TokenizingProgress:
    """Tokenizes the source from `begin` on; returns the progress at its end, when tokens.bin and tokens.idx are there.

    Args:
        tokenizer: the one that `workers` have.
        save: stores a progress on the disk; the files that it describes are there already.
        advance: is called with the bytes of text that were read.

    Raises:
        ChangedError: the text up to `begin` differs from what was read before.
        DataError: the source cannot be read, or a disk is full.
    """
    with contextlib.ExitStack() as files:
        with work.writing():
            index = open_index(files, work.folder, tokenizer.vocab_size, begin.written)
        progress, saved = begin, time.monotonic()
        batches = _after(text_batches(source, tokenizer, sequences.sentences), begin.read, advance)
        for batch, row in workers.each(functools.partial(tokenize, literally=sequences.sentences), batches):
            advance(batch.after.bytes - progress.read.bytes)
            with work.writing():
                progress = TokenizingProgress(batch.after, _append(index, sequences, progress.written, batch, row))
                if time.monotonic() - saved >= COMMIT_SECONDS:
                    _to_disk(index)
                    save(progress)
                    saved = time.monotonic()
        with work.writing():
            _to_disk(index)
            save(progress)
            finish_index(index, work.folder)
    return progress


class ChangedError(DataError):
    """The text that was read before has changed."""


def _after(batches: Iterator[TextBatch], begin: Position, advance: Callable[[int], None]) -> Iterator[TextBatch]:
    """The batches after a position, which must be the same text as before."""
    if begin.batches:
        last = next((batch for batch in batches if batch.after.batches == begin.batches), None)
        if last is None or last.after != begin:
            raise ChangedError("the text has changed since its preparation began")
        advance(begin.bytes)
    yield from batches


def open_index(files: contextlib.ExitStack, folder: Path, vocab_size: int, written: WrittenCounts) -> UnfinishedIndex:
    """The files of the data set in `folder`, cut to the size that `written` says; `files` closes them."""
    expected = {
        "bin": written_dtype(vocab_size).itemsize * written.tokens,
        "sizes": 4 * written.sequences,
        "documents": 8 * (written.documents + 1) if written.documents else 0,
    }

    def opened(kind: str) -> BinaryIO:
        path = folder / f"{PREFIX}.{kind}"
        path.touch()
        if path.stat().st_size < expected[kind]:
            raise ChangedError(f"{path} is shorter than it was")
        file = files.enter_context(path.open("r+b"))
        file.truncate(expected[kind])
        file.seek(0, os.SEEK_END)
        return file

    tokens, sizes, documents = map(opened, expected)
    return UnfinishedIndex(tokens, sizes, documents, vocab_size, written.sequences, written.documents)


def finish_index(index: UnfinishedIndex, folder: Path) -> None:
    """Writes the .idx."""
    with (folder / f"{PREFIX}.idx").open("wb") as idx:
        index.write_index(idx)
        to_disk(idx)


def _to_disk(index: UnfinishedIndex) -> None:
    for file in index.files:
        to_disk(file)


def _append(
    index: UnfinishedIndex, sequences: SequenceOptions, written: WrittenCounts, batch: TextBatch, row: TokenRow
) -> WrittenCounts:
    """Appends the tokens of a batch; the next batch continues a document that is open at its end."""
    (tokens, sizes), ends, end = row, np.array(batch.ends, dtype=np.int64), sequences.marks.end
    if sequences.longest is not None and not len(ends) and written.open_document + len(tokens) >= sequences.longest:
        ends = np.array([len(batch.texts)])
    if not sequences.sentences:  # each text is a window of a document
        is_last = np.isin(np.arange(1, len(sizes) + 1), ends).tolist()
        tokens, sizes = sequences.marks.put(tokens, sizes, is_last, begun=written.open_document > 0)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
    at = starts[ends]  # the tokens of the batch before each end of a document
    if sequences.sentences:
        lengths, bounds = _sentences(sizes, ends, closed=end is not None)
        tokens = tokens if end is None else np.insert(tokens, at, end)
    else:
        lengths = np.diff(at, prepend=-written.open_document)
        lengths, bounds = lengths[lengths > 0], np.cumsum(lengths > 0)
    index.extend(tokens, lengths, bounds)
    open_document = int(starts[-1] - at[-1]) if len(at) else written.open_document + int(starts[-1])
    return WrittenCounts(written.tokens + len(tokens), index.sequences, index.documents, open_document)


def _sentences(sizes: IntArray, ends: IntArray, *, closed: bool) -> tuple[IntArray, IntArray]:
    """Sizes of the sentences that have tokens, and how many of them lie before each end of a document.

    Where documents are closed by a token, it belongs to the last sentence; if that lies in an earlier batch, the token
    is a sentence by itself.
    """
    kept = sizes > 0
    before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(kept)])[ends]
    lengths = sizes[kept]
    if not closed:
        return lengths, before
    alone = np.diff(before, prepend=0) == 0
    lengths[before[~alone] - 1] += 1
    return np.insert(lengths, before[alone], 1), before + np.cumsum(alone)
