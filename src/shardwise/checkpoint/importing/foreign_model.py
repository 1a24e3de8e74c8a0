"""A model of another program, and how it becomes a checkpoint of step 0.

A Hugging Face folder, whichever program spelled the names of its weights.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from shardwise import __version__
from shardwise.base.errors import ConfigError
from shardwise.base.tensor_box import Box
from shardwise.checkpoint.companion_files import beside_weights, token_ids
from shardwise.checkpoint.format.config_json import read_model
from shardwise.checkpoint.format.manifest import MODEL, Manifest, TensorEntry
from shardwise.checkpoint.format.safetensors import DTYPES, FLOATING
from shardwise.checkpoint.format.stored_tensors import StoredTensors, differing_copies, find_sources, segments
from shardwise.checkpoint.format.verify import non_finite, non_finite_text
from shardwise.checkpoint.format.writing import (
    CONFIG,
    MAX_SHARD_BYTES,
    STREAM_BYTES,
    PlannedFile,
    StreamedWeight,
    WrittenFolder,
    tensor_entries,
    to_json,
    write_folder,
)
from shardwise.checkpoint.storage.chunks import FileEntry
from shardwise.checkpoint.storage.root import Buffer, Root
from shardwise.checkpoint.storage.step_folders import step_name
from shardwise.config import FamilyConfig, config_from
from shardwise.config.hugging_face import to_hugging_face
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import placements
from shardwise.models.build import build_model

STEP = 0


@dataclass(frozen=True)
class ForeignModel:
    """A model of another program, whose weights have not been read yet.

    Attributes:
        weights: all canonical weights, in the model's order.
        layout: degrees of parallelism of the source; empty where it is not sharded.
        beside: name → content of other files of the model.
        tokens: ids of special tokens, for `config.json`.
        notes: for the user: settings of the other program that have no counterpart here.
    """

    config: FamilyConfig
    weights: Sequence[StreamedWeight]
    layout: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, bytes] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    @property
    def parameters(self) -> int:
        return sum(math.prod(weight.shape) for weight in self.weights)

    @property
    def dtype(self) -> str:
        """The dtype that most parameters have, as torch names it."""
        sizes: Counter[str] = Counter()
        for weight in self.weights:
            sizes[FLOATING[weight.dtype]] += math.prod(weight.shape)
        return max(sizes, key=lambda name: sizes[name])


def canonical_shapes(model: FamilyConfig) -> dict[str, tuple[int, ...]]:
    """Every canonical tensor of a model, in its order; nothing is allocated."""
    sections = {
        "model": model.model_dump(),
        "train": {"steps": 1, "global_batch": 1, "sequence_length": 1},
        "optimizer": {"lr": 1.0},
    }
    built = build_model(config_from(sections), Group(), sequence_parallel=False, device="meta")
    return {piece.name: piece.shape for _, _, record in placements(built) for piece in record.pieces}


def write_checkpoint(
    opened: ForeignModel,
    root: Root,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int], None] | None = None,
) -> WrittenFolder:
    """Write the checkpoint of step 0 into a folder of checkpoints: weights alone, complete or not at all.

    Raises:
        ConfigError: there is one, or a weight has values that are not finite. StoreError: a file cannot be read or
        written.
    """
    not_finite: Counter[str] = Counter()

    def manifest(entries: Sequence[FileEntry], files: Sequence[PlannedFile]) -> Manifest:
        if not_finite:
            raise ConfigError(f"SOURCE must have finite weights, and it has {non_finite_text(not_finite)}")
        return Manifest(
            step=STEP,
            samples=0,
            position=0,
            tokens=0,
            config={"model": opened.config.model_dump(mode="json")},
            layout=opened.layout,
            schedule={},
            data={},
            rng={},
            versions={"shardwise": __version__, "torch": importlib.metadata.version("torch")},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            optimizer=None,
            files=tuple(entries),
            tensors=tensor_entries(entries, [file.places for file in files]),
        )

    return write_folder(
        root,
        step_name(STEP),
        [replace(weight, read=partial(_counted, weight, not_finite)) for weight in opened.weights],
        {
            **opened.beside,
            CONFIG: to_json({**to_hugging_face(opened.config), "torch_dtype": opened.dtype, **opened.tokens}),
        },
        max_shard_bytes=max_shard_bytes,
        progress=progress,
        manifest=manifest,
    )


def _counted(weight: StreamedWeight, not_finite: Counter[str]) -> Iterator[Buffer]:
    """The bytes of a weight; how many of its values are not finite is added to `not_finite`."""
    for data in weight.read():
        if count := non_finite(memoryview(data).cast("B"), weight.dtype):
            not_finite[weight.name] += count
        yield data


def open_hugging_face(folder: Root, ignore: Collection[str] = ()) -> ForeignModel:
    """The model of a folder with config.json and safetensors weights.

    Args:
        folder: the folder.
        ignore: fields of config.json that change nothing, as the user says.

    Raises:
        ConfigError: it is none that we have, or its weights are not the model's: every mismatch. StoreError: a file
        cannot be read.
    """
    if not (folder / CONFIG).exists():
        raise ConfigError(f"{folder} must hold a {CONFIG} that describes the model: it has none")
    config = read_model(folder / CONFIG, ignore)
    tensors = StoredTensors.of(folder)
    stored = tensors.states[MODEL]
    shapes = canonical_shapes(config)
    sources, problems = find_sources(str(folder), config.family, shapes, stored)
    if not problems:
        copied = {name: names[0] for name, names in sources.items() if len(names) > 1}
        boxes = [(name, box) for name, first in copied.items() for box in _boxes(stored[first])]
        problems = differing_copies(str(folder), tensors, sources, boxes)
    if problems:
        raise ConfigError(problems)
    weights = [
        StreamedWeight(name, stored[source].dtype, shape, partial(_read, tensors, source))
        for name, shape in shapes.items()
        for source in sources[name][:1]
    ]
    return ForeignModel(config, weights, beside=beside_weights(folder), tokens=token_ids(folder / CONFIG))


def _read(tensors: StoredTensors, name: str) -> Iterator[Buffer]:
    for box in _boxes(tensors.states[MODEL][name]):
        yield tensors.read(MODEL, name, box).tobytes()


def _boxes(entry: TensorEntry) -> Iterator[Box]:
    """A tensor, cut so that one box fits into memory."""
    return segments(entry.shape, STREAM_BYTES // DTYPES[entry.dtype].itemsize)
