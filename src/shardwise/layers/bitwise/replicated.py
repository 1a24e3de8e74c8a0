"""Parameters that meet only a part of the activations on each rank, in a bit-equal training.

Their gradients are complete after each micro-batch: the sum over the parts of a rank, then over the ranks. Inside of
`ReplicatedParameters.forward_pass` the ranks sum those of all layers at once, when the backward pass ends.

Small replicated parameters meet a part of the sequence where tensor parallelism cuts it (`part_views`). All parameters
do so with context parallelism (`SequenceParts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group
from shardwise.layers.chunks import GRADIENTS_AT_ONCE

_R = TypeVar("_R")

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
    # A view of this pass is none of the parameters of the next one.
    if current is None or not (parameter.requires_grad and parameter.is_leaf):
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
            totals = _sum_over_ranks(totals, ctx.ranks)
        return None, None, *totals


def _sum_over_ranks(gradients: Sequence[Tensor], ranks: Group) -> list[Tensor]:
    """Return the sum of each gradient over the ranks, all by one collective."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    sums = collectives.all_reduce_(flat, ranks).split([gradient.numel() for gradient in gradients])
    return [total.view_as(gradient) for total, gradient in zip(sums, gradients, strict=True)]


def apply_by_part(
    function: Callable[..., Tensor],
    x: Tensor,
    parameters: Sequence[Tensor],
    count: int,
    ranks: Group | None,
    dim: int = 0,
) -> Tensor:
    """Return `function(x, *parameters)`, computed for each of `count` parts of x along `dim`.

    The gradient of a parameter is the sum over the parts, then over `ranks`, if any. It is complete: its placement must
    not say that it is partial.
    """
    by_parameter = [part_views(parameter, count, ranks) for parameter in parameters]
    outputs = []
    for number, part in enumerate(x.chunk(count, dim)):
        outputs.append(function(part, *(shared[number] for shared in by_parameter)))
    return torch.cat(outputs, dim) if count > 1 else outputs[0]


def sequence_parts(x: Tensor, group: Group, sequence_parallel: bool) -> int:
    """Return the parts of x along dim 0, the sequence, of which a rank makes the gradient of a replicated parameter."""
    if sequence_parallel:
        return group.parts
    # x is whole on each rank: all parts are computed on all of them. A length that cannot be divided is never cut.
    grain = group.grain or 1
    return grain if len(x) % grain == 0 else 1


def apply_by_sequence_part(
    function: Callable[..., Tensor], x: Tensor, parameters: Sequence[Tensor], group: Group, *, sequence_parallel: bool
) -> Tensor:
    """Return `function(x, *parameters)` for x `[S, …]`, or `[S/g, …]`, by parts of the sequence."""
    count = sequence_parts(x, group, sequence_parallel)
    return apply_by_part(function, x, parameters, count, group if sequence_parallel else None)


class SequenceParts:
    """Calls functions of a module for each part of a rank's tokens, with views of the module's parameters.

    With context parallelism of C ranks and a grain of G, each part has the tokens and the shapes of one of G ranks.
    The gradient of a parameter is the sum of the views' over the parts, then over the C ranks, in the order of
    `collectives.tree_sum`. The first rank alone has it, and the others have 0, as the optimizer adds those of all.

    Args:
        module: its parameters must be gathered.
        group: the ranks of context parallelism.
        parameters: those of the module, by name; None: all.
    """

    def __init__(self, module: nn.Module, group: Group, parameters: Mapping[str, Tensor] | None = None) -> None:
        self._group = group
        self._caller = _Caller(module)
        named = module.named_parameters() if parameters is None else parameters.items()
        self._trained = {f"module.{name}": parameter for name, parameter in named if parameter.requires_grad}

    def results(self, function: Callable[..., _R], *by_part: Sequence[Any]) -> list[_R]:
        """Return the result of `function`, a method of the module, for each part."""
        # Views are made for each part, so that the backward pass adds the gradients of a part when it ends.
        sums = _SumsOverParts(self._group)
        results = []
        for number, arguments in enumerate(zip(*by_part, strict=True)):
            views = _ViewsOfPart.apply(sums, number, *self._trained.values())  # type: ignore[no-untyped-call]
            by_name = dict(zip(self._trained, cast(tuple[Tensor, ...], views), strict=True))
            results.append(functional_call(self._caller, by_name, (function, *arguments), tie_weights=False))
        return results

    def joined(self, function: Callable[..., Tensor], *by_row: Tensor) -> Tensor:
        """Return `function` of each part of tensors whose rows are tokens, one after the other."""
        return torch.cat(self._results_by_row(function, by_row))

    def summed(self, function: Callable[..., Tensor], *by_row: Tensor) -> Tensor:
        """Return the sum of `function` of each part, in the order of `collectives.tree_sum`."""
        return collectives.tree_sum(torch.stack(self._results_by_row(function, by_row)))

    def _results_by_row(self, function: Callable[..., Tensor], by_row: Sequence[Tensor]) -> list[Tensor]:
        return self.results(function, *(x.chunk(self._group.parts) for x in by_row))


class _Caller(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., _R], *arguments: Any) -> _R:
        return function(*arguments)


class _SumsOverParts:
    """The sums of the gradients that parameters have from each part, added in pairs in whatever order they come."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sums: dict[tuple[int, int], list[Tensor]] = {}

    def add(self, part: int, gradients: list[Tensor]) -> list[Tensor] | None:
        """Add the gradients of a part; return the complete ones after those of the last part. Then it is collective."""
        width = 1
        number = part
        while (neighbors := self._sums.pop((width, number ^ 1), None)) is not None:
            # Taken out of the lists, so that each is free after its addition.
            gradients = [neighbors.pop(0) + gradients.pop(0) for _ in range(len(gradients))]
            width *= 2
            number //= 2
        if width < self._group.parts:
            self._sums[width, number] = gradients
            return None
        if self._group.size == 1:
            return gradients
        totals = []
        for run in _runs(gradients):
            totals += _sum_over_ranks(run, self._group)
        return totals if self._group.rank == 0 else [total.zero_() for total in totals]


def _runs(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield runs of the tensors with at most `GRADIENTS_AT_ONCE` elements, or of one that has more."""
    run: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        elements += tensor.numel()
        if run and elements > GRADIENTS_AT_ONCE:
            yield run
            run = []
            elements = tensor.numel()
        run.append(tensor)
    if run:
        yield run


class _ViewsOfPart(torch.autograd.Function):
    """Gives a view of each parameter for a part, whose gradients are summed over the parts."""

    @staticmethod
    def forward(ctx: Any, sums: _SumsOverParts, part: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.sums = sums
        ctx.part = part
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # Those of parameters that the function does not use are None.
        totals = ctx.sums.add(ctx.part, [gradient for gradient in gradients if gradient is not None])
        of_used = iter(totals or ())
        return None, None, *(None if gradient is None else next(of_used, None) for gradient in gradients)
