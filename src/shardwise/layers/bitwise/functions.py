"""Functions without parameters whose bits would depend on the width of a rank: each part is computed by itself.

Shapes per rank: P parts; B batch; n heads; w features of a part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.layers.vectors import in_full_vectors


def activate_by_part(x: Tensor, function: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """Return an activation function of x `[…, P·w]`.

    One thread computes all elements at once, by the vector kernels alone. Several threads each take a piece of the
    tensor, whose last elements go through the other functions: so each part is computed by itself.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return function(x)
    if torch.get_num_threads() == 1:
        return in_full_vectors(function, x)
    return torch.cat([in_full_vectors(function, part) for part in x.chunk(count, -1)], -1)


def head_products(a: Tensor, b: Tensor, count: int) -> Tensor:
    """Return the product of each head: a `[B, n, S, K]`, b `[B, n, K, N]`, of which a part has n/P heads."""
    return cast(Tensor, _HeadProducts.apply(a, b, count))  # type: ignore[no-untyped-call]


class _HeadProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.count = count
        return _products_of_heads(a, b, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        da = _products_of_heads(grads[0], b.transpose(-1, -2), ctx.count) if ctx.needs_input_grad[0] else None
        db = _products_of_heads(a.transpose(-1, -2), grads[0], ctx.count) if ctx.needs_input_grad[1] else None
        return da, db, None


def _products_of_heads(a: Tensor, b: Tensor, count: int) -> Tensor:
    """Return the products of each part's heads: their number and the strides decide which kernel multiplies them."""
    parts = zip(a.chunk(count, 1), b.chunk(count, 1), strict=True)
    return torch.cat([x.contiguous() @ y.contiguous() for x, y in parts], 1)
