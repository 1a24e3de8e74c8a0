"""Samples that an object of the user's own gives: `hooks.data=package.module:Name`.

It is called as `Name(config, part)` with the part `train` or `eval`, and returns an object with `len(samples)` and
`samples[number]`, such as a list or a torch `Dataset`; or None if there is no such part. A sample is a row of 2 to
S + 1 token ids: the model reads all but the last, and predicts all but the first. A shorter one is padded. It is the
same whenever and on whichever rank it is asked for; threads may ask at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.base.errors import RAISED, DataError, error_text, raise_problems
from shardwise.base.user_code import accepts, load_user_object
from shardwise.config import Config
from shardwise.data.formats.prepared_data import PreparedData, document_ends, tokenizer_in_cache, tokenizer_of_tokens
from shardwise.data.request import DataRequest
from shardwise.data.rows import PART_NAMES, PARTS, IntArray, Part, json_digest, part_sizes_text
from shardwise.data.samples.batch import Batches
from shardwise.data.samples.causal import DocumentEnds, RowBatches


@dataclass(frozen=True)
class _CheckedSamples:
    """The samples of a part, checked as they are read; `path` is `hooks.data`, for messages."""

    samples: Sequence[Any]
    path: str
    length: int
    vocab_size: int

    def __len__(self) -> int:
        return len(self.samples)

    def row(self, number: int) -> IntArray:
        """The token ids of a sample; DataError if it cannot be read, or is no row of tokens."""
        try:
            sample = self.samples[number]
            row = np.asarray(sample)
        except RAISED as error:
            raise DataError(f"hooks.data ({self.path}): sample {number} cannot be read: {error_text(error)}") from error
        fault = None
        if row.ndim == 0:
            fault = f"of type {type(sample).__name__}"
        elif row.ndim != 1 or row.dtype.kind not in "iu":
            fault = f"{row.dtype} of shape {row.shape}"
        elif not 2 <= len(row) <= self.length + 1:
            fault = f"{len(row)} of them"
        elif row.min() < 0 or row.max() >= self.vocab_size:
            fault = f"ids from {row.min()} to {row.max()}"
        if fault is not None:
            raise DataError(
                f"hooks.data ({self.path}): sample {number} must be a row of 2 to train.sequence_length + 1 "
                f"({self.length + 1}) whole numbers below model.vocab_size ({self.vocab_size}), and it is {fault}"
            )
        return row.astype(np.int64)


@dataclass(frozen=True)
class _PreparedSamples(PreparedData):
    parts: Mapping[Part, _CheckedSamples]

    def count(self, part: Part) -> int:
        if part not in self.parts:
            return 0
        return len(self.parts[part]) * self.parts[part].length

    def beginning(self, part: Part, tokens: int) -> list[int]:
        if part not in self.parts:
            return []
        return [int(token) for token in self.parts[part].row(0)[:tokens]]

    def batches(
        self, request: DataRequest, part: Part, *, evaluation: bool = False, tail: bool = False
    ) -> Batches | None:
        if part not in self.parts:
            return None
        return _SampleBatches(self.parts[part], request.seed, document_ends(request.data, self.tokenizer_path))


class _SampleBatches(RowBatches):
    def __init__(self, rows: _CheckedSamples, seed: int, ends: DocumentEnds | None) -> None:
        super().__init__(len(rows), seed, rows.length, ends)
        self.rows = rows

    def row(self, index: int) -> IntArray:
        return self.rows.row(index)


def open_user_samples(config: Config, request: DataRequest) -> _PreparedSamples:
    """Opens the samples of `hooks.data`; only the tokenizer, if one is named, is kept in the data cache."""
    path = request.hook
    assert path is not None
    opener = load_user_samples(path)
    problems: list[str] = []
    tokenizer = tokenizer_of_tokens(request, (), problems)
    if tokenizer is None and request.sample_prompt is not None:
        problems.append(f"log.sample_prompt ({request.sample_prompt!r}) needs data.tokenizer with hooks.data ({path})")
    raise_problems(DataError, problems)
    parts: dict[Part, _CheckedSamples] = {}
    for part in PARTS[:2]:  # there is no test part
        try:
            samples = opener(config, part)
            number = 0 if samples is None else len(samples)
        except RAISED as error:
            raise DataError(
                f"hooks.data ({path}): its {PART_NAMES[part]} part cannot be opened: {error_text(error)}"
            ) from error
        if number:
            parts[part] = _CheckedSamples(samples, path, request.sequence_length, request.vocab_size)
        elif part in request.needed_parts:
            raise DataError(f"hooks.data ({path}) must give at least one sample of the {PART_NAMES[part]} part")
    # Reading all samples to make a digest may take hours: their number, the first and the last one must do.
    ends = {part: [rows.row(0).tolist(), rows.row(len(rows) - 1).tolist()] for part, rows in parts.items()}
    counts: dict[Part, int] = {part: len(rows) for part, rows in parts.items()}
    return _PreparedSamples(
        tokenizer_path=tokenizer_in_cache(request, tokenizer),
        fingerprint=json_digest({"counts": counts, "ends": ends}),
        summary=f"{path}: {part_sizes_text(counts)} samples",
        parts=parts,
    )


def preview_user_samples(request: DataRequest) -> str:
    """The name of the object of `hooks.data`, which is imported and not called."""
    assert request.hook is not None
    load_user_samples(request.hook)
    return f"samples of hooks.data ({request.hook})"


def load_user_samples(path: str) -> Any:
    """The function or class of `hooks.data`; ConfigError if it cannot be imported, or not be called as it will be."""
    return load_user_object(
        "hooks.data",
        path,
        lambda value: callable(value) and accepts(value, None, "train"),
        "a function or class that takes (config, part)",
    )
