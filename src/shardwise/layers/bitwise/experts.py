"""Bit-equal experts and routers.

A product of an expert has the rows of one micro-batch of one data-parallel rank, and one part of the width, at every
layout. Where ranks divide the experts, the rows of each rank are multiplied by themselves, and the gradients that a
rank's rows give add up by themselves until the step's end (`placement.FurtherGradient`).

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

from shardwise.distributed import collectives, placement
from shardwise.distributed.mesh import Group
from shardwise.layers.bitwise.part_products import alone
from shardwise.layers.bitwise.replicated import part_views, sequence_parts
from shardwise.layers.experts import Experts, Router, runs_of_experts


class BitEqualRouter(Router):
    """Chooses for each part of the sequence by itself."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        is_cut = self.sequence_parallel_enabled
        count = sequence_parts(x, self.group, is_cut)
        views = part_views(self.weight, count, self.group if is_cut else None)
        parts = [self.route(part, weight) for part, weight in zip(x.chunk(count), views, strict=True)]
        weights, experts = zip(*parts, strict=True)
        return torch.cat(weights), torch.cat(experts)


class BitEqualExperts(Experts):
    """Multiplies the rows of each rank, and each part of the width, by themselves."""

    def prepare(self) -> None:
        for parameter in (self.gate_up, self.down):
            placement.add_further_gradients(parameter, self.ranks.group.size - 1)

    def sum_(self, x: Tensor, weights: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
        matrices = [view for parameter in (self.gate_up, self.down) for view in _by_source(parameter)]
        journey = _Journey.of(experts, counts, self.ranks.group)
        arguments = (x, weights, journey, self.group.parts, *(view.unflatten(0, (self.count, -1)) for view in matrices))
        return cast(Tensor, _SumOfParts.apply(*arguments))  # type: ignore[no-untyped-call]


def _by_source(parameter: torch.nn.Parameter) -> tuple[Tensor, ...]:
    """Return a view of a parameter for the rows of each of the s ranks."""
    further = placement.further_gradients(parameter)
    return cast(tuple[Tensor, ...], _Views.apply(parameter, further))  # type: ignore[no-untyped-call]


class _Views(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, further: Sequence[placement.FurtherGradient]) -> tuple[Tensor, ...]:
        ctx.further = further
        return tuple(parameter.view_as(parameter) for _ in range(1 + len(further)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        for gradient, of_source in zip(ctx.further, grads[1:], strict=True):
            gradient.add(of_source)
        return grads[0], None


@dataclass(frozen=True)
class _Journey:
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
    def of(experts: Tensor, counts: Tensor, group: Group) -> _Journey:
        sent = counts.view(group.size, -1)
        arriving = collectives.all_to_all(sent, group) if group.size > 1 else sent
        runs = runs_of_experts(arriving.flatten().tolist())
        return _Journey(
            group,
            experts.flatten().argsort(stable=True),
            experts.shape[1],
            sent.sum(1).tolist(),
            arriving.sum(1).tolist(),
            [(*divmod(number, arriving.shape[1]), run) for number, run in runs],
        )

    def tokens_there(self, x: Tensor) -> Tensor:
        """Send the rows of tokens `[T, …]`: `[R, …]`."""
        return self._moved(x[self.rows // self.per_token], self.sent, self.arriving)

    def rows_there(self, by_row: Tensor) -> Tensor:
        """Send what each row has of its own, `[T, k]`: `[R]`."""
        return self._moved(by_row.flatten()[self.rows], self.sent, self.arriving)

    def back(self, parts: Tensor) -> Tensor:
        """Send parts of results back, to the places of their rows: `[P, R, …]` → `[P, T, k, …]`."""
        by_row = self._moved(parts.transpose(0, 1).contiguous(), self.arriving, self.sent)
        placed = torch.empty_like(by_row).index_copy_(0, self.rows, by_row)
        return placed.unflatten(0, (-1, self.per_token)).movedim(2, 0)

    def sums_back(self, parts: Tensor) -> Tensor:
        """Send parts of results back, and add those of a token's experts, then the parts: `[P, R, H]` → `[T, H]`."""
        return collectives.tree_sum(reduce(torch.add, self.back(parts).unbind(2)))

    def _moved(self, rows: Tensor, sent: list[int], arriving: list[int]) -> Tensor:
        return collectives.all_to_all(rows, self.group, sent, arriving) if self.group.size > 1 else rows


class _SumOfParts(torch.autograd.Function):
    """As `layers/experts.py`'s sum, of products for each source of rows, expert and part of the width."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, journey: _Journey, count: int, *matrices: Tensor
    ) -> Tensor:
        rows = journey.tokens_there(x)
        weight = journey.rows_there(weights).to(x.dtype)[:, None]
        gate_up, down = matrices[0], matrices[-1]
        joined = x.new_empty(2, count, len(rows), down.shape[2] // count)
        y = x.new_empty(count, *rows.shape)
        for _, expert, run in journey.runs:
            for part, (gate, up, to_hidden) in enumerate(_parts(gate_up[expert], down[expert], count)):
                gated = torch.mm(rows[run], gate.t(), out=joined[0, part, run])
                raised = torch.mm(rows[run], up.t(), out=joined[1, part, run])
                torch.mm(F.silu(gated).mul_(raised).mul_(weight[run]), to_hidden.t(), out=y[part, run])
        ctx.save_for_backward(rows, weight, joined, gate_up, down)
        ctx.journey = journey
        ctx.weights = weights
        ctx.sources = len(matrices) // 2
        return journey.sums_back(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, joined, gate_up, down = ctx.saved_tensors
        journey = ctx.journey
        count = joined.shape[1]
        dy = journey.tokens_there(grads[0])
        dx = rows.new_empty(count, *rows.shape)
        d_weight = ctx.weights.new_empty(count, len(rows))
        d_gate_up = [torch.zeros_like(gate_up) for _ in range(ctx.sources)]
        d_down = [torch.zeros_like(down) for _ in range(ctx.sources)]
        for source, expert, run in journey.runs:
            operands = _parts(gate_up[expert], down[expert], count)
            targets = d_gate_up[source][expert].unflatten(0, (2, count, -1))
            for part, (gate, up, to_hidden) in enumerate(operands):
                gated, raised = joined[0, part, run], joined[1, part, run]
                silu = F.silu(gated)
                activated = silu * raised
                d_activated = torch.mm(dy[run], to_hidden)
                d_weight[part, run] = torch.mul(d_activated, activated).to(d_weight.dtype).sum(-1)
                columns = slice(part * len(gate), (part + 1) * len(gate))
                d_down[source][expert, :, columns] = torch.mm(dy[run].t(), activated.mul_(weight[run]))
                d_activated.mul_(weight[run])
                d_up = silu.mul_(d_activated)
                d_gate = torch.ops.aten.silu_backward(d_activated.mul_(raised), gated)
                torch.mm(d_gate.t(), rows[run], out=targets[0, part])
                torch.mm(d_up.t(), rows[run], out=targets[1, part])
                torch.mm(d_gate, gate, out=dx[part, run]).addmm_(d_up, up)
        d_weights = collectives.tree_sum(journey.back(d_weight))
        return journey.sums_back(dx), d_weights, None, None, *d_gate_up, *d_down


def _parts(gate_up: Tensor, down: Tensor, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return gate, up and down projection of each part of an expert: `[w, H]`, `[w, H]`, `[H, w]`."""
    gates, ups = gate_up.unflatten(0, (2, count, -1))
    return list(zip(gates, ups, map(alone, down.chunk(count, dim=1)), strict=True))
