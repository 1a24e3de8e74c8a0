"""From a checkpoint back into a model and its optimizer, at any layout, precision and bucket size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from shardwise.base.errors import ConfigError, DamageError, ShardwiseError, listing
from shardwise.checkpoint.collective_reading import CheckpointReader, ReadRequest, read_tensors, verify_unread
from shardwise.checkpoint.format.manifest import MODEL, Manifest, untiled_tensors
from shardwise.checkpoint.format.stored_tensors import tensor_mismatches
from shardwise.checkpoint.storage.root import Root
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group, Mesh
from shardwise.distributed.placement import Piece, placements
from shardwise.optim.buckets import Bucket
from shardwise.optim.state import (
    MASTER,
    OPTION,
    STEP,
    Number,
    begin_restoring,
    finish_restoring,
    kept_states,
    names_by_bucket,
    state_slices,
    state_tensors,
)
from shardwise.optim.wrapped_class import may_continue
from shardwise.optim.zero import ZeroRedundancyOptimizer

_Result = TypeVar("_Result")
_SHOWN = 3


@dataclass(frozen=True)
class _Restored:
    """The result of the restore of a checkpoint."""

    manifest: Manifest
    bytes_read: int  # bytes of files that this rank read, in whole chunks
    damage: tuple[str, ...] = ()  # damage in parts of the checkpoint that training does not need, one line each


def on_first_rank(work: Callable[[], _Result], world: Group) -> _Result:
    """Do work on a checkpoint on the first rank; return its result or raise its error on every rank. Collective."""
    result: _Result | None = None
    problem: ShardwiseError | None = None
    if world.rank == 0:
        try:
            result = work()
        except ShardwiseError as error:
            problem = error
    result, problem = collectives.broadcast_object((result, problem), world)
    if problem is not None:
        raise problem
    return cast("_Result", result)


def read_manifest(folder: Root, world: Group) -> Manifest:
    """The manifest of a checkpoint, read by the first rank for all.

    That of a 20 B-parameter model by 1,024 ranks is about 100 MB of JSON (benchmarks/startup.py: what that takes).

    Raises:
        ShardwiseError: it is missing, damaged, or of a later version; raised on every rank.
    """
    return on_first_rank(lambda: intact_manifest(folder), world)


def intact_manifest(folder: Root) -> Manifest:
    """The manifest of a checkpoint, whose pieces tile its tensors; errors as of `read_manifest`, on this rank alone."""
    manifest = Manifest.read(folder)
    if gaps := untiled_tensors(manifest.tensors):
        raise DamageError(f"{folder} is damaged: {'; '.join(gaps[:_SHOWN])}")
    return manifest


def restore_checkpoint(
    folder: Root,
    manifest: Manifest,
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    mesh: Mesh,
    *,
    weights_only: bool = False,
) -> _Restored:
    """Set weights, and unless `weights_only` the optimizer's state, to those of a checkpoint; collective.

    Each rank reads the values that it updates, which are its ZeRO-1 slices, or, of whole state and of frozen weights,
    an equal part. Values that the tensor-parallel ranks or the ends of a pipeline share are read once
    (`collective_reading.py`), and data parallelism completes the weights. A matrix that is stored transposed is also
    read once for all data-parallel ranks, whose slices are columns of it.
    Weights come from the stored masters where there are any, so that no rounding is added. The rest of the checkpoint
    (weights beside masters, the tokenizer) is verified by all ranks in equal parts, unless `weights_only`.

    Raises:
        ConfigError: the checkpoint is of another model or optimizer: every mismatch, raised on every rank.
        DamageError, StoreError: as `collective_reading.read`. The weights are then neither the old nor the new ones.
    """
    # All problems are agreed on before anything is changed.
    states: list[str] = []
    steps = 0
    numbers: list[dict[str, Number]] | None = None
    problems: list[str] = []
    if not weights_only:
        states, steps = _optimizer_state(manifest, folder)
        problems += _optimizer_problems(manifest, model, optimizer, states, folder)
        numbers, number_problems = _numbers_by_bucket(manifest, model, optimizer, steps)
        problems += number_problems
    collectives.raise_on_all_ranks(problems + _mismatches(manifest, model, optimizer, states, mesh, folder), mesh.world)
    if not weights_only:
        begin_restoring(optimizer, states, steps, numbers)
    reader = CheckpointReader(folder, manifest)
    _read_slices(reader, model, optimizer, states, mesh)
    finish_restoring(optimizer)
    damage = () if weights_only else verify_unread(reader, mesh)
    return _Restored(manifest, reader.bytes_read, damage)


def tied_ends(piece: Piece, mesh: Mesh) -> Group:
    """The pipeline ranks that restore the same piece: of a tied weight both ends, else this rank alone."""
    is_along_pipeline = piece.copies.size > 1 and set(piece.copies.ranks) <= set(mesh.pp.ranks)
    return piece.copies if is_along_pipeline else Group()


def local_pieces(model: nn.Module, *, frozen: bool = False) -> Iterator[tuple[Piece, Tensor]]:
    """Each piece of the model to restore, and the view of its values: shape `piece.box.size`.

    `frozen`: those of frozen parameters alone.
    """
    for _, parameter, record in placements(model):
        for piece in record.pieces:
            if piece.box.numel and not (frozen and parameter.requires_grad):
                yield piece, piece.of(parameter.detach())


# ---- reading


def _read_slices(
    reader: CheckpointReader, model: nn.Module, optimizer: ZeroRedundancyOptimizer, states: Sequence[str], mesh: Mesh
) -> None:
    """Read this rank's slices of weights and states, and its frozen weights; collective over the mesh."""
    # The slices of the data-parallel ranks are columns of a transposed matrix: all of them need a part of each row.
    requests = list(_slice_requests(reader.manifest, model, optimizer, states, mesh))
    transposed = [request for piece, request in requests if piece.transposed]
    plain = [request for piece, request in requests if not piece.transposed]
    # All data-parallel ranks have copies of the weights that no optimizer changes.
    for piece, target in local_pieces(model, frozen=True):
        state = _precise_state(reader.manifest, piece.name)
        plain.append(ReadRequest(state, piece.name, piece.box, target, (piece.replicas or mesh.replicas,)))
    read_tensors(reader, plain, mesh)
    # Asked of the model, not of the requests: a rank without any must take part in the stage's reading all the same.
    has_transposed = any(piece.transposed for _, _, record in placements(model) for piece in record.pieces)
    read_tensors(reader, transposed, mesh, mesh.stage if has_transposed else mesh.tp)


