"""Comparison of replicas: copies of a parameter must stay equal, bit for bit (`log.drift_every`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.base.errors import RunError, see
from shardwise.distributed import collectives
from shardwise.distributed.agreement import union
from shardwise.distributed.mesh import Group, Mesh
from shardwise.distributed.placement import placements

_WIDTH_TO_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22
"""Elements widened to 64 bits at a time: 64 MiB with their positions, 2 × 8 bytes for each of 2^22."""


@torch.no_grad()
def check_replicas(model: nn.Module, mesh: Mesh, step: int) -> None:
    """Compare every parameter over data parallelism, and every copied piece over its copies. Collective.

    Raises:
        RunError: names the first tensor that differs and the ranks whose value is not that of most of their group.
    """
    by_group: dict[Group, list[tuple[str, Tensor]]] = {}
    for _, parameter, placement in placements(model, mesh.tp):
        for piece in placement.pieces:
            groups = [group for group in (mesh.dp, piece.copies) if group.size > 1]
            if groups:
                digest = _digest(parameter[piece.local.slices])
                for group in groups:
                    by_group.setdefault(group, []).append((piece.name, digest))
    problems = []
    # One exchange for each group, whatever the number of its tensors.
    for group, entries in by_group.items():
        everyone = collectives.all_gather(torch.stack([digest for _, digest in entries]).unsqueeze(0), group)
        differs = (everyone != everyone[0]).any(dim=-1).any(dim=0)
        for column in torch.nonzero(differs).flatten().tolist()[:1]:
            digests = everyone[:, column]
            # The digest that most ranks have, so that the rank at fault is named and not all the others.
            usual = int((digests[:, None] == digests).all(dim=-1).sum(dim=1).argmax())
            ranks = [
                rank for rank, digest in zip(group.ranks, digests, strict=True) if not digest.equal(digests[usual])
            ]
            problems.append(f"{entries[column][0]} on ranks {ranks} differs from rank {group.ranks[usual]}")
    if every_problem := union(problems, mesh.world):
        raise RunError(
            f"step {step}: replicated parameters have drifted apart: {every_problem[0]}"
            f"{see('training#drifted-parameters')}"
        )


def _digest(tensor: Tensor) -> Tensor:
    """Two sums over the bits, one of them weighted by position: both a changed and an exchanged element show."""
    bits = tensor.contiguous().view(_WIDTH_TO_INTEGER[tensor.element_size()]).flatten()
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        sums[0] += part.sum()
        sums[1] += part.mul_(torch.arange(start + 1, start + 1 + part.numel(), device=part.device)).sum()
    return sums
