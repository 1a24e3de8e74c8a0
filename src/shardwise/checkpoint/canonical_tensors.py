"""Canonical tensors, put together from the boxes that ranks hold, and the names of their dtypes in files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shardwise.checkpoint.format.safetensors import FLOATING
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import Piece, Placement, placements
from shardwise.models.blocks import Stages


@dataclass(frozen=True, order=True)
class ParameterKey:
    """A parameter of a model: its pipeline stage, and its number in that stage."""

    stage: int
    number: int


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
    described = [
        (key, ranks.rank, {piece.name: (piece.shape, take(parameter).dtype) for piece in record.pieces})
        for key, (parameter, record) in local.items()
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
            assembled = _assemble(take(parameter), record.group, pieces[key])
        # The other stages receive into empty tensors.
        for name, (shape, dtype) in new.items():
            values = assembled.get(name)
            if values is None:
                values = torch.empty(shape, dtype=dtype, device=device)
            yield name, collectives.broadcast_(values, ranks, source=rank)


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
    # The ranks of a model go through its groups in the order of its parameters, so that their exchanges match.
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


TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, torch_name) for name, torch_name in FLOATING.items()}
"""Name in a safetensors file → torch's dtype."""
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""torch's dtype → name in a safetensors file."""
