"""The record of a format: all that commands ask of it. Each module of a format has one, `FORMAT`.

A format is one module here and its name in `shardwise.config.data.DataFormatName`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardwise.config import DataConfig
from shardwise.data.formats.prepared_data import PreparedData
from shardwise.data.request import DataRequest
from shardwise.data.rows import IntArray
from shardwise.data.samples.batch import TokenSource

_MOST_BINS = 12
DataContents = Literal["tokens", "masked pairs", "text", "text or tokens", "conversations"]
"""Kinds of samples: tokens in a row, sentence pairs whose tokens are masked already, text that becomes tokens, or
conversations whose answers are learned."""


@dataclass(frozen=True)
class LengthStatistics:
    """Statistics that `data inspect` shows of the lengths of documents, samples or rows."""

    what: str  # unit and thing, such as "tokens of a document"
    counted: int
    number: int | None  # number of lengths in the data; None if that is not known
    least: int
    most: int
    mean: float
    median: float
    bins: Sequence[tuple[int, int, int]]  # shortest and longest length of each bin, and the number of lengths in it

    @classmethod
    def of(cls, unit: str, lengths: IntArray, number: int | None) -> LengthStatistics:
        """The statistics of at least one length; bins are powers of 2 wide, or of 4 if these would be too many."""
        least = int(lengths.min())
        most = int(lengths.max())
        step = 1 if most.bit_length() - least.bit_length() < _MOST_BINS else 2
        # A length of b bits lies in 2^(b-1) … 2^b - 1; 0 has no bits, and is a bin by itself.
        bits = np.ceil(np.log2(lengths + 1)).astype(np.int64)
        bins = []
        for low in range(int(bits.min()), int(bits.max()) + 1, step):
            inside = lengths[(bits >= low) & (bits < low + step)]
            first = (1 << low) >> 1
            last = (1 << (low + step - 1)) - 1
            bins.append((max(first, least), min(max(last, first), most), len(inside)))
        return cls(unit, len(lengths), number, least, most, float(lengths.mean()), float(np.median(lengths)), bins)


@dataclass(frozen=True)
class InspectedSample:
    """The beginning of a document or row that `data inspect` shows: its text if it is known, its ids if it has some."""

    number: int
    text: str | None
    ids: Sequence[int] | None


@dataclass(frozen=True)
class Inspection:
    """The contents of data as `data inspect` shows them: `rows` and `notes` for a user, `counts` for programs."""

    path: str
    format: str
    bytes: int
    rows: Sequence[tuple[str, str]]
    counts: Mapping[str, Any]
    lengths: LengthStatistics | None = None
    samples: Sequence[InspectedSample] = ()
    manifest: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class FirstDocuments:
    """The first documents of data, whose packed samples `data inspect` shows; `is_all`: there are no more."""

    tokens: TokenSource
    bounds: IntArray
    is_all: bool


@dataclass(frozen=True)
class DataFormat:
    """A format of training data, as `data.format` names it.

    Each function raises a DataError with every problem of the data.

    Attributes:
        name: value of `data.format`; "text" stands for jsonl and parquet too.
        open_data: opens the data of a run; results that take long to make are kept in the data cache.
        preview: describes the data to the user of a dry run in a moment. Of the network, only the hub is asked.
        inspect: describes the data, with the first samples, whose number is given.
        is_at: True if names at a path show that data of the format lie there. No file is opened; an OSError means that
            the system refuses the path.
        is_in: True if the first row at `data.path` shows it; asked only if no names show a format.
        manifests: the files that may say which tokenizer made tokens; they need not be there.
        most_tokens: the number that the tokens of the data cannot exceed, in a moment; None if it takes longer, or if
            the number is above a limit, which is given.
        first_documents: the first documents, whose packed samples an inspection shows; None if it shows no samples of
            the model.
    """

    name: str
    contents: DataContents
    open_data: Callable[[DataRequest], PreparedData]
    preview: Callable[[DataRequest], str]
    inspect: Callable[[DataConfig, int], Inspection]
    is_at: Callable[[Path], bool] = lambda _path: False
    is_in: Callable[[DataConfig], bool] = lambda _data: False
    has_splits: bool = False
    manifests: Callable[[DataConfig], Sequence[Path]] = lambda _data: ()
    most_tokens: Callable[[DataRequest, int], int | None] = lambda _request, _limit: None
    first_documents: Callable[[DataConfig], FirstDocuments] | None = None

    @property
    def holds_tokens(self) -> bool:
        """True if the data are tokens in any case, which are read as they are."""
        return self.contents in ("tokens", "masked pairs")
