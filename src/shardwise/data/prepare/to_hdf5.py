"""Sentence pairs with masked tokens, as the HDF5 shards that `shardwise.data.reading.hdf5_files` reads."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.base.files import to_disk
from shardwise.data.reading.hdf5_files import library
from shardwise.data.reading.megatron_files import IndexedFile
from shardwise.data.samples.causal import Documents
from shardwise.data.samples.order import mix_integer
from shardwise.data.samples.sentence_pairs import SentencePairBatches

SECTION_TOKENS = 1 << 25
"""About how many tokens the documents of a shard have, which bounds the memory of a process."""
_ROWS = 1024
"""Rows that are made at once."""
_COLUMNS = {
    "input_ids": ("ids_SB", "i4"),
    "input_mask": ("mask_SB", "i1"),
    "segment_ids": ("token_types_SB", "i1"),
    "masked_lm_positions": ("positions_PB", "i4"),
    "masked_lm_ids": ("targets_PB", "i4"),
    "next_sentence_labels": ("next_sentence_B", "i1"),
}
"""The arrays of a file: the input of a batch that each has, and its dtype."""


@dataclass(frozen=True)
class ShardPlan:
    """One file: the documents `first` to before `after` of a data set, with the masks of one epoch.

    Attributes:
        seed: that of the pairs and masks.
        bytes: of the documents' tokens.
    """

    prefix: Path
    first: int
    after: int
    seed: int
    epoch: int
    path: Path
    bytes: int


def row_bytes(length: int, predictions: int) -> int:
    """The bytes of a sample on the disk."""
    return (4 + 1 + 1) * length + (4 + 4) * predictions + 1


def sections(index: IndexedFile) -> list[tuple[int, int]]:
    """Consecutive documents, first and after, of about `SECTION_TOKENS` each; the smallest has half as many."""

    def start_of(document: int) -> int:
        return int(index.starts(np.array([document]))[0])

    total, number = len(index.tokens), index.num_documents
    count = total // SECTION_TOKENS
    bounds, last = [0], 0
    for part in range(1, count):
        document = bisect.bisect_left(range(number), part * total // count, key=start_of)
        start = start_of(document)
        if min(start - last, total - start) >= SECTION_TOKENS // 2:
            bounds.append(document)
            last = start
    return list(itertools.pairwise([*bounds, number]))


def plan_shards(prefix: Path, folder: Path, name: str, duplicates: int, seed: int) -> list[ShardPlan]:
    """All shards of a data set: each section of documents as many times as `duplicates` says, in other masks each."""
    index = IndexedFile.open(prefix)
    shards: list[ShardPlan] = []
    for first, after in sections(index):
        start, end = index.starts(np.array([first, after])).tolist()
        own, size = mix_integer(seed, first), (end - start) * index.tokens.itemsize
        for epoch in range(duplicates):
            path = folder / f"{name}_training_{len(shards)}.hdf5"
            shards.append(ShardPlan(prefix, first, after, own, epoch, path, size))
    return shards


def write_shard(shard: ShardPlan, vocab_size: int, pairs: Callable[..., SentencePairBatches]) -> int:
    """Writes a file, which appears when it is complete; returns its rows. One that is there is left as it is.

    Args:
        pairs: makes the samples of tokens, sentences and a seed.
    """
    h5py = library()
    if shard.path.exists():
        with h5py.File(shard.path, "r") as file:
            return len(file["input_ids"])
    documents = Documents(IndexedFile.open(shard.prefix), shard.first, shard.after, vocab_size)
    batches = pairs(documents, documents.sentences, seed=shard.seed)
    rows = batches.num_samples
    temporary = shard.path.with_suffix(".unfinished")
    # Python opens the file, as an error of a full disk has no `errno` where h5py does.
    with temporary.open("w+b") as raw:
        with h5py.File(raw, "w") as file:
            for start in range(0, rows, _ROWS):
                after = min(start + _ROWS, rows)
                inputs = batches.global_batch(shard.epoch * rows + start, after - start).inputs
                # Where a sample has fewer targets than there is room for, the others are 0 and not IGNORE.
                values = {column: np.maximum(inputs[name].T, 0) for column, (name, _) in _COLUMNS.items()}
                # All arrays are made before one is filled: so they lie one after another in the file.
                for column, array in values.items():
                    file.require_dataset(column, (rows, *array.shape[1:]), _COLUMNS[column][1])
                for column, array in values.items():
                    file[column][start:after] = array
        to_disk(raw)
    temporary.replace(shard.path)
    return rows
