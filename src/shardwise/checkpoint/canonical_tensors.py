"""Canonical tensors, put together from the boxes that ranks hold, and the names of their dtypes in files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor, nn

from shardwise.config import FamilyConfig, config_from_sections
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import Piece, Placement, placements
from shardwise.models.build import build_model
from shardwise.pipeline.stages import Stages

_ParameterKey: TypeAlias = tuple[int, int]  # a parameter of a model: its pipeline stage, and its number in that stage


def canonical_tensors(
    model: nn.Module, take: Callable[[nn.Parameter], Tensor] = lambda p: p.detach(), pipeline: Group | None = None
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
    described = [
        (key, ranks.rank, {piece.name: (piece.shape, take(parameter).dtype) for piece in chain(*pieces[key])})
        for key, (parameter, _) in local.items()
    ]
    parameters = [entry for entries in collectives.all_gather_objects(described, ranks) for entry in entries]
    parameters.sort(key=lambda parameter: parameter[0])
    seen: set[str] = set()
    for key, rank, tensors in parameters:
        # A tied weight is a parameter of the first and of the last stage, under one canonical name.
        new = {name: tensor for name, tensor in tensors.items() if name not in seen}
        seen |= new.keys()
        assembled: dict[str, Tensor] = {}
        if new and rank == ranks.rank:
            parameter, record = local[key]
            assembled = _assemble(take(parameter), record.holders, pieces[key])
        # The other stages receive into empty tensors.
        for name, (shape, dtype) in new.items():
            values = assembled.get(name)
            if values is None:
                values = torch.empty(shape, dtype=dtype, device=device)
            yield name, collectives.broadcast_(values, ranks, source=rank)


def _by_key(model: nn.Module) -> dict[_ParameterKey, tuple[nn.Parameter, Placement]]:
    stages = {stage.index: part for stage, part in model.pairs()} if isinstance(model, Stages) else {0: model}
    keys: dict[nn.Parameter, tuple[_ParameterKey, Placement]] = {}
    for index, part in stages.items():
        for number, (_, parameter, record) in enumerate(placements(part)):
            keys.setdefault(parameter, ((index, number), record))
    return {key: (parameter, record) for parameter, (key, record) in keys.items()}


def _pieces_by_rank(
    local: Mapping[_ParameterKey, tuple[nn.Parameter, Placement]],
) -> dict[_ParameterKey, list[list[Piece]]]:
    """For each parameter the pieces of every rank of its groups; one exchange a group."""
    # The ranks of a model go through its groups in the order of its parameters, so that their exchanges match.
    by_groups: dict[tuple[Group, ...], dict[_ParameterKey, list[Piece]]] = {}
    for key, (_, record) in local.items():
        by_groups.setdefault(record.holders, {})[key] = record.pieces_to_send
    pieces_by_rank: dict[_ParameterKey, list[list[Piece]]] = {}
    for groups, pieces_by_key in by_groups.items():
        by_rank = [pieces_by_key]
        for group in groups:
            by_rank = [*chain.from_iterable(collectives.all_gather_objects(by_rank, group))]
        for key in pieces_by_key:
            pieces_by_rank[key] = [pieces_of_rank[key] for pieces_of_rank in by_rank]
    return pieces_by_rank


def _assemble(local: Tensor, groups: tuple[Group, ...], pieces_by_rank: Sequence[Sequence[Piece]]) -> dict[str, Tensor]:
    """The canonical tensors of a parameter by their names, from the pieces of each rank of its groups."""
    locals_by_rank = local.unsqueeze(0).contiguous()
    for group in groups:
        locals_by_rank = collectives.all_gather(locals_by_rank, group)
    tensors = {piece.name: local.new_empty(piece.shape) for piece in chain(*pieces_by_rank)}
    for pieces, tensor in zip(pieces_by_rank, locals_by_rank, strict=True):
        for piece in pieces:
            tensors[piece.name][piece.box.slices] = piece.of(tensor)
    return tensors


def canonical_shapes(model: FamilyConfig) -> dict[str, tuple[int, ...]]:
    """Every canonical tensor of a model, in its order; nothing is allocated."""
    # The model needs a whole configuration; keys of the training have any valid value.
    sections = {
        "model": model.model_dump(),
        "train": {"steps": 1, "global_batch": 1, "sequence_length": 1},
        "optimizer": {"lr": 1.0},
    }
    built = build_model(config_from_sections(sections), Group(), sequence_parallel=False, device="meta")
    return {piece.name: piece.shape for _, _, record in placements(built) for piece in record.pieces}
