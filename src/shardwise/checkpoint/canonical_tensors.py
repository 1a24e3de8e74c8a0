"""Canonical tensors, put together from the boxes that ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import Piece, Placement, placements
from shardwise.models.blocks import Stages

_Place: TypeAlias = tuple[int, int]
"""A parameter of a model: its pipeline stage, and its number in that stage."""
_Facts: TypeAlias = tuple[str, tuple[int, ...], torch.dtype]
"""Of a canonical tensor: name, shape and dtype."""


def held_tensors(
    model: nn.Module, pipeline: Group, take: Callable[[nn.Parameter], Tensor] = lambda p: p.detach()
) -> list[tuple[_Place, int, list[_Facts]]]:
    """Every parameter of the whole model, in its order, with each canonical tensor once; collective over the pipeline.

    Returns (parameter, index in the pipeline's group of the rank that has it, the canonical tensors in it).
    """
    mine = [
        (place, pipeline.rank, [(piece.name, piece.shape, take(parameter).dtype) for piece in record.pieces])
        for place, (parameter, record) in _by_place(model).items()
    ]
    everyone = [entry for entries in collectives.all_gather_objects(mine, pipeline) for entry in entries]
    seen: set[str] = set()
    parameters = []
    for place, rank, tensors in sorted(everyone, key=lambda entry: entry[0]):
        new = [tensor for tensor in dict.fromkeys(tensors) if tensor[0] not in seen]
        seen |= {name for name, _, _ in new}
        if new:  # a tied weight is at both ends
            parameters.append((place, rank, new))
    return parameters


def canonical_tensors(
    model: nn.Module,
    take: Callable[[nn.Parameter], Tensor] = lambda p: p.detach(),
    pipeline: Group | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Each canonical tensor of a model once: its name, and the whole tensor, on every rank.

    Collective over each parameter's group, as its placement says. Holds one parameter of all its ranks at a time. A
    tied head has no tensor of its own: its weight is the embedding's.

    Args:
        model: its parameters are local tensors, of any shape; a tensor comes in its canonical shape, such as `[O, I]`.
        take: gives the local tensor to put together from a parameter, such as its gradient.
        pipeline: ranks whose stages make up the model: collective over them too, and all get the tensors of all stages.
            Without it each has those of its own.
    """
    ranks = pipeline or Group()
    local = _by_place(model)
    pieces = _pieces_by_rank(local)
    for place, rank, tensors in held_tensors(model, ranks, take):
        assembled: dict[str, Tensor] = {}
        if rank == ranks.rank:
            parameter, record = local[place]
            assembled = _assemble(take(parameter), record.group, pieces[place])
        for name, shape, dtype in tensors:
            whole = assembled.get(name)
            if whole is None:
                whole = torch.empty(shape, dtype=dtype, device=next(model.parameters()).device)
            yield name, collectives.broadcast_(whole, ranks, source=rank)


def _by_place(model: nn.Module) -> dict[_Place, tuple[nn.Parameter, Placement]]:
    """This rank's parameters by stage and number in it, each once."""
    stages = {stage.index: part for stage, part in model.pairs()} if isinstance(model, Stages) else {0: model}
    places: dict[nn.Parameter, tuple[_Place, Placement]] = {}
    for index, part in stages.items():
        for number, (_, parameter, record) in enumerate(placements(part)):
            places.setdefault(parameter, ((index, number), record))
    return {place: (parameter, record) for parameter, (place, record) in places.items()}


def _pieces_by_rank(places: Mapping[_Place, tuple[nn.Parameter, Placement]]) -> dict[_Place, list[list[Piece]]]:
    """For each parameter what every rank of its group holds of it; one exchange a group."""
    mine: dict[Group, dict[_Place, list[Piece]]] = {}
    for place, (_, record) in places.items():
        # A group cannot be sent to another process, and nobody needs it there.
        held = [replace(piece, copies=Group()) for piece in record.pieces]
        mine.setdefault(record.group, {})[place] = held
    by_group = [collectives.all_gather_objects(held, group) for group, held in mine.items()]
    return {place: [held[place] for held in everyone] for everyone in by_group for place in everyone[0]}


def _assemble(local: Tensor, group: Group, pieces: Sequence[Sequence[Piece]]) -> dict[str, Tensor]:
    """The canonical tensors of a parameter, of which each rank of the group holds its pieces."""
    everyone = collectives.all_gather(local.unsqueeze(0).contiguous(), group)
    whole = {piece.name: local.new_empty(piece.shape) for piece in pieces[0]}
    for held, tensor in zip(pieces, everyone, strict=True):
        for piece in held:
            whole[piece.name][piece.box.slices] = piece.of(tensor)
    return whole