def _slice_requests(
    manifest: Manifest, model: nn.Module, optimizer: ZeroRedundancyOptimizer, states: Sequence[str], mesh: Mesh
) -> Iterator[tuple[Piece, ReadRequest]]:
    flats = state_tensors(optimizer)
    for part in state_slices(model, optimizer):
        name = part.piece.name
        copies = (tied_ends(part.piece, mesh),)
        weights = part.of(part.bucket.master.detach())
        yield part.piece, ReadRequest(_precise_state(manifest, name), name, part.box, weights, copies)
        for state in states:
            if part.bucket in flats[state]:
                target = part.of(flats[state][part.bucket])
                yield part.piece, ReadRequest(state, name, part.box, target, copies)


def _precise_state(manifest: Manifest, name: str) -> str:
    """The state that holds a weight without rounding."""
    return MASTER if name in manifest.tensors.get(MASTER, {}) else MODEL


# ---- comparing the checkpoint with the model and the optimizer


def _optimizer_state(manifest: Manifest, folder: Root) -> tuple[list[str], int]:
    """Names of the wrapped optimizer's states, without the master, which belongs to the weights; and its steps."""
    described = manifest.optimizer or {"states": [], "steps": 0}
    states = described.get("states")
    steps = described.get("steps")
    are_stored = isinstance(states, list) and all(state in manifest.tensors for state in states)
    if not (are_stored and type(steps) is int and _are_numbers(described.get("numbers", {}))):
        raise ConfigError(f"{folder} names the states of an optimizer that it does not hold: {dict(described)}")
    return [state for state in described["states"] if state != MASTER], steps


def _are_numbers(numbers: object) -> bool:
    """True if a manifest's value names a number for each state, or one for each canonical tensor."""
    if not isinstance(numbers, dict):
        return False
    try:
        for value in numbers.values():
            for number in value.values() if isinstance(value, dict) else [value]:
                float(number)
    except (TypeError, ValueError):
        return False
    return True


