"""From a checkpoint back into a model and its optimizer, at any layout, precision and bucket size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwise.base.errors import ConfigError, ShardwiseError, listing
from shardwise.checkpoint.collective_reading import CheckpointReader, Want, other_ends, read, verify_rest
from shardwise.checkpoint.format.manifest import MODEL, Manifest
from shardwise.checkpoint.format.stored_tensors import mismatches
from shardwise.checkpoint.format.verify import untiled
from shardwise.checkpoint.storage.root import DamageError, Root
from shardwise.distributed import collectives
from shardwise.distributed.agreement import agree
from shardwise.distributed.mesh import Group, Mesh
from shardwise.distributed.placement import Piece, placements
from shardwise.optim.buckets import Bucket
from shardwise.optim.master_update import may_continue
from shardwise.optim.state import (
    MASTER,
    STEP,
    Number,
    begin_restoring,
    finish_restoring,
    kept_states,
    names_by_bucket,
    state_slices,
    state_tensors,
)
from shardwise.optim.zero import ZeroRedundancyOptimizer

_SHOWN = 3


@dataclass(frozen=True)
class Restored:
    """What was read.

    Attributes:
        manifest: of the checkpoint.
        bytes_read: bytes of files that this rank read, in whole chunks.
        damage: damage in parts of the checkpoint that training does not need, one line each.
    """

    manifest: Manifest
    bytes_read: int
    damage: tuple[str, ...] = ()


def read_manifest(folder: Root, world: Group) -> Manifest:
    """The manifest of a checkpoint, read by the first rank for all.

    That of a 20 B-parameter model by 1,024 ranks is about 100 MB of JSON (benchmarks/startup.py: what that takes).

    Raises:
        ShardwiseError: on every rank, where it is missing, damaged, or of a later version.
    """
    manifest: Manifest | None = None
    problem: ShardwiseError | None = None
    if world.rank == 0:
        try:
            manifest = intact_manifest(folder)
        except ShardwiseError as error:
            problem = error
    manifest, problem = collectives.broadcast_object((manifest, problem), world)
    if problem is not None:
        raise problem
    assert manifest is not None
    return manifest


def intact_manifest(folder: Root) -> Manifest:
    """The manifest of a checkpoint, whose pieces tile its tensors.

    Raises:
        ShardwiseError: as `read_manifest`, on this rank alone.
    """
    manifest = Manifest.read(folder)
    if gaps := untiled(manifest.tensors):
        raise DamageError(f"{folder} is damaged: {'; '.join(gaps[:_SHOWN])}")
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

    Each rank reads what it updates: its ZeRO-1 slices, or, of whole state and of frozen weights, an equal part. What
    the tensor-parallel ranks or the ends of a pipeline share is read once (`reading.py`), and data parallelism
    completes the weights. A matrix that is stored transposed is also read once for all data-parallel ranks, whose
    slices are columns of it.
    Weights come from the stored masters where there are any, so that no rounding is added. The rest of the checkpoint
    (weights beside masters, the tokenizer) is verified by all ranks in equal parts, unless `weights_only`.

    Raises:
        ConfigError: on every rank, the checkpoint is of another model or optimizer: every mismatch.
        DamageError, StoreError: as `reading.read`. The weights are then neither the old nor the new ones.
    """
    states, steps = ([], 0) if weights_only else _optimizer_state(manifest, folder)
    numbers, problems = (None, []) if weights_only else _numbers(manifest, model, optimizer, steps)
    others = [] if weights_only else _optimizer_problems(manifest, model, optimizer, states, folder)
    agree(others + problems + _mismatches(manifest, model, optimizer, states, mesh, folder), mesh.world)
    if not weights_only:
        begin_restoring(optimizer, states, steps, numbers)
    reader = CheckpointReader(folder, manifest)
    wants = list(_wants(manifest, model, optimizer, states, mesh))
    # All data-parallel ranks have copies of the weights that no optimizer changes.
    frozen = [
        Want(_precise(manifest, piece.name), piece.name, piece.box, target, (mesh.dp,))
        for parameter, piece, target in held_pieces(model)
        if not parameter.requires_grad
    ]
    read(reader, [*(want for piece, want in wants if not piece.transposed), *frozen], mesh)
    has_transposed = any(piece.transposed for _, _, record in placements(model) for piece in record.pieces)
    # The slices of the data-parallel ranks are columns of the stored matrix: all of them want a part of each row.
    transposed = [want for piece, want in wants if piece.transposed]
    read(reader, transposed, mesh, mesh.stage if has_transposed else mesh.tp)
    finish_restoring(optimizer)
    damage = () if weights_only else verify_rest(reader, mesh)
    return Restored(manifest, reader.bytes_read, damage)


def _optimizer_problems(
    manifest: Manifest, model: nn.Module, optimizer: ZeroRedundancyOptimizer, states: Sequence[str], folder: Root
) -> list[str]:
    """Why an optimizer cannot go on with the states of a checkpoint: it keeps others, or is of another class."""
    described, problems = manifest.optimizer or {}, list[str]()
    saved, steps = described.get("class"), described.get("steps")
    is_other_class = bool(steps) and isinstance(saved, str) and not may_continue(optimizer.optimizer_class, saved)
    kept, names = kept_states(optimizer), names_by_bucket(model, optimizer)
    buckets_of: dict[frozenset[str], list[Bucket]] = {}
    for bucket in optimizer.buckets:
        buckets_of.setdefault(frozenset(kept[bucket]) - {STEP}, []).append(bucket)
    for ours, buckets in buckets_of.items():
        own = [name for bucket in buckets for name in names[bucket]]
        theirs = {state for state in states if not manifest.tensors[state].keys().isdisjoint(own)} | {
            state
            for state, values in described.get("numbers", {}).items()
            if state != STEP and not (isinstance(values, Mapping) and values.keys().isdisjoint(own))
        }
        if theirs - ours or (steps and ours - theirs) or is_other_class:
            wanted, stored = (listing(sorted(of)) or "nothing" for of in (ours, theirs))
            of_names = f" of {listing(own, most=_SHOWN)}" if len(buckets_of) > 1 else ""
            problems.append(
                f"the optimizer ({optimizer.optimizer_class.__name__}), which keeps {wanted}{of_names}, must keep what "
                f"{folder} holds ({stored}, of {saved or described.get('name')}): make it of the class and with the "
                "options of the one that was saved, or load the weights alone, without an optimizer"
            )
    return problems


