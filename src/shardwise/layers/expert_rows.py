"""Rows of experts that ranks divide among them: their way there and back, and their products.

Shapes per rank: T tokens, k experts a token, R rows that arrive, P parts of a sum, F features of an expert, w = F/P of
them in a part, H hidden, N experts of this rank, s ranks that divide the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group
from shardwise.layers.matmul import product


@dataclass(frozen=True)
class Journey:
    """The way of rows, sorted by expert, to the ranks that have the experts, and back.

    Attributes:
        group: the ranks that divide the experts.
        rows: places of the rows among those of all tokens, `[T·k]`.
        per_token: k.
        sent: rows for each rank.
        arriving: rows from each rank.
        runs: source, expert and rows of each product.
    """

    group: Group
    rows: Tensor
    per_token: int
    sent: list[int]
    arriving: list[int]
    runs: list[tuple[int, int, slice]]

    @staticmethod
    def of(experts: Tensor, counts: Tensor, group: Group) -> Journey:
        """Plan the way of all rows. Communicates: an all-to-all of `counts`, the rows of each expert of the model.

        Args:
            experts: numbers of experts, `[T, k]`.
        """
        sent = counts.view(group.size, -1)
        arriving = collectives.all_to_all(sent, group) if group.size > 1 else sent
        runs = runs_of_experts(arriving.flatten().tolist())
        return Journey(
            group,
            experts.flatten().argsort(stable=True),
            experts.shape[1],
            sent.sum(1).tolist(),
            arriving.sum(1).tolist(),
            [(*divmod(number, arriving.shape[1]), run) for number, run in runs],
        )

    def tokens_there(self, x: Tensor) -> Tensor:
        """Send the rows of tokens: `[T, …]` → `[R, …]`."""
        return self._moved(x[self.rows // self.per_token], self.sent, self.arriving)

    def rows_there(self, by_row: Tensor) -> Tensor:
        """Send what each row has of its own: `[T, k]` → `[R]`."""
        return self._moved(by_row.flatten()[self.rows], self.sent, self.arriving)

    def rows_back(self, parts: Tensor) -> Tensor:
        """Send parts of what each row has of its own back, and add them: `[P, R]` → `[T, k]`."""
        by_row = collectives.tree_sum(self._returned(parts).t())
        placed: Tensor = torch.empty_like(by_row).index_copy_(0, self.rows, by_row).unflatten(0, (-1, self.per_token))
        return placed

    def sums_back(self, parts: Tensor) -> Tensor:
        """Send parts of results back, add those of a token's experts, and then the parts: `[P, R, H]` → `[T, H]`."""
        by_row = self._returned(parts)
        if by_row.is_cuda:
            # `index_add` adds in any order there.
            placed = torch.empty_like(by_row).index_copy_(0, self.rows, by_row)
            total = reduce(torch.add, placed.unflatten(0, (-1, self.per_token)).unbind(1))
        else:
            total = by_row.new_zeros(len(self.rows) // self.per_token, *by_row.shape[1:])
            total.index_add_(0, self.rows // self.per_token, by_row)
        return collectives.tree_sum(total.transpose(0, 1))

    def _returned(self, parts: Tensor) -> Tensor:
        return self._moved(parts.transpose(0, 1), self.arriving, self.sent)

    def _moved(self, rows: Tensor, sent: list[int], arriving: list[int]) -> Tensor:
        return collectives.all_to_all(rows, self.group, sent, arriving) if self.group.size > 1 else rows


def runs_of_experts(counts: Sequence[int]) -> list[tuple[int, slice]]:
    """Return each expert that has rows, with its run of the sorted rows."""
    runs = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            runs.append((expert, slice(start, start + count)))
        start += count
    return runs


def sum_of_rows(
    x: Tensor, weights: Tensor, journey: Journey, parts: int, gate_up: Sequence[Tensor], down: Sequence[Tensor]
) -> Tensor:
    """Return the weighted sum of each token's experts `[T, H]`, computed by the ranks that have them.

    A product has the rows of one rank at one expert, and one part of the expert's width. The weight of a row is applied
    before the down projection.

    Args:
        x: tokens `[T, H]`.
        weights: `[T, k]`.
        parts: P.
        gate_up: gate and up projection of each expert, `[N, 2F, H]`; or s views of it, each of which gets the gradient
            of the rows of one rank.
        down: down projection of each expert, `[N, H, F]`, or views likewise.
    """
    return cast(Tensor, _SumOfRows.apply(x, weights, journey, parts, *gate_up, *down))  # type: ignore[no-untyped-call]


class _SumOfRows(torch.autograd.Function):
    """Keeps the rows, and gate and up of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, journey: Journey, count: int, *matrices: Tensor) -> Tensor:
        rows = journey.tokens_there(x)
        weight = journey.rows_there(weights).to(x.dtype)[:, None]
        gate_up, down = matrices[0], matrices[-1]
        joined = x.new_empty(count, len(rows), gate_up.shape[1] // count)
        y = x.new_empty(count, *rows.shape)
        for _, expert, run in journey.runs:
            for part, matrices_of_part in enumerate(_parts(gate_up[expert], down[expert], count)):
                y[part, run] = outputs(rows[run], weight[run], joined[part, run], *matrices_of_part)
        ctx.save_for_backward(rows, weight, joined, gate_up, down)
        ctx.journey = journey
        ctx.weights = weights
        ctx.sources = len(matrices) // 2
        return journey.sums_back(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, joined, gate_up, down = ctx.saved_tensors
        journey: Journey = ctx.journey
        count = len(joined)
        dy = journey.tokens_there(grads[0])
        dx = rows.new_empty(count, *rows.shape)
        d_weight = ctx.weights.new_empty(count, len(rows))
        d_gate_up = [torch.zeros_like(gate_up) for _ in range(ctx.sources)]
        d_down = [torch.zeros_like(down) for _ in range(ctx.sources)]
        for source, expert, run in journey.runs:
            into_width = d_gate_up[source % ctx.sources][expert].unflatten(0, (2, count, -1))
            into_hidden = d_down[source % ctx.sources][expert].unflatten(1, (count, -1))
            for part, matrices_of_part in enumerate(_parts(gate_up[expert], down[expert], count)):
                results = gradients(dy[run], rows[run], weight[run], joined[part, run], *matrices_of_part)
                dx[part, run], d_weight[part, run], d_to_width, d_to_hidden = results
                into_width[:, part] += d_to_width.unflatten(0, (2, -1))
                into_hidden[:, part] += d_to_hidden
                del results, d_to_width, d_to_hidden  # not held beside the next expert's
        return journey.sums_back(dx), journey.rows_back(d_weight), None, None, *d_gate_up, *d_down


def _parts(gate_up: Tensor, down: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return gate and up, and down projection of each part of an expert: `[2w, H]` and `[H, w]`."""
    if count == 1:
        return [(gate_up, down)]
    halves = gate_up.unflatten(0, (2, count, -1)).transpose(0, 1).flatten(1, 2)
    return list(zip(halves, (part.contiguous() for part in down.chunk(count, dim=1)), strict=True))


# ---- rows at one expert, or at a part of its width: n rows


def outputs(x: Tensor, weight: Tensor, joined: Tensor, to_width: Tensor, to_hidden: Tensor) -> Tensor:
    """Return `down(weight · silu(gate) · up)` of rows, `[n, H]`, and write gate and up to `joined`.

    Args:
        x: `[n, H]`.
        weight: of each row, `[n, 1]`.
        joined: `[n, 2w]`.
        to_width: gate and up projection, `[2w, H]`.
        to_hidden: down projection, `[H, w]`.
    """
    gate, up = joined.copy_(product(x, to_width)).chunk(2, dim=-1)
    return product(F.silu(gate).mul_(up).mul_(weight), to_hidden)


def gradients(
    dy: Tensor, x: Tensor, weight: Tensor, joined: Tensor, to_width: Tensor, to_hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the weights `[n]`, and of both projections; dy: that of `outputs`."""
    gate, up = joined.chunk(2, dim=-1)
    silu = F.silu(gate)
    activated = silu * up
    d_activated = product(dy, to_hidden.t())
    d_weight = torch.linalg.vecdot(d_activated, activated)
    d_to_hidden = product(dy.t(), activated.mul_(weight).t())
    d_activated.mul_(weight)
    d_joined = torch.empty_like(joined)
    d_gate, d_up = d_joined.chunk(2, dim=-1)
    torch.mul(d_activated, silu, out=d_up)
    torch.ops.aten.silu_backward.grad_input(d_activated.mul_(up), gate, grad_input=d_gate)
    return product(d_joined, to_width.t()), d_weight, product(d_joined.t(), x.t()), d_to_hidden
