"""Sentence pairs with masked tokens, as the HDF5 shards that `shardwise.data.reading.hdf5_files` reads."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.base.errors import ConfigError
from shardwise.base.files import sync_folder, to_disk
from shardwise.data.prepare import outputs, tokenizing, work_folder
from shardwise.data.reading.hdf5_files import library
from shardwise.data.reading.megatron_files import Documents, IndexedFile
from shardwise.data.samples import order, sentence_pairs

SECTION_TOKENS = 1 << 25
"""Tokens of a shard's documents, about, which bound the memory of a process."""
# A document is at most two sections long.
_LONGEST_DOCUMENT = 1 << 26
# Rows that are made at once.
_ROWS = 1024
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
    """One file: the documents `first` to `stop` - 1 of a data set, with the masks of one epoch.

    Attributes:
        seed: seed of the pairs and masks.
        bytes: size of the documents' tokens.
    """

    prefix: Path
    first: int
    stop: int
    seed: int
    epoch: int
    path: Path
    bytes: int


def row_bytes(length: int, predictions: int) -> int:
    """The bytes of a sample on the disk, by the dtypes of `_COLUMNS`."""
    return (4 + 1 + 1) * length + (4 + 4) * predictions + 1


def sections(index: IndexedFile) -> list[tuple[int, int]]:
    """Ranges of consecutive documents of about `SECTION_TOKENS` each; the smallest has half as many."""

    def start_of(document: int) -> int:
        return int(index.starts(np.array([document]))[0])

    total = len(index.tokens)
    number = index.num_documents
    count = total // SECTION_TOKENS
    bounds = [0]
    last = 0
    for part in range(1, count):
        document = bisect.bisect_left(range(number), part * total // count, key=start_of)
        start = start_of(document)
        if min(start - last, total - start) >= SECTION_TOKENS // 2:
            bounds.append(document)
            last = start
    return list(itertools.pairwise([*bounds, number]))


def plan_shards(prefix: Path, folder: Path, name: str, duplicates: int, seed: int) -> list[ShardPlan]:
    """All shards of a data set: each section of documents `duplicates` times, with other pairs and masks each time."""
    index = IndexedFile.open(prefix)
    shards: list[ShardPlan] = []
    for first, stop in sections(index):
        start, end = index.starts(np.array([first, stop])).tolist()
        nbytes = (end - start) * index.tokens.itemsize
        # Sections of equal size must not have the same pairs and masks.
        section_seed = order.mix_integer(seed, first)
        for epoch in range(duplicates):
            path = folder / f"{name}_training_{len(shards)}.hdf5"
            shards.append(ShardPlan(prefix, first, stop, section_seed, epoch, path, nbytes))
    return shards


def write_shard(shard: ShardPlan, vocab_size: int, pairs: Callable[..., sentence_pairs.SentencePairBatches]) -> int:
    """Writes a file, which appears when it is complete; returns its rows. A file that is there is left as it is.

    Args:
        pairs: function that makes the samples of tokens, sentences and a seed.
    """
    h5py = library()
    if shard.path.exists():
        with h5py.File(shard.path, "r") as file:
            return len(file["input_ids"])
    documents = Documents(IndexedFile.open(shard.prefix), shard.first, shard.stop, vocab_size)
    batches = pairs(documents, documents.sentences, seed=shard.seed)
    rows = batches.num_samples
    temporary = shard.path.with_suffix(".unfinished")
    # Python opens the file, as an error of a full disk has no `errno` if h5py opened it.
    with temporary.open("w+b") as raw:
        with h5py.File(raw, "w") as file:
            for start in range(0, rows, _ROWS):
                stop = min(start + _ROWS, rows)
                inputs = batches.global_batch(shard.epoch * rows + start, stop - start).inputs
                # In a shard the unused places of a sample's targets are 0 and not IGNORE.
                values = {column: np.maximum(inputs[name].T, 0) for column, (name, _) in _COLUMNS.items()}
                # All arrays are made before one is filled: so they lie one after another in the file.
                for column, array in values.items():
                    file.require_dataset(column, (rows, *array.shape[1:]), _COLUMNS[column][1])
                for column, array in values.items():
                    file[column][start:stop] = array
        to_disk(raw)
    temporary.replace(shard.path)
    return rows


def _option_problems(options: Mapping[str, Any]) -> list[str]:
    library()
    problems = []
    length = options["sequence_length"]
    predictions = options["max_predictions"]
    try:
        sentence_pairs.chunk_room(length)
    except ConfigError as error:
        problems += [text.replace("train.sequence_length", "--sequence-length") for text in error.problems]
    if not 1 <= predictions <= max(length, 1):
        problems.append(f"--max-predictions ({predictions}) must be in 1 … --sequence-length ({length})")
    if not 0 < options["masked_fraction"] <= 1:
        problems.append(f"--masked-fraction ({options['masked_fraction']}) must be above 0 and at most 1")
    if options["dupe_factor"] < 1:
        problems.append(f"--dupe-factor ({options['dupe_factor']}) must be at least 1")
    return problems


def _disk_bytes(estimate: work_folder.Estimate, options: Mapping[str, Any]) -> int:
    length = options["sequence_length"]
    duplicates: int = options["dupe_factor"]
    rows = estimate.tokens // sentence_pairs.chunk_room(length) + estimate.documents
    return duplicates * rows * row_bytes(length, options["max_predictions"])


def _write(job: outputs.FormatJob) -> dict[str, Any]:
    options = job.options
    folder = job.work.output
    tokenizer = job.tokenizer
    pairs = functools.partial(
        sentence_pairs.SentencePairBatches,
        sequence_length=options["sequence_length"],
        special=tokenizer.pair_tokens(),
        vocab_size=tokenizer.vocab_size,
        masked_fraction=options["masked_fraction"],
        max_predictions=options["max_predictions"],
        continuations=tokenizer.continuations() if options["whole_word"] else None,
    )
    folder.mkdir(exist_ok=True)
    shards = plan_shards(job.prefix, folder, job.name, options["dupe_factor"], options["seed"])
    write = functools.partial(write_shard, vocab_size=tokenizer.vocab_size, pairs=pairs)
    total = sum(shard.bytes for shard in shards)
    rows = 0
    with (
        job.bar("masking", total) as advance,
        tokenizing.Workers.for_masking(len(shards), small=total < tokenizing.SMALL_BYTES) as workers,
    ):
        for shard, written in workers.each(write, shards):
            rows += written
            advance(shard.bytes)
    sync_folder(folder)
    return {"dtype": "int32", "sequences": rows, "tokens": job.counts.tokens, "shards": len(shards)}


HDF5 = outputs.OutputFormat(
    name="hdf5",
    is_folder=True,
    has_pairs=True,
    longest_document=_LONGEST_DOCUMENT,
    option_problems=_option_problems,
    disk_bytes=_disk_bytes,
    write=_write,
)
