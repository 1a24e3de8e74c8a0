"""A model that was opened somewhere else, and how it becomes a checkpoint of step 0."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from shardwise import __version__
from shardwise.checkpoint.agreement import mismatch_texts
from shardwise.checkpoint_format.casting import FLOATING
from shardwise.checkpoint_format.folders import partial_name, step_name
from shardwise.checkpoint_format.manifest import MANIFEST, Manifest
from shardwise.checkpoint_format.verify import non_finite, non_finite_text
from shardwise.checkpoint_format.writing import (
    MAX_SHARD_BYTES,
    Weight,
    require_room,
    staged,
    tensor_entries,
    to_json,
    write_small,
    write_weights,
)
from shardwise.config import FamilyConfig, config_from
from shardwise.config.hugging_face import to_hugging_face
from shardwise.errors import ConfigError
from shardwise.hub import INDEX
from shardwise.mesh import Group
from shardwise.models import build_model
from shardwise.placement import placements
from shardwise.storage.root import Buffer, Root

Shapes = Mapping[str, tuple[int, ...]]
STEP = 0


@dataclass(frozen=True)
class Opened:
    """A model whose weights have not been read so far.

    Attributes:
        weights: all canonical ones, in the model's order. layout: how the source was cut. beside: other files of the
        model, by name. tokens: ids of special tokens, for `config.json`. notes: what the user should know.
    """

    config: FamilyConfig
    weights: Sequence[Weight]
    layout: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, bytes] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    @property
    def parameters(self) -> int:
        return sum(_numel(weight) for weight in self.weights)

    @property
    def dtype(self) -> str:
        """That most of the weights have, as torch names it."""
        sizes: Counter[str] = Counter()
        for weight in self.weights:
            sizes[FLOATING[weight.dtype]] += _numel(weight)
        return max(sizes, key=lambda name: sizes[name])


@dataclass(frozen=True)
class Imported:
    """What was written."""

    folder: Root
    files: int
    nbytes: int


def _numel(weight: Weight) -> int:
    return torch.Size(weight.shape).numel()


def canonical_shapes(model: FamilyConfig) -> dict[str, tuple[int, ...]]:
    """Every canonical tensor of a model, in its order; nothing is allocated."""
    sections = {
        "model": model.model_dump(),
        "train": {"steps": 1, "global_batch": 1, "sequence_length": 1},
        "optimizer": {"lr": 1.0},
    }
    built = build_model(config_from(sections), Group(), sequence_parallel=False, device="meta")
    return {piece.name: piece.shape for _, _, record in placements(built) for piece in record.pieces}


def mismatches(where: str, shapes: Shapes, found: Shapes, strange: Iterable[tuple[str, str]] = ()) -> list[str]:
    """In what the tensors that were found are not the model's.

    `found`: by canonical name, or by their own name where they have none. `strange`: (name, dtype) of those whose dtype
    a model cannot have.
    """
    missing = [(name, f"{list(shape)}") for name, shape in shapes.items() if name not in found]
    unknown = [(name, f"{list(shape)}") for name, shape in found.items() if name not in shapes]
    misshapen = [
        (name, f"{list(found[name])} must be {list(shape)}")
        for name, shape in shapes.items()
        if found.get(name, shape) != shape
    ]
    return mismatch_texts(where, missing=missing, unknown=unknown, misshapen=misshapen, strange=strange)


def write_checkpoint(
    opened: Opened,
    root: Root,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int], None] | None = None,
) -> Imported:
    """Write the checkpoint of step 0 into a folder of checkpoints: weights alone, complete or not at all.

    Raises:
        ConfigError: there is one, or a weight has values that are not finite. StoreError: a file cannot be read or
        written.
    """
    final = root / step_name(STEP)
    if final.exists() or final.names():
        raise ConfigError(f"{final} exists already: choose another folder, or remove it")
    root.make()
    require_room(root, opened.nbytes, "the import")
    with staged(root, step_name(STEP), partial_name(STEP)) as staging:
        not_finite: Counter[str] = Counter()
        counted = [replace(each, read=partial(_counted, each, not_finite)) for each in opened.weights]
        written = write_weights(staging, counted, max_shard_bytes, progress)
        if not_finite:
            raise ConfigError(f"SOURCE must have finite weights, and it has {non_finite_text(not_finite)}")
        beside = {"config.json": to_json(_described(opened)), **opened.beside}
        if written.index is not None:
            beside[INDEX] = to_json(written.index)
        entries = [*written.entries, *(write_small(staging / name, data) for name, data in beside.items())]
        manifest = Manifest(
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
            tensors=tensor_entries(entries, written.files),
        )
        (staging / MANIFEST).write(manifest.to_json().encode())
    return Imported(final, len(entries) + 1, sum(entry.bytes for entry in entries))


def _counted(weight: Weight, found: Counter[str]) -> Iterator[Buffer]:
    """The bytes of a weight; how many of its values are not finite is added to `found`."""
    for data in weight.read():
        if count := non_finite(memoryview(data).cast("B"), weight.dtype):
            found[weight.name] += count
        yield data


def _described(opened: Opened) -> dict[str, Any]:
    return {**to_hugging_face(opened.config), "torch_dtype": opened.dtype, **opened.tokens}
