"""Checks of a model during its training: copies of a parameter are equal bit for bit, and all values are finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from shardwise.base.errors import RunError, see
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group, Mesh
from shardwise.distributed.placement import of_or_whole, placements
from shardwise.models.blocks import Stages
from shardwise.optim.state import weight_slices
from shardwise.optim.zero import ZeroRedundancyOptimizer

_WIDTH_TO_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22
"""Elements widened to 64 bits at a time: 64 MiB with their positions, 2 × 8 bytes for each of 2^22."""


@torch.no_grad()
def check_replicas(model: nn.Module, mesh: Mesh, step: int, optimizer: ZeroRedundancyOptimizer | None = None) -> None:
    """Compare every parameter over data parallelism, and every copied piece over its copies. Collective.

    Of parameters that ZeRO-3 frees, copies of their parts are compared.

    Raises:
        RunError: names the first tensor that differs and the ranks whose value is not that of most of their group.
    """
    by_group: dict[Group, list[tuple[str, Tensor]]] = {}
    for bucket in [] if optimizer is None else optimizer.buckets:
        if bucket.frees_values and bucket.copies.size > 1:
            by_group.setdefault(bucket.copies, []).append(
                (of_or_whole(bucket.parameters[0]).pieces[0].name, _digest(bucket.shard))
            )
    for piece, _, values, is_part in weight_slices(model, optimizer, mesh.tp):
        groups = [group for group in (Group() if is_part else mesh.dp, piece.copies) if group.size > 1]
        if groups:
            digest = _digest(values)
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
    if every_problem := collectives.union(problems, mesh.world):
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


def find_non_finite(model: nn.Module, loss: float) -> tuple[tuple[int, int, int], str]:
    """A key that sorts the nearest cause first, and a text on a value of this rank that is not finite; "" if all are.

    The key has 0 for a weight, 1 for the loss and 2 for a gradient; then stage and parameter in the order of the pass
    that uses them.
    """
    parts = [(0, model)]
    if isinstance(model, Stages):
        parts = [(stage.index, part) for stage, part in model.pairs()]
    pieces = [
        (stage, order, parameter, piece.name, piece.local.slices)
        for stage, part in parts
        for order, (_, parameter, record) in enumerate(placements(part))
        for piece in record.pieces
    ]
    for stage, order, parameter, name, slices in pieces:
        if not torch.isfinite(parameter[slices]).all():
            return (0, stage, order), f"{name} is the first parameter with a value that is not finite"
    text = "" if math.isfinite(loss) else f"its loss is {loss}"
    for stage, order, parameter, name, slices in reversed(pieces):
        if parameter.grad is not None and not torch.isfinite(parameter.grad[slices]).all():
            first = f"{name} is the first parameter, in backward's order, with a gradient that is not finite"
            # The backward pass goes through stages and parameters from the last to the first.
            return (1 if text else 2, -stage, -order), f"{text} and {first}" if text else first
    return (1, 0, 0), text
