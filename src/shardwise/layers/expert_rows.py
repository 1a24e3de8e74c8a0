"""Rows of experts: the way of tokens to the ranks that divide the experts and back, and their products.

Shapes per rank: T tokens, k experts a token, U tokens that arrive, R rows, P parts of a sum, F features of an expert,
w = F/P of them in a part, H hidden, N experts of this rank, s ranks that divide the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group
from shardwise.layers.matmul import product, writes_in_place


def rows_of_each(experts: Tensor, count: int) -> Tensor:
    """Return the rows of each of `count` experts, `[N]` of int64; unlike `bincount`, the host does not wait for it."""
    chosen = experts.flatten()
    return torch.zeros(count, dtype=torch.int64, device=experts.device).scatter_add_(0, chosen, torch.ones_like(chosen))


class SumsByToken(torch.autograd.Function):
    """Adds rows of choices at `places`, `[n, …]`, by token and in the order of these; CUDA's `index_add` has none."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, places: Tensor, per_token: int, count: int) -> Tensor:
        tokens = places // per_token
        ctx.save_for_backward(tokens)
        rows = rows_of_each(tokens, count)
        sums = F.embedding_bag(places.argsort(), y.flatten(1), rows.cumsum(0) - rows, mode="sum")
        return sums.view(count, *y.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None, None


@dataclass(frozen=True)
class Journey:
    """The way of tokens to the ranks that have their experts, and of results back."""

    group: Group
    count: int  # N
    experts: Tensor  # numbers of experts, `[T, k]`, ascending
    once: bool  # true if a token travels once to a rank, with all its choices; false if it does with each by itself
    places: Tensor  # of the choices with which tokens travel, by rank, among all T·k
    sent: list[int]  # tokens for each rank
    arriving: list[int]  # tokens from each rank; U is their sum
    rows: int  # R

    @staticmethod
    def of(experts: Tensor, counts: Tensor, group: Group, *, once: bool) -> Journey:
        """Plan the way of all tokens to experts of `counts` rows. Communicates: two numbers for each rank."""
        count = len(counts) // group.size
        ranks = experts // count
        if once:
            ranks[:, 1:] = torch.where(ranks[:, 1:] == ranks[:, :-1], group.size, ranks[:, 1:])
        sent = torch.stack((rows_of_each(ranks, group.size + 1)[:-1], counts.view(group.size, -1).sum(1)), dim=1)
        arriving = collectives.all_to_all(sent, group) if group.size > 1 else sent
        (sizes, _), (arriving_sizes, rows) = torch.stack((sent, arriving)).transpose(1, 2).tolist()
        places = ranks.flatten().argsort(stable=True)[: sum(sizes)]
        return Journey(group, count, experts, once, places, sizes, arriving_sizes, sum(rows))

    def tokens_there(self, x: Tensor, parts: int = 1) -> Tensor:
        """Send tokens: `[T, H]` → `[U, P, H]`, of which all parts are equal. Gradients come back as sums do."""
        return cast(Tensor, _Moved.apply(x, self, self.experts.shape[1], parts))  # type: ignore[no-untyped-call]

    def choices_there(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Send the weights, `[T, k]`, and the numbers of experts.

        Returns:
            Those that arrive, `[U, k]` or `[U, 1]`. Numbers of experts begin at 0 on each rank; those of others are N.
        """
        pairs = (weights.float(), self.experts.float())  # bfloat16 rounds numbers above 256
        choices = torch.cat(pairs, 1) if self.once else torch.stack(pairs, -1).flatten(0, 1)
        per_token = self.experts.shape[1] if self.once else 1
        arrived = cast(Tensor, _Moved.apply(choices, self, per_token, 1))  # type: ignore[no-untyped-call]
        values, numbers = arrived.squeeze(1).chunk(2, dim=1)
        experts = numbers.detach().long()
        here = torch.where(experts // self.count == self.group.rank, experts % self.count, self.count)
        return values.to(weights.dtype), here

    def sums_back(self, y: Tensor) -> Tensor:
        """Send results back, and add those of a token in the order of its experts, then the parts: → `[T, H]`."""
        return cast(Tensor, _Moved.apply(y, self, self.experts.shape[1], 0))  # type: ignore[no-untyped-call]

    def moved(self, y: Tensor, per_token: int, parts: int) -> Tensor:
        """Return what arrives at the experts, `[U, P, …]`; with 0 parts, sums of what comes back, `[T, …]`."""
        sizes = (self.sent, self.arriving) if parts else (self.arriving, self.sent)
        rows = y.index_select(0, self.places // per_token) if parts else y
        y = collectives.all_to_all(rows, self.group, *sizes) if self.group.size > 1 else rows
        if parts:
            return y[:, None].expand(-1, parts, *y.shape[1:])
        total: Tensor = SumsByToken.apply(y, self.places, per_token, self.experts.numel() // per_token)  # type: ignore[no-untyped-call]
        return collectives.tree_sum(total.transpose(0, 1))


class _Moved(torch.autograd.Function):
    """There, as so many parts; with 0 of them back, where they are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, journey: Journey, per_token: int, parts: int) -> Tensor:
        ctx.call = (journey, per_token, 0 if parts else x.shape[1])
        return journey.moved(x, per_token, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        journey, per_token, parts = ctx.call
        return journey.moved(grads[0], per_token, parts), None, None, None


def _runs_of_experts(counts: Sequence[int]) -> list[tuple[int, slice]]:
    """Return each expert that has rows, with its run of the sorted rows."""
    ends = zip(counts, accumulate(counts), strict=True)
    return [(expert, slice(end - count, end)) for expert, (count, end) in enumerate(ends) if count]


def weighted_sums(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor]
) -> Tensor:
    """Return the weighted sum of each token's experts by parts of their width, `[U, P, H]`.

    The weight of a row is applied before the down projection. One expert goes after the other, so that what its rows
    need stays in the processor's cache.

    Args:
        x: tokens, `[U, P, H]`.
        weights: of the choices of each token, `[U, k]`.
        experts: numbers of experts, `[U, k]`, in which order a token's terms are added. Those of other ranks are not
            computed: theirs is at least the number of views times N.
        gate_up: gate and up projection of each expert, `[N, 2F, H]`; or views of it, each of which has N numbers and
            gets the gradient of the rows at them.
        down: down projection of each expert, `[N, H, F]`, or views likewise.
    """
    return cast(Tensor, _WeightedSums.apply(x, weights, experts, *gate_up, *down))  # type: ignore[no-untyped-call]


class _WeightedSums(torch.autograd.Function):
    """Keeps gate and up of each row, and computes the activations again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, experts: Tensor, *matrices: Tensor) -> Tensor:
        gate_up, down = matrices[0], matrices[-1]
        chosen = experts.flatten()
        count = len(matrices) // 2 * len(down)
        ctx.counts = torch.bincount(chosen, minlength=count)[:count].tolist()
        rows = chosen.argsort(stable=True)[: sum(ctx.counts)]
        tokens = rows // experts.shape[1]
        weight = weights.flatten()[rows, None].to(x.dtype)
        parts = x.shape[1]
        joined = x.new_empty(parts, len(rows), gate_up.shape[1] // parts)
        y = torch.zeros_like(x, memory_format=torch.contiguous_format)
        for number, run in _runs_of_experts(ctx.counts):
            expert = number % len(down)
            token = tokens[run]
            for part, projections in enumerate(_parts(gate_up[expert], down[expert], parts)):
                x_rows = x[:, part].index_select(0, token)
                terms = _expert_outputs(x_rows, weight[run], joined[part, run], *projections)
                y[:, part].index_add_(0, token, terms)
        ctx.save_for_backward(x, weight, rows, tokens, joined, gate_up, down)
        ctx.weights = weights.dtype, weights.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rows, tokens, joined, gate_up, down = ctx.saved_tensors
        dy, (dtype, shape) = grads[0], ctx.weights
        dx = torch.zeros_like(x, memory_format=torch.contiguous_format)
        d_weight = x.new_empty(joined.shape[:2], dtype=dtype)
        parts = len(joined)
        views = range(len(ctx.counts) // len(down))
        d_gate_up, d_down = ([torch.empty_like(whole) for _ in views] for whole in (gate_up, down))
        for view, expert in (divmod(number, len(down)) for number, count in enumerate(ctx.counts) if not count):
            d_gate_up[view][expert] = d_down[view][expert] = 0.0
        for number, run in _runs_of_experts(ctx.counts):
            view, expert = divmod(number, len(down))
            token = tokens[run]
            into_width = d_gate_up[view][expert].unflatten(0, (2, parts, -1))
            into_hidden = d_down[view][expert].unflatten(1, (parts, -1))
            for part, projections in enumerate(_parts(gate_up[expert], down[expert], parts)):
                into = into_width[:, part], into_hidden[:, part]
                # No name holds the selected rows beside the next expert's.
                dx_rows, d_weight[part, run] = _expert_gradients(
                    dy[:, part].index_select(0, token),
                    x[:, part].index_select(0, token),
                    weight[run],
                    joined[part, run],
                    projections,
                    into,
                )
                dx[:, part].index_add_(0, token, dx_rows)
                del dx_rows
        d_weights = d_weight.new_zeros(shape.numel()).index_copy_(0, rows, collectives.tree_sum(d_weight))
        return dx, d_weights.view(shape), None, *d_gate_up, *d_down


_Pair: TypeAlias = tuple[Tensor, Tensor]


def _parts(gate_up: Tensor, down: Tensor, count: int) -> list[_Pair]:
    """Return gate and up, and down projection of each part of an expert: `[2w, H]` and `[H, w]`."""
    if count == 1:
        return [(gate_up, down)]
    halves = gate_up.unflatten(0, (2, count, -1)).transpose(0, 1).flatten(1, 2)
    return list(zip(halves, (part.contiguous() for part in down.chunk(count, dim=1)), strict=True))


# ---- rows at one expert, or at a part of its width: n rows

_LARGE = 2**23  # multiplications from which on oneDNN's kernel for one more number of rows, 0.4 ms and 600 KiB, pays


def _product(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `x weightᵀ`, written to `out` of any shape, if given; the bits are the same."""
    if out is not None and out.is_contiguous() and writes_in_place(x, weight):
        return torch.mm(x, weight.t(), out=out.view(len(x), -1))
    y = product(x, weight) if x.numel() * len(weight) >= _LARGE else F.linear(x, weight)
    return y if out is None else out.copy_(y.reshape(out.shape))


def _expert_outputs(x: Tensor, weight: Tensor, joined: Tensor, to_width: Tensor, to_hidden: Tensor) -> Tensor:
    """Return `down(weight · silu(gate) · up)` of rows x, `[n, H]`, and write gate and up to `joined`, `[n, 2w]`.

    Weights of rows are `[n, 1]`, the projection of gate and up `[2w, H]`, and the down projection `[H, w]`.
    """
    gate, up = _product(x, to_width, out=joined).chunk(2, dim=-1)
    return _product(F.silu(gate).mul_(up).mul_(weight), to_hidden)


def _expert_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, joined: Tensor, projections: _Pair, into: _Pair
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weights `[n]`; dy: that of `_expert_outputs`.

    Those of the projections are written to `into`, `[2, w, H]` and `[H, w]`.
    """
    (to_width, to_hidden), (into_width, into_hidden) = projections, into
    gate, up = joined.chunk(2, dim=-1)
    silu = F.silu(gate)
    activated = silu * up
    d_activated = _product(dy, to_hidden.t())
    d_weight = torch.linalg.vecdot(d_activated, activated)
    _product(dy.t(), activated.mul_(weight).t(), into_hidden)
    d_activated.mul_(weight)
    d_joined = torch.empty_like(joined)
    d_gate, d_up = d_joined.chunk(2, dim=-1)
    torch.mul(d_activated, silu, out=d_up)
    torch.ops.aten.silu_backward.grad_input(d_activated.mul_(up), gate, grad_input=d_gate)
    _product(d_joined.t(), x.t(), into_width)
    return _product(d_joined, to_width.t()), d_weight
