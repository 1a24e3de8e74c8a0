"""Context parallelism: ranks that share the tokens of each sample (Llama 3, arXiv:2407.21783 §3.3.2).

A sequence of S tokens is cut into 2C chunks for C ranks. Rank r has the chunks r and 2C-1-r, one from the head and one
from the tail, so that all ranks have equally many pairs of a query and an earlier key. A rank's S/C tokens are those of
its two chunks, one after the other. Queries stay on their rank; keys and values of all ranks are gathered, or come rank
by rank.

A group with a grain of G cuts the sequence for G ranks, whatever their number: each of C ranks has the tokens of G/C
neighbouring ones, its parts.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group


def runs_of_places(length: int, rank: int, ranks: int, parts: int = 1) -> tuple[range, ...]:
    """Return a context-parallel rank's places in the sequence: chunks of `length` tokens in all, two for each part."""
    size = length // (2 * parts)
    cuts = ranks * parts
    numbers = range(rank * parts, (rank + 1) * parts)
    chunks = (chunk for part in numbers for chunk in (part, 2 * cuts - 1 - part))
    return tuple(range(chunk * size, (chunk + 1) * size) for chunk in chunks)


def chunks_of_rank(x: Tensor, group: Group) -> Tensor:
    """Return a context-parallel rank's tokens of all, `[S, …]` → `[S/C, …]`."""
    runs = runs_of_places(len(x) // group.size, group.rank, group.size, group.parts)
    return torch.cat([x[run.start : run.stop] for run in runs])


def gather_chunks(x: Tensor, group: Group) -> Tensor:
    """Return the tokens of all context-parallel ranks in the order of the sequence, `[S/C, …]` → `[S, …]`.

    The gradient of a rank's tokens is the sum over the ranks.
    """
    return cast(Tensor, _GatherChunks.apply(x, group))  # type: ignore[no-untyped-call]


class _GatherChunks(torch.autograd.Function):
    """One function, which holds fewer copies of all tokens in the backward pass than autograd would of its parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        by_part = collectives.all_gather(x, group).chunk(2 * group.size * group.parts)
        return torch.cat((*by_part[::2], *by_part[:0:-2]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        cuts = ctx.group.size * ctx.group.parts
        chunks = grads[0].chunk(2 * cuts)
        by_part = [chunks[number] for part in range(cuts) for number in (part, 2 * cuts - 1 - part)]
        return collectives.reduce_scatter(torch.cat(by_part), ctx.group), None
