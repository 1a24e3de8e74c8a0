"""Bit-equal experts and routers.

A product of an expert has the rows of one micro-batch of one data-parallel rank, and one part of the width, at every
layout. Where ranks divide the experts, the rows of each rank are multiplied by themselves, and the gradients that a
rank's rows give add up by themselves until the step's end (`placement.FurtherGradient`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.config import BITWISE
from shardwise.distributed import placement
from shardwise.layers.bitwise.replicated import part_views, sequence_parts
from shardwise.layers.expert_rows import Journey, weighted_sums
from shardwise.layers.experts import Experts, Router


class BitEqualRouter(Router):
    """Chooses for each part of the sequence by itself."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        is_cut = self.sequence_parallel_enabled
        count = sequence_parts(x, self.group, is_cut)
        views = part_views(self.weight, count, self.group if is_cut else None)
        parts = [self._route(part, weight) for part, weight in zip(x.chunk(count), views, strict=True)]
        return tuple(map(torch.cat, zip(*parts, strict=True)))


class BitEqualExperts(Experts):
    """Multiplies the rows of each rank, and each part of the width, by themselves."""

    def prepare(self) -> None:
        for parameter in (self.gate_up, self.down):
            placement.add_further_gradients(parameter, self.ranks.group.size - 1)

    def _sum(self, x: Tensor, weights: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
        journey = Journey.of(experts, counts, self.ranks.group, once=False)
        if len(placement.further_gradients(self.gate_up)) != self.ranks.group.size - 1:
            raise RuntimeError(
                f"a layer of experts with {BITWISE} was copied, without the gradients that it keeps: "
                "build another layer and load the state_dict of this one"
            )
        gate_up, down = (
            [view.unflatten(0, (self.count, -1)) for view in _by_source(parameter)]
            for parameter in (self.gate_up, self.down)
        )
        arrived = journey.tokens_there(x, self.group.parts)
        weights, experts = journey.choices_there(weights)
        sources = torch.tensor([self.count * source for source in range(len(gate_up))], device=x.device)
        experts += sources.repeat_interleave(torch.tensor(journey.arriving, device=x.device))[:, None]
        return journey.sums_back(weighted_sums(arrived, weights, experts, gate_up, down))


def _by_source(parameter: nn.Parameter) -> tuple[Tensor, ...]:
    """Return a view of a parameter for the rows of each of the ranks that divide the experts."""
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
