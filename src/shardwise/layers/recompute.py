"""Results that the backward pass computes again from their inputs, though what reads them is not computed again.

`torch.utils.checkpoint` repeats all that lies between its inputs and its outputs. Here a cheap function feeds a costly
one: a norm feeds a matmul, rotary positions feed attention. The costly one saves the cheap one's result, which is kept
as a *recipe*: the function, its inputs (which are saved anyway) and the place of the saved tensor in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwise.distributed.torch_private import share_storage

_R = TypeVar("_R")


class Recomputed:
    """The result of a cheap function that has no side effects and gives the same bits whenever it is called.

    Attributes:
        result: the function's result, the only tensor of its storage.
    """

    def __init__(self, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        self.result = function(*inputs)
        self.function = function
        self.inputs = tuple(tensor.detach() for tensor in inputs)


class _Recipe:
    """A saved tensor that is a view of a `Recomputed` result, without its memory."""

    def __init__(self, source: Recomputed, saved: Tensor) -> None:
        self._function = source.function
        self._inputs = source.inputs
        self._place = (saved.size(), saved.stride(), saved.storage_offset())

    def make(self) -> Tensor:
        with torch.no_grad():
            return self._function(*self._inputs).as_strided(*self._place)


@contextmanager
def dropping(*sources: Recomputed) -> Iterator[None]:
    """Keep recipes in place of the results that autograd saves inside the `with` block."""

    # Saved tensors hold the function `pack` as long as they live, which must not hold the results.
    open_sources = list(sources)

    def pack(saved: Tensor) -> Any:
        for source in open_sources:
            if share_storage(saved, source.result):
                return _Recipe(source, saved)
        # A node that saves its own output would hold itself: where only a part of a backward pass frees the graph, as
        # in a schedule that splits it, for ever. A leaf is no output.
        return saved if saved.is_leaf else saved.detach()

    try:
        with saved_tensors_hooks(pack, _unpack):
            yield
    finally:
        open_sources.clear()


def _unpack(kept: Any) -> Tensor:
    return kept.make() if isinstance(kept, _Recipe) else kept


def can_drop(x: Tensor) -> bool:
    """Return whether results that are computed from x can be dropped.

    A compiler chooses itself what its graphs keep, and autocast ends before the backward pass.
    """
    is_compiled = torch.compiler.is_compiling()
    return torch.is_grad_enabled() and not is_compiled and not torch.is_autocast_enabled(x.device.type)


def compose(outer: Callable[[Tensor], _R], inner: Callable[..., Tensor], *inputs: Tensor, drops: bool) -> _R:
    """Return `outer(inner(*inputs))`; with `drops`, what `outer` saves of the inner result is computed again."""
    if not drops or not can_drop(inputs[0]):
        return outer(inner(*inputs))
    source = Recomputed(inner, *inputs)
    with dropping(source):
        return outer(source.result)