def _optimizer_state(manifest: Manifest, folder: Root) -> tuple[list[str], int]:
    """Names of the wrapped optimizer's states, without the master, which belongs to the weights; and its steps."""
    described = manifest.optimizer or {"states": [], "steps": 0}
    names, steps, numbers = described.get("states"), described.get("steps"), described.get("numbers", {})
    are_held = isinstance(names, list) and all(name in manifest.tensors for name in names)
    if not (are_held and type(steps) is int and _are_numbers(numbers)):
        raise ConfigError(f"{folder} names the states of an optimizer that it does not hold: {dict(described)}")
    return [name for name in described["states"] if name != MASTER], steps


def _are_numbers(numbers: object) -> bool:
    """Whether a manifest's value names a number for each state, or one for each canonical tensor."""
    if not isinstance(numbers, dict):
        return False
    of_states = [value.values() if isinstance(value, dict) else [value] for value in numbers.values()]
    try:
        return all(isinstance(float(value), float) for values in of_states for value in values)
    except (TypeError, ValueError):
        return False


def _numbers(
    manifest: Manifest, model: nn.Module, optimizer: ZeroRedundancyOptimizer, steps: int
) -> tuple[list[dict[str, Number]] | None, list[str]]:
    """The numbers of each bucket that a checkpoint holds, and why there are none for a bucket.

    None instead of the numbers: the checkpoint is of an earlier version, which stored only the optimizer's steps.
    """
    stored: Mapping[str, Any] | None = (manifest.optimizer or {}).get("numbers")
    if stored is None:
        return None, []
    names, numbers, problems = names_by_bucket(model, optimizer), list[dict[str, Number]](), list[str]()
    for bucket in optimizer.buckets:
        numbers.append({})
        first = names[bucket][0]
        for state, values in stored.items():
            by_tensor = values if isinstance(values, Mapping) else dict.fromkeys(names[bucket], values)
            numbers[-1][state] = by_tensor.get(first, steps)
            other = next((name for name in names[bucket] if by_tensor.get(name, steps) != numbers[-1][state]), None)
            if other is not None:
                problems.append(
                    f"{first} and {other} must be in parameter groups of their own, as they were when they were saved: "
                    f"their {state} differs ({numbers[-1][state]} and {by_tensor.get(other, steps)})"
                )
    return numbers, problems[:_SHOWN]


def _wants(
    manifest: Manifest, model: nn.Module, optimizer: ZeroRedundancyOptimizer, states: Iterable[str], mesh: Mesh
) -> Iterable[tuple[Piece, Want]]:
    """The slices that this rank updates: of the weights, and of each state."""
    flats = state_tensors(optimizer)
    for part in state_slices(model, optimizer):
        name, copies = part.piece.name, (other_ends(part.piece, mesh),)
        weights = part.of(part.bucket.master.detach())
        yield part.piece, Want(_precise(manifest, name), name, part.box, weights, copies)
        for state in (state for state in states if part.bucket in flats[state]):
            yield part.piece, Want(state, name, part.box, part.of(flats[state][part.bucket]), copies)


def held_pieces(model: nn.Module) -> Iterator[tuple[nn.Parameter, Piece, Tensor]]:
    """Each piece of the model with elements, its parameter, and where its values belong: shape `piece.box.size`."""
    for _, parameter, record in placements(model):
        for piece in record.pieces:
            if piece.box.numel:
                yield parameter, piece, piece.of(parameter.detach())


def _precise(manifest: Manifest, name: str) -> str:
    """The state that holds a weight without rounding."""
    return MASTER if name in manifest.tensors.get(MASTER, {}) else MODEL


def _mismatches(
    manifest: Manifest,
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    states: Sequence[str],
    mesh: Mesh,
    folder: Root,
) -> list[str]:
    """Every way in which the checkpoint's tensors are not the model's; the same on every rank of a pipeline."""
    kept = kept_states(optimizer) if states else {}
    kept_of = {parameter: set(kept.get(bucket, ())) for bucket in optimizer.buckets for parameter in bucket.parameters}
    here = {
        piece.name: (piece.shape, kept_of.get(parameter, set()))
        for _, parameter, record in placements(model)
        for piece in record.pieces
        if math.prod(piece.shape)  # no elements: never written
    }
    everywhere = {
        name: facts for of_rank in collectives.all_gather_objects(here, mesh.pp) for name, facts in of_rank.items()
    }
    shapes = {name: shape for name, (shape, _) in everywhere.items()}
    problems = mismatches(str(folder), shapes, manifest.tensors.get(MODEL, {}))
    for state in dict.fromkeys((MASTER, *states)):
        stored = {name: entry for name, entry in manifest.tensors.get(state, {}).items() if name in shapes}
        needed = [name for name, (_, of_name) in everywhere.items() if state in of_name]
        problems += mismatches(str(folder), shapes, stored, needed=needed, state=state)
    return problems
