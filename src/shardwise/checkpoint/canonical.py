"""Canonical tensors, put together from the ranks that hold their boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from shardwise import comm
from shardwise.placement import Placement, placements


def canonical(
    model: nn.Module, take: Callable[[nn.Parameter], Tensor] = lambda p: p.detach()
) -> Iterator[tuple[str, Tensor]]:
    """Each canonical tensor once, whole, on every rank: `take` of a parameter gives the local tensor to put together.

    Collective over each parameter's group, as its placement says. Holds one parameter of all its ranks at a time.
    """
    for _, parameter, placement in placements(model):
        yield from _assemble(take(parameter), placement)


def _assemble(local: Tensor, placement: Placement) -> Iterator[tuple[str, Tensor]]:
    everyone = comm.all_gather(local.unsqueeze(0).contiguous(), placement.group)
    boxes = comm.all_gather_objects([(piece.box, piece.local) for piece in placement.pieces], placement.group)
    for index, piece in enumerate(placement.pieces):
        whole = local.new_empty(piece.shape)
        for rank, held in enumerate(boxes):
            box, where = held[index]
            whole[box.slices] = everyone[rank][where.slices]
        yield piece.name, whole
