"""Canonical tensors, put together from the ranks that hold their boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor, nn

from shardwise import comm
from shardwise.mesh import Group
from shardwise.placement import Placement, placements


def canonical(
    model: nn.Module, take: Callable[[nn.Parameter], Tensor] = lambda p: p.detach()
) -> Iterator[tuple[str, Tensor]]:
    """Each canonical tensor once, whole, on every rank: `take` of a parameter gives the local tensor to put together.

    Collective over each parameter's group, as its placement says. Holds one parameter of all its ranks at a time.
    """
    for _, parameter, placement in placements(model):
        yield from _assemble(take(parameter), placement).items()


def _assemble(local: Tensor, placement: Placement) -> dict[str, Tensor]:
    everyone = comm.all_gather(local.unsqueeze(0).contiguous(), placement.group)
    pieces = [replace(piece, copies=Group()) for piece in placement.pieces]  # a group cannot travel, nor need it
    whole = {piece.name: local.new_empty(piece.shape) for piece in pieces}
    for rank, held in enumerate(comm.all_gather_objects(pieces, placement.group)):
        for piece in held:
            whole[piece.name][piece.box.slices] = piece.of(everyone[rank])
    return whole
