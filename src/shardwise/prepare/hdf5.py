"""Sentence pairs with masked tokens, as the HDF5 shards that `shardwise.data.reading.hdf5` reads."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.data.reading.hdf5 import library
from shardwise.data.reading.megatron import IndexedFile
from shardwise.data.samples.documents import Documents
from shardwise.data.samples.hashing import mix_integer
from shardwise.data.samples.pairs import SentencePairBatches
from shardwise.data.tokens.tokenizer import PairTokens
from shardwise.files import to_disk

SECTION_TOKENS = 1 << 25
"""About how many tokens the documents of a shard have, which bounds the memory of a process."""
_ROWS = 1024
"""Rows that are made at once."""


@dataclass(frozen=True)
class PairOptions:
    """What samples are like."""

    sequence_length: int
    max_predictions: int
    masked_fraction: float
    seed: int
    special: PairTokens
    vocab_size: int
    continuations: npt.NDArray[np.bool_] | None


@dataclass(frozen=True)
class Shard:
    """One file: the documents `first` to before `after` of a data set, in the masks of one epoch.

    Attributes:
        bytes: of the documents' tokens.
    """

    prefix: Path
    first: int
    after: int
    epoch: int
    path: Path
    bytes: int
    options: PairOptions


def row_bytes(length: int, predictions: int) -> int:
    """The bytes of a sample on the disk."""
    return (4 + 1 + 1) * length + (4 + 4) * predictions + 1


def sections(index: IndexedFile) -> list[tuple[int, int]]:
    """Consecutive documents, first and after, of about `SECTION_TOKENS` each; the least one has half as many."""
    total, number = len(index.tokens), index.num_documents
    bounds, last = [0], 0
    for part in range(1, total // SECTION_TOKENS):
        target = part * total // (total // SECTION_TOKENS)
        document = bisect.bisect_left(range(number), target, key=lambda each: int(index.starts(np.array([each]))[0]))
        start = int(index.starts(np.array([document]))[0])
        if min(start - last, total - start) >= SECTION_TOKENS // 2:
            bounds.append(document)
            last = start
    bounds.append(number)
    return list(itertools.pairwise(bounds))


def shards(prefix: Path, folder: Path, name: str, duplicates: int, options: PairOptions) -> Iterator[Shard]:
    """All shards of a data set: each section of documents as often as it is to be there, in other masks each time."""
    index, number = IndexedFile.open(prefix), 0
    for first, after in sections(index):
        start, end = index.starts(np.array([first, after])).tolist()
        for epoch in range(duplicates):
            path = folder / f"{name}_training_{number}.hdf5"
            yield Shard(prefix, first, after, epoch, path, (end - start) * index.tokens.itemsize, options)
            number += 1


def write_shard(shard: Shard) -> int:
    """Writes a file, which appears when it is complete; returns its rows. One that is there is left as it is."""
    h5py = library()
    if shard.path.exists():
        with h5py.File(shard.path, "r") as file:
            return len(file["input_ids"])
    batches = _batches(shard)
    options, rows = shard.options, batches.num_samples
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "input_ids": ((rows, options.sequence_length), "i4"),
        "input_mask": ((rows, options.sequence_length), "i1"),
        "segment_ids": ((rows, options.sequence_length), "i1"),
        "masked_lm_positions": ((rows, options.max_predictions), "i4"),
        "masked_lm_ids": ((rows, options.max_predictions), "i4"),
        "next_sentence_labels": ((rows,), "i1"),
    }
    temporary = shard.path.with_suffix(".unfinished")
    # As Python's own file: h5py's errors of a full disk are none of the system's.
    with temporary.open("w+b") as raw:
        with h5py.File(raw, "w") as file:
            arrays = {key: file.create_dataset(key, shape, dtype) for key, (shape, dtype) in shapes.items()}
            for start in range(0, rows, _ROWS):
                after = min(start + _ROWS, rows)
                for key, values in _rows(batches, shard.epoch, start, after).items():
                    arrays[key][start:after] = values
        to_disk(raw)
    temporary.replace(shard.path)
    return rows


def _batches(shard: Shard) -> SentencePairBatches:
    options = shard.options
    documents = Documents(IndexedFile.open(shard.prefix), shard.first, shard.after, options.vocab_size)
    return SentencePairBatches(
        documents,
        documents.sentences,
        options.sequence_length,
        mix_integer(options.seed, shard.first),
        special=options.special,
        vocab_size=options.vocab_size,
        masked_fraction=options.masked_fraction,
        max_predictions=options.max_predictions,
        continuations=options.continuations,
    )


def _rows(batches: SentencePairBatches, epoch: int, start: int, after: int) -> dict[str, Any]:
    found = batches.global_batch(epoch * batches.num_samples + start, after - start).inputs
    return {
        "input_ids": found["ids_SB"].T,
        "input_mask": found["mask_SB"].T,
        "segment_ids": found["token_types_SB"].T,
        "masked_lm_positions": found["positions_PB"].T,
        "masked_lm_ids": np.maximum(found["targets_PB"].T, 0),
        "next_sentence_labels": found["next_sentence_B"],
    }
