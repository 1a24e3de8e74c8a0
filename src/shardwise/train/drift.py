"""Copies of a parameter must stay copies: what replicas hold is compared, bit for bit, every so often."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise.errors import RunError
from shardwise.mesh import Group, Mesh
from shardwise.placement import placements

_WIDTH_TO_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def check_replicas(model: nn.Module, mesh: Mesh, step: int) -> None:
    """Compare what should be equal: every parameter over data parallelism, every copied piece over its copies.

    Raises:
        RunError: names the first tensor that differs and the ranks that hold another value than their group's first.
    """
    by_group: dict[Group, list[tuple[str, Tensor]]] = {}
    for _, parameter, placement in placements(model):
        for piece in placement.pieces:
            held = parameter[piece.local.slices]
            for group in (mesh.dp, piece.copies):
                if group.size > 1:
                    by_group.setdefault(group, []).append((piece.name, _digest(held)))
    problems = []
    for group, entries in by_group.items():
        everyone = comm.all_gather(torch.stack([digest for _, digest in entries]).unsqueeze(0), group)
        differs = (everyone != everyone[0]).any(dim=-1)
        for column in torch.nonzero(differs.any(dim=0)).flatten().tolist()[:1]:
            ranks = [group.ranks[i] for i in torch.nonzero(differs[:, column]).flatten().tolist()]
            problems.append(f"{entries[column][0]} on ranks {ranks} differs from rank {group.ranks[0]}")
    found = [text for texts in comm.all_gather_objects(problems, mesh.world) for text in texts]
    if found:
        raise RunError(f"step {step}: replicated parameters have drifted apart: {found[0]}")


def _digest(tensor: Tensor) -> Tensor:
    """Two sums over the bits, one weighted by position: one changed element shows, and so do two exchanged ones."""
    bits = tensor.contiguous().view(_WIDTH_TO_INTEGER[tensor.element_size()]).flatten().long()
    position = torch.arange(1, bits.numel() + 1, device=bits.device)
    return torch.stack([bits.sum(), (bits * position).sum()])
