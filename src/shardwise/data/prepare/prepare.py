"""Text becomes data that a run reads as they are: once, in parallel, and continued after an interruption.

1. text → tokens       every format begins with a Megatron data set in the work folder (`tokenizing.py`)
2. tokens → format     that data set itself; blocks of arrow; shards of masked sentence pairs (`FORMATS`)
3. publication         complete data take their name, with a manifest next to them (`outputs.py`)

A flat file of raw token ids, as the scripts of nanoGPT write it, becomes Megatron's .bin and .idx likewise.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import ConfigError, DataError
from shardwise.base.files import cache_root, reason_of, to_disk
from shardwise.config import DataConfig
from shardwise.data import cache, hub
from shardwise.data.prepare import outputs, tokenizing, work_folder
from shardwise.data.prepare.to_arrow import ARROW
from shardwise.data.prepare.to_hdf5 import HDF5
from shardwise.data.reading.dataset_tables import fetch_dataset
from shardwise.data.reading.megatron_files import UnfinishedIndex, prefix_of, written_dtype
from shardwise.data.reading.text_sources import FileSource, open_source
from shardwise.data.tokens.encoding import ContentDigest, DocumentMarks
from shardwise.data.tokens.tokenizer import Tokenizer, announce_note, open_user_tokenizer

# Bytes of the files in the work folder for each sequence and document: a size (4) and a bound (8), then in the .idx a
# size (4), a pointer (8) and a bound (8).
_INDEX_BYTES = 32

Bar = Callable[[str, int | None], contextlib.AbstractContextManager[outputs.Advance | None]]
"""Makes a progress bar of a description and a total, None if it is unknown; the bar is called with the work done."""


FORMATS: Mapping[outputs.FormatName, outputs.OutputFormat] = {
    format.name: format for format in (outputs.MEGATRON, ARROW, HDF5)
}


@dataclass(frozen=True)
class TextJob:
    """A text that is to be converted, and the data that it becomes.

    Attributes:
        data: section that names the text.
        output: prefix, or a folder for arrow and HDF5.
        tokenizer: tokenizer as `data.tokenizer` names it.
        options: options of the format, by their names.
    """

    data: DataConfig
    output: Path
    format: outputs.FormatName
    tokenizer: str
    options: Mapping[str, Any]


def convert_text(job: TextJob, *, force: bool, announce: Callable[[str], None], bar: Bar) -> outputs.PreparationOutcome:
    """Makes the data of `job`, unless they are there already.

    Args:
        force: True to replace data that were prepared from another text or in another way.

    Raises:
        DataError: the text or the tokenizer cannot be read, other data are at the output, or the disk is too small.
    """
    conversion = _TextConversion(job, announce, bar)
    return conversion.output.produce(conversion.content, conversion.make, force=force)


class _TextConversion:
    def __init__(self, job: TextJob, announce: Callable[[str], None], bar: Bar) -> None:
        self.job = job
        self.announce = announce
        self.bar = bar
        self.format = FORMATS[job.format]
        options = job.options
        problems = self.format.option_problems(options)
        if options.get("prepend_bos") and options.get("split_sentences"):
            problems.append("--prepend-bos must be left out with --split-sentences, whose pairs have [CLS] and [SEP]")
        if problems:
            raise ConfigError(problems)
        _check_place(job)
        pairs = self.format.has_pairs
        self.path = hub.resolve_tokenizer(job.tokenizer, announce=announce)
        self.tokenizer = open_user_tokenizer(job.tokenizer, outputs.ANY_VOCABULARY, pairs=pairs)
        announce_note(self.tokenizer, announce)
        fetch_dataset(job.data, announce)
        self.source = open_source(job.data)
        if isinstance(self.source, FileSource) and job.data.path is not None:
            announce(f"preparing {job.output}: {self.source.name} is {self.source.described()}")
        stamp = self.source.stamp()
        # The prefix keeps it apart from the digest of a run, which depends on how the run divides the text into parts.
        self.stamp = None if stamp is None else f"prepared-{stamp}"
        self.sentences = pairs or bool(options.get("split_sentences"))
        self.marks = DocumentMarks.of(
            self.tokenizer, append_eod=options.get("append_eod", not pairs), prepend_bos=options.get("prepend_bos")
        )
        if options.get("whole_word") and self.tokenizer.continuations() is None:
            raise ConfigError(
                f"--whole-word needs a WordPiece tokenizer, whose tokens show whether they continue a word, and "
                f"{job.tokenizer} is none: leave it out, or name BERT's vocab.txt"
            )
        self.output = outputs.Output(job.output, self.format, job.tokenizer, self.tokenizer, options)
        self.work = self.output.work

    def content(self) -> str:
        """The digest of the source's text, which is read unless the cache has the digest."""
        known = cache.known_content(cache_root(), self.stamp)
        if known is not None:
            return known
        digest = ContentDigest()
        for _ in digest.watch(self.source.pieces()):
            pass
        return digest.hexdigest()

    def make(self, state: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Steps 1 and 2, continued from the state of an unfinished conversion; returns the manifest."""
        if state is None:
            begin = tokenizing.TokenizingProgress()
            with self.work.writing():
                self.work.clear()
        else:
            begin = tokenizing.TokenizingProgress.from_state(state["progress"])
        estimate = self._check_room()
        small = estimate is not None and estimate.bytes < tokenizing.SMALL_BYTES
        with tokenizing.Workers.for_tokenizing(str(self.path), self.tokenizer, small=small) as workers:
            progress = self._tokenize(workers, begin, estimate)
        read = progress.read
        job = outputs.FormatJob(
            prefix=self.work.folder / tokenizing.PREFIX,
            counts=progress.written,
            digest=read.digest,
            tokenizer=self.tokenizer,
            work=self.work,
            name=self.job.output.name,
            options=self.job.options,
            bar=self._bar,
        )
        with self.work.writing():
            try:
                counts = self.format.write(job)
            except ConfigError:
                self.work.clear()  # there is too little text for one sample
                raise
            source = {
                "name": self.source.name,
                "sha256": read.digest,
                "documents": read.documents,
                "characters": read.characters,
                "bytes": read.bytes,
            }
            facts = self.output.complete(source, self.tokenizer.vocab_size, closes=self.marks.end is not None, **counts)
        cache.remember_content(cache_root(), self.stamp, read.digest)
        return facts

    def _check_room(self) -> work_folder.Estimate | None:
        job = self.job
        estimate = work_folder.estimate(job.data, self.source, self.tokenizer, sentences=self.sentences)
        if estimate is None:
            self.announce(f"preparing {job.output}: the size of {self.source.name} is known only after it was read")
            return None
        needed = estimate.tokens * written_dtype(self.tokenizer.vocab_size).itemsize
        needed += _INDEX_BYTES * (estimate.sentences + estimate.documents)
        needed += self.format.disk_bytes(estimate, job.options)
        written = work_folder.bytes_below(self.work.folder)
        work_folder.check_room(needed, written, job.output, self.announce, packed=estimate.packed)
        return estimate

    def _tokenize(
        self, workers: tokenizing.Workers, begin: tokenizing.TokenizingProgress, estimate: work_folder.Estimate | None
    ) -> tokenizing.TokenizingProgress:
        """Step 1."""
        total = None
        if estimate is not None and estimate.exact:
            total = estimate.bytes
        sequences = tokenizing.SequenceOptions(self.sentences, self.marks, self.format.longest_document)
        with self._bar(f"tokenizing {self.source.name}", total) as advance:
            write = functools.partial(
                tokenizing.write_tokens,
                self.source,
                workers,
                self.work,
                sequences,
                self.tokenizer,
                save=self._save,
                advance=advance,
            )
            try:
                if begin.read.batches:
                    done = f"{begin.read.documents:,} documents, {begin.written.tokens:,} tokens"
                    self.announce(f"continuing after {done}")
                progress = write(begin)
            except tokenizing.ChangedError as error:
                self.announce(f"{error}: it starts again from the beginning")
                with self.work.writing():
                    self.work.clear()
                progress = write(tokenizing.TokenizingProgress())
        if progress != begin:
            self.work.remove_output()  # it was made of less text
        if not progress.written.tokens:
            self.work.clear()
            raise DataError(f"{self.source.name} holds no text that becomes tokens: name another source")
        return progress

    def _save(self, progress: tokenizing.TokenizingProgress) -> None:
        self.work.save({"identity": self.output.identity, "complete": False, "progress": asdict(progress)})

    @contextlib.contextmanager
    def _bar(self, description: str, total: int | None) -> Iterator[outputs.Advance]:
        with self.bar(description, total) as advance:
            yield advance or (lambda _amount: None)


def _check_place(job: TextJob) -> None:
    outputs.check_name(job.output)
    if job.data.path is None:
        return
    text = Path(job.data.path).expanduser()
    # Resolved, as a link may lead into the text too.
    if text.is_dir() and job.output.resolve().parent.is_relative_to(text.resolve()):
        raise ConfigError(f"OUTPUT ({job.output}) must lie outside INPUT ({text}), or it would be read as text")


DTYPES = ("uint16", "uint32")
# Ids that are read at once.
_BLOCK = 1 << 22
# A longer document becomes several sequences, as the index has 31 bits for the size of a sequence.
_LONGEST_SEQUENCE = 1 << 30
# Ids of a vocabulary have a high half below this: no vocabulary has 16 · 2^16 tokens.
_HIGH_HALVES = 16


@dataclass(frozen=True)
class RawJob:
    """A file of ids that is to be converted.

    Attributes:
        path: file of little-endian ids, back to back.
        output: prefix of the data set.
        dtype: dtype of the ids; None: the bytes decide.
        eod_token: id that ends each document; None: the tokenizer's, and without a tokenizer the file is one document.
        tokenizer: tokenizer that made the ids; None if it is unknown.
    """

    path: Path
    output: Path
    dtype: str | None = None
    eod_token: int | None = None
    tokenizer: str | None = None


def convert_raw(job: RawJob, *, force: bool, announce: Callable[[str], None]) -> outputs.PreparationOutcome:
    """Makes the data set of `job`, unless it is there already.

    Raises:
        DataError: the file holds no such ids, other data are at the output, or the disk is too small.
    """
    outputs.check_name(job.output)
    if job.output.resolve() == prefix_of(job.path).resolve():
        raise ConfigError(f"OUTPUT ({job.output}) must not be INPUT ({job.path}) itself: give it another name")
    try:
        conversion = _RawConversion(job, announce)
        return conversion.output.produce(lambda: conversion.content, lambda _state: conversion.make(), force=force)
    except OSError as error:
        raise DataError(f"{error.filename or job.path} cannot be read: {reason_of(error)}") from None


class _RawConversion:
    def __init__(self, job: RawJob, announce: Callable[[str], None]) -> None:
        self.job = job
        self.announce = announce
        self.tokenizer: Tokenizer | None = None
        self.end = job.eod_token
        if job.tokenizer is not None:
            self.tokenizer = open_user_tokenizer(job.tokenizer, outputs.ANY_VOCABULARY)
            if self.end is None:
                self.end = self.tokenizer.end_of_document_id
        self.dtype = job.dtype or _looks_like(job.path)
        if job.dtype is None:
            announce(f"reading {job.path} as {self.dtype}, as its bytes look; --token-dtype says otherwise")
        self.tokens = _open(job.path, self.dtype)
        options: dict[str, Any] = {"token_dtype": self.dtype}
        if self.end is not None:
            options["eod_token"] = self.end
        self.output = outputs.Output(job.output, outputs.MEGATRON, job.tokenizer, self.tokenizer, options)

    @cached_property
    def content(self) -> str:
        with self.job.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def make(self) -> Mapping[str, Any]:
        vocab_size = self._vocab_size()
        work = self.output.work
        needed = len(self.tokens) * written_dtype(vocab_size).itemsize
        work_folder.check_room(needed, 0, self.job.output, self.announce, packed=False)
        with work.writing(), contextlib.ExitStack() as files:
            work.clear()
            index = tokenizing.open_index(files, work.folder, vocab_size, tokenizing.WrittenCounts())
            self._copy(index)
            tokenizing.finish_index(index, work.folder)
            to_disk(index.files[0])
            source = {
                "name": str(self.job.path),
                "sha256": self.content,
                "documents": index.documents,
                "bytes": self.tokens.nbytes,
            }
            counts = {"dtype": index.dtype.name, "sequences": index.sequences, "tokens": len(self.tokens)}
            return self.output.complete(source, vocab_size, closes=True, **counts)

    def _vocab_size(self) -> int:
        """The vocabulary of the tokenizer; without one, the smallest that has all ids."""
        highest = max(int(block.max()) for block in self._blocks())
        size = highest + 1 if self.tokenizer is None else self.tokenizer.vocab_size
        limit = min(size, outputs.ANY_VOCABULARY)
        if highest >= limit:
            raise DataError(
                f"{self.job.path}: the highest id ({highest}), read as {self.dtype}, must be below {limit}, the "
                "vocabulary: name the tokenizer that made the ids, or another --token-dtype"
            )
        return size

    def _copy(self, index: UnfinishedIndex) -> None:
        """Writes all tokens; a document ends after each `end`, and at the end of the file."""
        no_ends = np.empty(0, dtype=np.int64)
        begun = 0  # tokens of the sequence whose size is not written yet
        in_document = False
        for block in self._blocks():
            ends = no_ends
            if self.end is not None:
                ends = np.flatnonzero(block == self.end) + 1
            # The first document of a block began `begun` tokens before it.
            sizes = np.diff(np.concatenate([np.array([-begun]), ends]))
            index.extend(block, sizes, np.arange(1, len(sizes) + 1))
            if len(ends):
                begun = len(block) - int(ends[-1])
                in_document = begun > 0
            else:
                begun += len(block)
                in_document = True
            if begun >= _LONGEST_SEQUENCE:
                index.extend(block[:0], np.array([begun]), no_ends)
                begun = 0
        if in_document:
            last = np.array([begun] if begun else [], dtype=np.int64)
            index.extend(self.tokens[:0], last, np.array([len(last)]))

    def _blocks(self) -> list[npt.NDArray[np.integer[Any]]]:
        return [self.tokens[start : start + _BLOCK] for start in range(0, len(self.tokens), _BLOCK)]


def _looks_like(path: Path) -> str:
    """The dtype that the ids seem to have: in 32-bit ids, every other 16-bit half is near 0."""
    with path.open("rb") as file:
        beginning = file.read(_BLOCK)
    halves = np.frombuffer(beginning[: len(beginning) // 4 * 4], dtype="<u2")[1::2]
    is_wide = path.stat().st_size % 4 == 0 and len(halves) > 0 and int(halves.max()) < _HIGH_HALVES
    return DTYPES[is_wide]


def _open(path: Path, dtype: str) -> npt.NDArray[np.integer[Any]]:
    read = np.dtype(dtype).newbyteorder("<")
    size = path.stat().st_size
    if size == 0 or size % read.itemsize:
        raise DataError(
            f"the size of {path} ({size} bytes) must be above 0 and a multiple of {read.itemsize}, for ids of {dtype}: "
            "the file is cut off, or holds something else"
        )
    tokens: npt.NDArray[np.integer[Any]] = np.asarray(np.memmap(path, dtype=read, mode="r"))
    return tokens
