"""Replicated parameters that meet only a part of the activations on each rank, in a bit-equal training.

Their gradients are complete after each micro-batch: the sum over the parts of a rank, then over the ranks. Inside of
`ReplicatedParameters.forward_pass` the ranks sum those of all layers at once, when the backward pass ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group

_Kind = tuple[Group | None, int, torch.dtype]
"""The ranks over which gradients are summed, the parts of each rank, and the parameters' dtype."""


class ReplicatedParameters:
    """The replicated parameters that the layers of a model use in a forward pass.

    Those that the last pass used are given to the next one by one autograd function, whose backward pass has one
    collective. In the first pass, and outside of one, each layer has a function and a collective of its own.
    """

    def __init__(self) -> None:
        self._used: dict[_Kind, dict[Tensor, None]] = {}

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Let `part_views` take the parameters from here."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            yield
            return
        views = {kind: _views_of_all(list(parameters), kind) for kind, parameters in self._used.items()}
        this_pass = _Pass(views)
        token = _current.set(this_pass)
        try:
            yield
        finally:
            _current.reset(token)
            self._used = this_pass.used


class _Pass:
    """A forward pass: the views that it may use, and the parameters that its layers have asked for."""

    def __init__(self, views: dict[_Kind, dict[Tensor, tuple[Tensor, ...]]]) -> None:
        self.views = views
        self.used: dict[_Kind, dict[Tensor, None]] = {}


_current: ContextVar[_Pass | None] = ContextVar("_current", default=None)


def part_views(parameter: Tensor, count: int, ranks: Group | None) -> tuple[Tensor, ...]:
    """Return a view of a parameter for each of `count` parts of this rank.

    The gradient of the parameter is the sum of the views' over the parts, then over `ranks`, if any, in the order of
    `collectives.tree_sum`.
    """
    kind = (ranks, count, parameter.dtype)
    current = None if torch.compiler.is_compiling() else _current.get()
    if current is None or not parameter.requires_grad:
        return _views_of_all([parameter], kind)[parameter]
    # Without communication a function for all would only let their gradients come last.
    if ranks is not None and ranks.size > 1:
        current.used.setdefault(kind, {})[parameter] = None
    # Layers that share a parameter share its views, so that the gradients of each part are added first.
    views = current.views.setdefault(kind, {})
    if parameter not in views:
        views |= _views_of_all([parameter], kind)
    return views[parameter]


def _views_of_all(parameters: list[Tensor], kind: _Kind) -> dict[Tensor, tuple[Tensor, ...]]:
    ranks, count, _ = kind
    views = cast(tuple[Tensor, ...], _PartViews.apply(ranks, count, *parameters))  # type: ignore[no-untyped-call]
    return {p: views[number * count : (number + 1) * count] for number, p in enumerate(parameters)}


class _PartViews(torch.autograd.Function):
    """Gives `count` views of each parameter, whose gradients it sums."""

    @staticmethod
    def forward(ctx: Any, ranks: Group | None, count: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        ctx.count = count
        return tuple(p.view_as(p) for p in parameters for _ in range(count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        totals = []
        for start in range(0, len(grads), ctx.count):
            totals.append(collectives.tree_sum(torch.stack(grads[start : start + ctx.count])))
        if ctx.ranks is not None:
            flat = torch.cat([total.flatten() for total in totals])
            summed = collectives.all_reduce_(flat, ctx.ranks).split([total.numel() for total in totals])
            totals = [part.view_as(total) for part, total in zip(summed, totals, strict=True)]
        return None, None, *totals
