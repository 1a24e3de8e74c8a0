"""From a checkpoint back into a model and its optimizer, at any layout, precision and bucket size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from shardwise import comm
from shardwise.checkpoint.agreement import agree, by_layers
from shardwise.checkpoint.reading import Source, Want, read
from shardwise.errors import ShardwiseError
from shardwise.mesh import Group, Mesh
from shardwise.optim import ZeroRedundancyOptimizer
from shardwise.optim.state import MASTER, begin_restoring, finish_restoring, state_slices, state_tensors
from shardwise.placement import placements
from shardwise.store.manifest import Manifest
from shardwise.store.root import DamageError, Root
from shardwise.store.verify import MODEL

_SHOWN = 3


@dataclass(frozen=True)
class Restored:
    """What was read: the manifest, and how many bytes of files this rank read, whole chunks."""

    manifest: Manifest
    bytes_read: int


def read_manifest(folder: Root, world: Group) -> Manifest:
    """The manifest of a checkpoint, read by the first rank for all.

    Raises:
        ShardwiseError: on every rank, where it is missing, damaged, or of a later version.
    """
    manifest: Manifest | None = None
    problem: ShardwiseError | None = None
    if world.rank == 0:
        try:
            manifest = Manifest.read(folder)
        except ShardwiseError as error:
            problem = error
    manifest, problem = comm.broadcast_object((manifest, problem), world)
    if problem is not None:
        raise problem
    assert manifest is not None
    return manifest


def restore(
    folder: Root,
    manifest: Manifest,
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    mesh: Mesh,
    *,
    weights_only: bool = False,
) -> Restored:
    """Set weights, and unless `weights_only` the optimizer's state, to those of a checkpoint; collective.

    Each rank reads what it answers for (its ZeRO-1 slices; with whole state an equal part), once over the
    tensor-parallel ranks (`reading.py`), and data parallelism brings the rest. Weights come from the stored masters
    where there are any, so that no rounding is added.

    Raises:
        ConfigError: on every rank, the checkpoint is of another model or optimizer: every mismatch.
        DamageError: on every rank, bytes do not match their checksums or are missing. The weights are then neither the
        old nor the new ones.
    """
    states = [] if weights_only else _states(manifest)
    agree(_mismatches(manifest, model, states, mesh, folder), mesh.world)
    if states:
        assert manifest.optimizer is not None
        begin_restoring(optimizer, states, int(manifest.optimizer["steps"]))
    source = Source(folder, manifest)
    wants = list(_wants(manifest, model, optimizer, states))
    agree(read(source, wants, mesh.tp, mesh.device), mesh.world, _damage)
    finish_restoring(optimizer)
    return Restored(manifest, source.bytes_read)


def _states(manifest: Manifest) -> list[str]:
    """The wrapped optimizer's own: the master belongs to the weights."""
    return [name for name in (manifest.optimizer or {}).get("states", []) if name != MASTER]


def _wants(
    manifest: Manifest, model: nn.Module, optimizer: ZeroRedundancyOptimizer, states: Iterable[str]
) -> Iterable[Want]:
    tensors = manifest.tensors
    flats = state_tensors(optimizer)
    for each in state_slices(model, optimizer):
        name = each.piece.name
        stored = MASTER if name in tensors.get(MASTER, {}) else MODEL
        yield Want(stored, name, each.box, each.of(each.bucket.master.detach()))
        for state in states:
            yield Want(state, name, each.box, each.of(flats[state][each.bucket]))
    for _, parameter, record in placements(model):
        if not parameter.requires_grad:
            for piece in record.pieces:
                if piece.box.numel:
                    stored = MASTER if piece.name in tensors.get(MASTER, {}) else MODEL
                    yield Want(stored, piece.name, piece.box, piece.of(parameter.detach()))


def _mismatches(manifest: Manifest, model: nn.Module, states: Iterable[str], mesh: Mesh, folder: Root) -> list[str]:
    """In what the checkpoint's tensors are not the model's."""
    pieces = [(piece, p) for _, p, record in placements(model) for piece in record.pieces]
    shapes = {piece.name: piece.shape for piece, _ in pieces if math.prod(piece.shape)}  # no elements: never written
    trained = [piece.name for piece, p in pieces if p.requires_grad and piece.name in shapes]
    stored = manifest.tensors.get(MODEL, {})
    everywhere = {name for names in comm.all_gather_objects(list(shapes), mesh.pp) for name in names}
    unknown = [(name, f"{list(entry.shape)}") for name, entry in stored.items() if name not in everywhere]
    missing = [(name, f"{list(shape)}") for name, shape in shapes.items() if name not in stored]
    misshapen = [
        (name, f"{list(stored[name].shape)} must be {list(shape)}")
        for name, shape in shapes.items()
        if name in stored and stored[name].shape != shape
    ]
    problems = [f"{folder} has {name} {shape}, which the model has not" for name, shape in by_layers(unknown)]
    problems += [f"{folder} lacks {name} {shape}" for name, shape in by_layers(missing)]
    problems += [f"{folder}: shape of {name} {shape}" for name, shape in by_layers(misshapen)]
    for state in states if not problems else ():
        kept = manifest.tensors.get(state, {})
        lacking = [(name, state) for name in trained if name not in kept or kept[name].shape != shapes[name]]
        problems += [f"{folder} lacks the {state} of {name}" for name, state in by_layers(lacking)]
    return problems


def _damage(problems: list[str]) -> DamageError:
    return DamageError("; ".join(problems[:_SHOWN]))
