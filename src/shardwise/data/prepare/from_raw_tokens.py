"""A file of raw token ids, as the scripts of nanoGPT and llm.c write it, becomes Megatron's .bin and .idx."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.base.errors import ConfigError, DataError
from shardwise.base.files import reason_of
from shardwise.data.prepare.output import ANY_VOCABULARY, PreparationOutcome, PreparedOutput
from shardwise.data.reading.megatron_files import UnfinishedIndex, megatron_dtype, megatron_prefix
from shardwise.data.reading.raw_tokens import RawTokens
from shardwise.data.rows import Integers
from shardwise.data.tokens.tokenizer import Tokenizer, open_user_tokenizer

# Ids that are read at once.
_BLOCK = 1 << 22
# A longer document becomes several sequences, as the index has 31 bits for the size of a sequence.
_LONGEST_SEQUENCE = 1 << 30


@dataclass(frozen=True)
class RawConversionJob:
    """A file of raw token ids that `data prepare` is to convert."""

    path: Path
    output: Path
    dtype: str | None = None  # dtype of the ids; None: the header or the bytes decide
    # Id that ends each document; None: the header's or the tokenizer's, else the file is one document.
    eod_token: int | None = None
    tokenizer: str | None = None


def convert_raw_tokens(job: RawConversionJob, *, force: bool, announce: Callable[[str], None]) -> PreparationOutcome:
    """Makes a Megatron data set of raw token ids; DataError: the file, the output or the disk does not allow it."""
    if job.output.resolve() == megatron_prefix(job.path).resolve():
        raise ConfigError(f"OUTPUT ({job.output}) must not be INPUT ({job.path}) itself: give it another name")
    try:
        conversion = _RawConversion(job, announce)
        return conversion.output.produce(lambda: conversion.content, conversion.make, force=force)
    except OSError as error:
        raise DataError(f"{error.filename or job.path} cannot be read: {reason_of(error)}") from None


class _RawConversion:
    def __init__(self, job: RawConversionJob, announce: Callable[[str], None]) -> None:
        self.job = job
        self.announce = announce
        self.tokenizer: Tokenizer | None = None
        raw = RawTokens.open(job.path, job.dtype)
        self.tokens = raw.tokens
        self.dtype = raw.tokens.dtype.name
        self.end = raw.end if job.eod_token is None else job.eod_token
        if job.tokenizer is not None:
            self.tokenizer = open_user_tokenizer(job.tokenizer, ANY_VOCABULARY)
            if self.end is None:
                self.end = self.tokenizer.end_of_document_id
        if raw.reading is not None:
            announce(f"reading {job.path} as {raw.reading}")
        if raw.end is not None and job.eod_token is None:
            announce(f"its documents are separated by {raw.end}; --eod-token names another id")
        options: dict[str, Any] = {"token_dtype": self.dtype}
        if self.end is not None:
            options["eod_token"] = self.end
        self.output = PreparedOutput(job.output, job.tokenizer, self.tokenizer, options)

    @cached_property
    def content(self) -> str:
        with self.job.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def make(self, _progress: None) -> Mapping[str, Any]:
        vocab_size = self._vocab_size()
        output = self.output
        needed = len(self.tokens) * megatron_dtype(vocab_size).itemsize
        output.require_room(needed, self.announce)
        with output.writing(), UnfinishedIndex(output.made, vocab_size) as index:
            self._copy(index)
            index.finish()
            source = {
                "name": str(self.job.path),
                "sha256": self.content,
                "documents": index.documents,
                "bytes": self.tokens.nbytes,
            }
            counts = {"dtype": index.dtype.name, "sequences": index.sequences, "tokens": len(self.tokens)}
            return output.complete(source, vocab_size, closes=True, **counts)

    def _vocab_size(self) -> int:
        """The vocabulary of the tokenizer; without one, the smallest that has all ids."""
        edges = [int(edge) for block in self._blocks() for edge in (block.min(), block.max())]
        lowest, highest = min(edges), max(edges)
        if lowest < 0:
            raise DataError(f"{self.job.path}: the lowest id ({lowest}) must be at least 0: leave out what is no token")
        size = highest + 1 if self.tokenizer is None else self.tokenizer.vocab_size
        limit = min(size, ANY_VOCABULARY)
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

    def _blocks(self) -> list[Integers]:
        return [self.tokens[start : start + _BLOCK] for start in range(0, len(self.tokens), _BLOCK)]
