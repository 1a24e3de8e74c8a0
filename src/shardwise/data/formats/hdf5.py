"""HDF5 shards of sentence pairs that were masked when the shards were made, for BERT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from shardwise.base.errors import DataError, Problems, listing, raise_problems
from shardwise.base.units import counted, size
from shardwise.config import DataConfig
from shardwise.config.data import MASKED_FRACTION
from shardwise.data import cache
from shardwise.data.formats import inspections, prepared_data
from shardwise.data.formats.data_format import DataFormat, Inspection, LengthStatistics
from shardwise.data.reading import content, data_manifest, hdf5_files
from shardwise.data.request import DataRequest
from shardwise.data.rows import PART_NAMES, Part, json_digest, part_bounds, part_sizes_text
from shardwise.data.samples import batch, sentence_pairs

# Blocks of all shards together that the fingerprint reads; of each shard the first and the last one at least.
_CHECKED_BLOCKS = 256
_PROBLEMS_SHOWN = 5
# A preview takes a moment: the most shards that it opens.
_PREVIEWED = 8
# An inspection looks at runs of rows, as neighbours lie in one compressed chunk.
_RUNS = 64
_RUN_ROWS = 64


@dataclass(frozen=True)
class _PreparedShards(prepared_data.PreparedData):
    """HDF5 shards, whose parts are rows between two of `bounds` each."""

    shards: hdf5_files.HDF5ShardRows
    bounds: Sequence[int]

    def rows(self, part: Part) -> range:
        """The rows of a part."""
        number = list(PART_NAMES).index(part)
        return range(self.bounds[number], self.bounds[number + 1])

    def count(self, part: Part) -> int:
        """Tokens of a part, padding included."""
        return len(self.rows(part)) * self.shards.length

    def beginning(self, part: Part, tokens: int) -> list[int]:
        """The first tokens of a part, as they are masked."""
        rows = self.rows(part)[: -(-tokens // self.shards.length)]
        ids: list[int] = self.shards.take(np.array(rows, dtype=np.int64))["input_ids"].ravel()[:tokens].tolist()
        return ids

    def batches(
        self, request: DataRequest, part: Part, *, evaluation: bool = False, tail: bool = False
    ) -> batch.Batches | None:
        """The batches of a part, see `PreparedData`; neither `evaluation` nor `tail` makes a difference."""
        rows = self.rows(part)
        if not rows:
            return None
        return sentence_pairs.ShardBatches(self.shards, rows.start, rows.stop, request.seed)


def _open_data(request: DataRequest) -> _PreparedShards:
    data = request.data
    token_types = prepared_data.require_sentence_pairs(request)
    shards = []
    problems = Problems()
    hdf5_files.h5py_library()
    for path in hdf5_files.hdf5_shard_paths(data):
        with problems:
            shards.append(hdf5_files.HDF5Shard.open(path, request.sequence_length))
    if len(problems) > _PROBLEMS_SHOWN:
        left_out = f"{len(problems) - _PROBLEMS_SHOWN} more of the shards of data.path ({data.name}) are wrong too"
        problems[_PROBLEMS_SHOWN:] = [left_out]
    tokenizer = prepared_data.tokenizer_of_tokens(request, _manifests(data), problems)
    raise_problems(DataError, problems)
    rows = hdf5_files.HDF5ShardRows(
        hdf5_files.unpack_hdf5_shards(request.root, shards, request.announce), request.vocab_size, token_types
    )
    bounds = part_bounds(len(rows), data.split_weights)
    for part, (first, stop) in zip(request.needed_parts, pairwise(bounds), strict=False):
        if first == stop:
            problems.append(
                f"the {PART_NAMES[part]} part of data.path {data.name} (0 of {len(rows):,} samples at "
                f"data.split={data.split}) must hold at least one: give more shards or another split"
            )
    raise_problems(DataError, problems)
    # The fingerprint is one of names and of blocks spread over the shards: reading all of them would take minutes.
    blocks = max(2, _CHECKED_BLOCKS // len(shards))
    with content.read_errors("data.path"):
        digests = [[shard.path.name, cache.spread_digest(shard.path, blocks)] for shard in shards]
    return _PreparedShards(
        tokenizer_path=prepared_data.tokenizer_in_cache(request, tokenizer),
        shards=rows,
        bounds=bounds,
        fingerprint=json_digest({"digests": digests, "bounds": bounds}),
        summary=_summary(rows, bounds, request),
    )


def _manifests(data: DataConfig) -> list[Path]:
    return sorted({data_manifest.manifest_of_folder(path.parent) for path in hdf5_files.hdf5_shard_paths(data)})


def _preview(request: DataRequest) -> str:
    prepared_data.require_sentence_pairs(request)
    paths = hdf5_files.hdf5_shard_paths(request.data)
    previewed = [hdf5_files.HDF5Shard.open(path, request.sequence_length) for path in paths[:_PREVIEWED]]
    opened = f", of which {len(previewed)} were opened" if len(previewed) < len(paths) else ""
    return f"{counted(len(paths), 'HDF5 shard')}{opened}"


def _inspect(data: DataConfig, samples: int) -> Inspection:
    paths = hdf5_files.hdf5_shard_paths(data)
    first = hdf5_files.HDF5Shard.open(paths[0])
    # The model is not known, so any id passes; segments are 0 and 1 in every BERT.
    shards = hdf5_files.HDF5ShardRows(
        [first, *(hdf5_files.HDF5Shard.open(path, first.length) for path in paths[1:])], 1 << 31, 2
    )
    number = len(shards)
    rows_B = np.unique(
        np.minimum(np.add.outer(inspections.evenly_spread(number, _RUNS), np.arange(_RUN_ROWS)), number - 1)
    )
    values = shards.take(rows_B)
    leading = shards.take(np.arange(min(samples, number)))
    masked = float(hdf5_files.listed_positions(values["masked_lm_positions"]).sum(axis=1).mean())
    follows = float((values["next_sentence_labels"] == 0).mean())
    sizes = sorted(shard.rows for shard in shards.shards)
    rows_each = f"{sizes[0]:,}"
    if sizes[0] < sizes[-1]:
        rows_each += f" … {sizes[-1]:,}"
    inspection = Inspection(
        str(data.path),
        "HDF5 shards of sentence pairs",
        sum(path.stat().st_size for path in paths),
        rows=[
            ("shards", f"{len(paths):,} of {rows_each} samples"),
            ("samples", f"{number:,} of {first.length:,} tokens, at most {shards.predictions:,} of them masked"),
            ("masked", f"{masked:.1f} tokens a sample"),
            ("next sentence", f"follows in {follows:.0%} of the samples, and is a random one in the rest"),
        ],
        counts={
            "shards": len(paths),
            "samples": number,
            "sequence_length": first.length,
            "predictions": shards.predictions,
            "looked_at": len(rows_B),
            "masked_mean": masked,
            "next_sentence_share": follows,
        },
        lengths=LengthStatistics.of("tokens of a sample, without padding", values["input_mask"].sum(axis=1), number),
        manifest=data_manifest.read_manifest(data_manifest.manifest_of_folder(first.path.parent)),
    )
    ids = [row[mask == 1] for row, mask in zip(leading["input_ids"], leading["input_mask"], strict=True)]
    return inspections.inspection_with_tokens(
        inspection, data.tokenizer, ids, [values["input_ids"]], number * first.length
    )


def _summary(shards: hdf5_files.HDF5ShardRows, bounds: Sequence[int], request: DataRequest) -> str:
    number = len(shards.shards)
    total = sum(shard.path.stat().st_size for shard in shards.shards)
    sizes = dict(zip(PART_NAMES, np.diff(bounds).tolist(), strict=True))
    unread = []
    if request.data.max_predictions not in (None, shards.predictions):
        unread.append(f"data.max_predictions ({request.data.max_predictions})")
    if request.data.masked_fraction != MASKED_FRACTION:
        unread.append(f"data.masked_fraction ({request.data.masked_fraction})")
    ignored = f"; {listing(unread)} not used, as shards have their masks" if unread else ""
    return (
        f"{request.data.name}: {size(total)}, {counted(number, 'shard')}, {part_sizes_text(sizes)} samples of "
        f"{shards.length:,} tokens, masked when they were made, at most {shards.predictions:,} each{ignored}"
    )


FORMAT = DataFormat(
    name="hdf5",
    contents="masked pairs",
    is_at=hdf5_files.names_hdf5_shards,
    open_data=_open_data,
    preview=_preview,
    inspect=_inspect,
    manifests=_manifests,
)