def _optimizer_problems(
    manifest: Manifest, model: nn.Module, optimizer: ZeroRedundancyOptimizer, states: Sequence[str], folder: Root
) -> list[str]:
    described = manifest.optimizer or {}
    saved_class = described.get("class")
    has_steps = bool(described.get("steps"))
    is_other_class = (
        has_steps and isinstance(saved_class, str) and not may_continue(optimizer.optimizer_class, saved_class)
    )
    kept = kept_states(optimizer)
    names = names_by_bucket(model, optimizer)
    # Parameters may keep different states, such as those of Muon and AdamW: each set is compared with what is stored.
    buckets_by_states: dict[frozenset[str], list[Bucket]] = {}
    for bucket in optimizer.buckets:
        buckets_by_states.setdefault(frozenset(kept[bucket]) - {STEP}, []).append(bucket)
    problems: list[str] = []
    for needed, buckets in buckets_by_states.items():
        bucket_names = [name for bucket in buckets for name in names[bucket]]
        stored = _stored_states(manifest, states, bucket_names)
        if stored - needed or (has_steps and needed - stored) or is_other_class:
            needed_text = listing(sorted(needed)) or "nothing"
            stored_text = listing(sorted(stored)) or "nothing"
            tensors = f" of {listing(bucket_names, most=_SHOWN)}" if len(buckets_by_states) > 1 else ""
            problems.append(
                f"the optimizer ({optimizer.optimizer_class.__name__}), which keeps {needed_text}{tensors}, must keep "
                f"what {folder} holds ({stored_text}, of {saved_class or described.get('name')}): make it of the class "
                "and with the options of the one that was saved, or load the weights alone, without an optimizer"
            )
    return problems


def _stored_states(manifest: Manifest, states: Sequence[str], names: Sequence[str]) -> set[str]:
    stored = {state for state in states if not manifest.tensors[state].keys().isdisjoint(names)}
    for state, values in (manifest.optimizer or {}).get("numbers", {}).items():
        is_of_others = isinstance(values, Mapping) and values.keys().isdisjoint(names)
        if state != STEP and not state.startswith(OPTION) and not is_of_others:
            stored.add(state)
    return stored


def _numbers_by_bucket(
    manifest: Manifest, model: nn.Module, optimizer: ZeroRedundancyOptimizer, steps: int
) -> tuple[list[dict[str, Number]] | None, list[str]]:
    """The numbers of each bucket that a checkpoint holds, and why there are none for a bucket.

    None instead of the numbers: the checkpoint is of an earlier version, which stored only the optimizer's steps.
    """
    stored: Mapping[str, Any] | None = (manifest.optimizer or {}).get("numbers")
    if stored is None:
        return None, []
    names = names_by_bucket(model, optimizer)
    numbers: list[dict[str, Number]] = []
    problems: list[str] = []
    for bucket in optimizer.buckets:
        bucket_numbers: dict[str, Number] = {}
        first, *further = names[bucket]
        for state, values in stored.items():
            by_tensor = values if isinstance(values, Mapping) else dict.fromkeys(names[bucket], values)
            # A tensor without a number has done all steps, and its group lacks the option.
            absent = None if state.startswith(OPTION) else steps
            number = by_tensor.get(first, absent)
            if number is not None:
                bucket_numbers[state] = number
            # The wrapped optimizer sees one flat tensor for each bucket, so it keeps one number for all of them.
            differing = next((name for name in further if by_tensor.get(name, absent) != number), None)
            if differing is not None:
                problems.append(
                    f"{first} and {differing} must be in parameter groups of their own, as they were when they were "
                    f"saved: their {state} differs ({number} and {by_tensor.get(differing, absent)})"
                )
        numbers.append(bucket_numbers)
    return numbers, problems[:_SHOWN]


def facts_of_all_tensors(local: Mapping[str, _Result], mesh: Mesh) -> dict[str, _Result]:
    """Facts on all tensors to load, by canonical name; collective over the ranks that have others."""
    facts = dict(local)
    for group in mesh.dividing_tensors:
        facts = {name: fact for part in collectives.all_gather_objects(facts, group) for name, fact in part.items()}
    return facts


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
    states_of_parameter = {
        parameter: set(kept.get(bucket, ())) for bucket in optimizer.buckets for parameter in bucket.parameters
    }
    local: dict[str, tuple[tuple[int, ...], set[str]]] = {}
    for _, parameter, record in placements(model):
        for piece in record.pieces:
            # A tensor without elements is never written.
            if math.prod(piece.shape):
                local[piece.name] = (piece.shape, states_of_parameter.get(parameter, set()))
    tensors = facts_of_all_tensors(local, mesh)
    shapes = {name: shape for name, (shape, _) in tensors.items()}
    needed_states = {name: states_of_tensor for name, (_, states_of_tensor) in tensors.items()}
    problems = tensor_mismatches(str(folder), shapes, manifest.tensors.get(MODEL, {}))
    for state in dict.fromkeys((MASTER, *states)):
        # A tensor that the model lacks is named once, among the weights.
        stored = {name: entry for name, entry in manifest.tensors.get(state, {}).items() if name in shapes}
        needed = [name for name, tensor_states in needed_states.items() if state in tensor_states]
        problems += tensor_mismatches(str(folder), shapes, stored, needed=needed, state=state)
    return problems
