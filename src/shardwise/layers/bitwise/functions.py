"""Functions without parameters whose bits do not depend on the width of a rank, or on the number of elements.

torch's CPU kernels compute full vectors of elements by one function, and the last elements, if they fill no vector, by
another one. Each part is computed by itself.

Shapes per rank: P parts; B batch; n heads; w features of a part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_VECTOR = 64  # elements that torch's CPU kernels compute at once, at most
_SERIAL = 2**14  # elements that torch's CPU kernels do not divide over threads


def _in_full_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `function(x)`, computed of x made dense, and longer by zeros if vectors are not full."""
    flat = x.reshape(-1)
    padding = -flat.numel() % _VECTOR
    if not padding:
        return function(flat).view(x.shape)
    return function(F.pad(flat, (0, padding)))[: flat.numel()].view(x.shape)


def in_vectors(function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """Return an element-wise function of operands of equal shapes, computed by vector kernels and not by threads."""
    flat = [operand.reshape(-1) for operand in operands]
    count = flat[0].numel()
    padded = [F.pad(operand, (0, -count % _VECTOR)).split(_SERIAL) for operand in flat]
    results = [function(*part) for part in zip(*padded, strict=True)]
    return torch.cat(results)[:count].view(operands[0].shape)


def activate_by_part(x: Tensor, function: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """Return an activation function of x `[…, P·w]`.

    One thread computes all elements at once, by the vector kernels alone. Several threads each take a piece of the
    tensor, whose last elements go through the other functions: so each part is computed by itself.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return function(x)
    if torch.get_num_threads() == 1:
        return _in_full_vectors(function, x)
    return torch.cat([_in_full_vectors(function, part) for part in x.chunk(count, -1)], -1)


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
