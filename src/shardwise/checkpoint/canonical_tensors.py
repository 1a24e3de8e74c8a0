"""Canonical tensors, put together from the boxes that ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import Piece, Placement, placements
from shardwise.models.blocks import Stages


@dataclass(frozen=True, order=True)
class ParameterKey:
    """A parameter of a model: its pipeline stage, and its number in that stage."""

    stage: int
    number: int


@dataclass(frozen=True)
class CanonicalTensor:
    """The name, shape and dtype of a canonical tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ParameterTensors:
    """The canonical tensors of a parameter, without those that an earlier parameter has too.

    Attributes:
        key: the parameter.
        rank: index in the pipeline's group of the rank that holds it.
        tensors: canonical tensors in it, whole or in part.
    """

    key: ParameterKey
    rank: int
    tensors: tuple[CanonicalTensor, ...]


def model_tensors(
    model: nn.Module, pipeline: Group, take: Callable[[nn.Parameter], Tensor] = lambda p: p.detach()
) -> list[ParameterTensors]:
    """Every parameter of the whole model, in its order, with each canonical tensor once; collective over the pipeline.

    `take`: as in `canonical_tensors`.
    """
    local: list[ParameterTensors] = []
    for key, (parameter, record) in _by_key(model).items():
        if not record.pieces:
            continue
        dtype = take(parameter).dtype
        tensors = dict.fromkeys(CanonicalTensor(piece.name, piece.shape, dtype) for piece in record.pieces)
        local.append(ParameterTensors(key, pipeline.rank, tuple(tensors)))
    parameters = [entry for entries in collectives.all_gather_objects(local, pipeline) for entry in entries]
    parameters.sort(key=lambda parameter: parameter.key)
    # A tied weight is a parameter of the first and of the last stage, under one canonical name.
    seen: set[str] = set()
    unique: list[ParameterTensors] = []
    for parameter_tensors in parameters:
        new = tuple(tensor for tensor in parameter_tensors.tensors if tensor.name not in seen)
        seen |= {tensor.name for tensor in new}
        if new:  # a tied weight is at both ends
            unique.append(replace(parameter_tensors, tensors=new))
    return unique


def canonical_tensors(
    model: nn.Module,
    take: Callable[[nn.Parameter], Tensor] = lambda p: p.detach(),
    pipeline: Group | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Each canonical tensor of a model once: its name, and the whole tensor, on every rank.

    Collective over each parameter's group, as its placement says. Holds one parameter of all its ranks at a time. A
    tied head has no tensor of its own: its weight is the embedding's.

    Args:
        model: parameters are local tensors, of any shape; a tensor comes in its canonical shape, such as `[O, I]`.
        take: gives the local tensor to put together from a parameter, such as its gradient.
        pipeline: ranks whose stages make up the model: collective over them too, and all get the tensors of all stages.
            Without it each has those of its own.
    """
    ranks = pipeline or Group()
    local = _by_key(model)
    pieces = _pieces_by_rank(local)
    device = next(model.parameters()).device
    for parameter_tensors in model_tensors(model, ranks, take):
        assembled: dict[str, Tensor] = {}
        if parameter_tensors.rank == ranks.rank:
            parameter, record = local[parameter_tensors.key]
            assembled = _assemble(take(parameter), record.group, pieces[parameter_tensors.key])
        # The other stages receive into empty tensors.
        for tensor in parameter_tensors.tensors:
            values = assembled.get(tensor.name)
            if values is None:
                values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            yield tensor.name, collectives.broadcast_(values, ranks, source=parameter_tensors.rank)


def _by_key(model: nn.Module) -> dict[ParameterKey, tuple[nn.Parameter, Placement]]:
    """This rank's parameters with their records, each parameter once."""
    stages = {stage.index: part for stage, part in model.pairs()} if isinstance(model, Stages) else {0: model}
    keys: dict[nn.Parameter, tuple[ParameterKey, Placement]] = {}
    for index, part in stages.items():
        for number, (_, parameter, record) in enumerate(placements(part)):
            keys.setdefault(parameter, (ParameterKey(index, number), record))
    return {key: (parameter, record) for parameter, (key, record) in keys.items()}


def _pieces_by_rank(
    local: Mapping[ParameterKey, tuple[nn.Parameter, Placement]],
) -> dict[ParameterKey, list[list[Piece]]]:
    """For each parameter the pieces of every rank of its group; one exchange a group."""
    by_group: dict[Group, dict[ParameterKey, list[Piece]]] = {}
    for key, (_, record) in local.items():
        # A group cannot be sent to another process, and nobody needs it there.
        pieces = [replace(piece, copies=Group()) for piece in record.pieces]
        by_group.setdefault(record.group, {})[key] = pieces
    pieces_by_rank: dict[ParameterKey, list[list[Piece]]] = {}
    for group, pieces_by_key in by_group.items():
        gathered = collectives.all_gather_objects(pieces_by_key, group)
        for key in gathered[0]:
            pieces_by_rank[key] = [pieces_of_rank[key] for pieces_of_rank in gathered]
    return pieces_by_rank


def _assemble(local: Tensor, group: Group, pieces_by_rank: Sequence[Sequence[Piece]]) -> dict[str, Tensor]:
    """The canonical tensors of a parameter by their names, from the pieces of each rank of the group."""
    locals_by_rank = collectives.all_gather(local.unsqueeze(0).contiguous(), group)
    tensors = {piece.name: local.new_empty(piece.shape) for piece in pieces_by_rank[0]}
    for pieces, tensor in zip(pieces_by_rank, locals_by_rank, strict=True):
        for piece in pieces:
            tensors[piece.name][piece.box.slices] = piece.of(tensor)
    return tensors
