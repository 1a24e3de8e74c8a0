"""Canonical tensors, put together from the ranks that hold their boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise.mesh import Group
from shardwise.models import Stages
from shardwise.placement import Placement, placements


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of the model.

    Attributes:
        stage: its pipeline stage.
        number: its place among the parameters of the stage.
        rank: index in the pipeline's group of the rank that holds it.
        tensors: canonical name, shape and dtype of each tensor that it holds and no parameter before it does.
    """

    stage: int
    number: int
    rank: int
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def held_parameters(
    model: nn.Module, pipeline: Group, take: Callable[[nn.Parameter], Tensor] = lambda p: p.detach()
) -> list[HeldParameter]:
    """Every parameter of the whole model, in its order; collective over the pipeline."""
    mine = [
        HeldParameter(
            stage, number, pipeline.rank, tuple((p.name, p.shape, take(parameter).dtype) for p in record.pieces)
        )
        for (stage, number), (parameter, record) in _by_place(model).items()
    ]
    found: list[HeldParameter] = []
    seen: set[str] = set()
    everyone = [held for each in comm.all_gather_objects(mine, pipeline) for held in each]
    for held in sorted(everyone, key=lambda held: (held.stage, held.number)):
        new = dict.fromkeys(tensor for tensor in held.tensors if tensor[0] not in seen)
        seen |= {name for name, _, _ in new}
        if new:  # a tied weight is at both ends
            found.append(replace(held, tensors=tuple(new)))
    return found


def canonical(
    model: nn.Module,
    take: Callable[[nn.Parameter], Tensor] = lambda p: p.detach(),
    pipeline: Group | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Each canonical tensor once, whole, on every rank: `take` of a parameter gives the local tensor to put together.

    Collective over each parameter's group, as its placement says. Holds one parameter of all its ranks at a time.
    `pipeline`: collective over its ranks too, which all get the tensors of all their stages; without it each has those
    of its own.
    """
    ranks = pipeline or Group()
    places = _by_place(model)
    for held in held_parameters(model, ranks, take):
        assembled: dict[str, Tensor] = {}
        if held.rank == ranks.rank:
            parameter, record = places[held.stage, held.number]
            assembled = _assemble(take(parameter), record)
        for name, shape, dtype in held.tensors:
            whole = assembled.get(name)
            if whole is None:
                whole = torch.empty(shape, dtype=dtype, device=next(model.parameters()).device)
            yield name, comm.broadcast_(whole, ranks, source=held.rank)


def _by_place(model: nn.Module) -> dict[tuple[int, int], tuple[nn.Parameter, Placement]]:
    """This rank's parameters by stage and place in it, each once."""
    stages = {stage.index: part for stage, part in model.pairs()} if isinstance(model, Stages) else {0: model}
    found: dict[nn.Parameter, tuple[tuple[int, int], Placement]] = {}
    for index, part in stages.items():
        for number, (_, parameter, record) in enumerate(placements(part)):
            found.setdefault(parameter, ((index, number), record))
    return {place: (parameter, record) for parameter, (place, record) in found.items()}


def _assemble(local: Tensor, placement: Placement) -> dict[str, Tensor]:
    everyone = comm.all_gather(local.unsqueeze(0).contiguous(), placement.group)
    pieces = [replace(piece, copies=Group()) for piece in placement.pieces]  # a group cannot travel, nor need it
    whole = {piece.name: local.new_empty(piece.shape) for piece in pieces}
    for rank, held in enumerate(comm.all_gather_objects(pieces, placement.group)):
        for piece in held:
            whole[piece.name][piece.box.slices] = piece.of(everyone[rank])
    return whole
