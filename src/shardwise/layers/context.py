"""Context parallelism: ranks that share the tokens of each sample (Llama 3, arXiv:2407.21783 §3.3.2).

A sequence of S tokens is cut into 2C chunks for C ranks. Rank r has the chunks r and 2C-1-r, one from the head and one
from the tail, so that all ranks have equally many pairs of a query and an earlier key. A rank's S/C tokens are those of
its two chunks, one after the other. Queries stay on their rank; keys and values of all ranks are gathered, or come rank
by rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group


def places_of(rows: Tensor, length: int, rank: int | Tensor, ranks: int) -> Tensor:
    """Return the places in the sequence of some of a rank's `length` tokens, given by their rows on the rank."""
    half = length // 2
    return rows + torch.where(rows < half, rank * half, (2 * ranks - 2 - rank) * half)


def runs_of_places(length: int, rank: int, ranks: int) -> tuple[range, ...]:
    """Return the places in the sequence of a rank's two chunks, which have `length` tokens in all."""
    half = length // 2
    return tuple(range(chunk * half, (chunk + 1) * half) for chunk in (rank, 2 * ranks - 1 - rank))


def chunks_of_rank(x: Tensor, group: Group) -> Tensor:
    """Return this rank's tokens of all, `[S, …]` → `[S/C, …]`."""
    return torch.cat([x[run.start : run.stop] for run in runs_of_places(len(x) // group.size, group.rank, group.size)])


def passed_round(x: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Yield this rank and its x, then the rank before it and x of that rank, and so on.

    Each tensor is passed on to the next rank, and the next one arrives, while it is used.
    """
    for distance in range(group.size):
        is_last = distance + 1 == group.size
        arriving = None if is_last else collectives.shift_async(x, group, 1)
        yield (group.rank - distance) % group.size, x
        if arriving is not None:
            x = arriving.wait()


def gather_chunks(x: Tensor, group: Group) -> Tensor:
    """Return the tokens of all ranks in the order of the sequence, `[S/C, …]` → `[S, …]`.

    The gradient of a rank's tokens is the sum over the ranks.
    """
    return cast(Tensor, _GatherChunks.apply(x, group))  # type: ignore[no-untyped-call]


class _GatherChunks(torch.autograd.Function):
    """One function, which holds fewer copies of all tokens in the backward pass than autograd would of its parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        by_rank = collectives.all_gather(x, group).chunk(2 * group.size)
        return torch.cat((*by_rank[::2], *by_rank[:0:-2]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ranks = ctx.group.size
        chunks = grads[0].chunk(2 * ranks)
        by_rank = [chunks[number] for rank in range(ranks) for number in (rank, 2 * ranks - 1 - rank)]
        return collectives.reduce_scatter(torch.cat(by_rank), ctx.group), None
