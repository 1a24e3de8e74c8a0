"""Weight gradients that a matmul adds to `grad` by itself, as in Megatron-LM.

Autograd's way is a product in bfloat16, its cast to float32 and an addition: 20 bytes an element, and each micro-batch
rounds the product to bfloat16. A device that multiplies bfloat16 and adds to float32 in one kernel moves 8 bytes and
does not round. Autograd is then given no gradient, and calls the hooks of the weight all the same.

Shapes per rank: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.distributed import devices


def let_products_add(weights: Iterable[nn.Parameter]) -> None:
    """Let products of linear layers add to the gradients of these weights `[O, I]`.

    Only `backward()` may then compute their gradients: `torch.autograd.grad` finds none.
    """
    for weight in weights:
        cast(Any, weight).products_add = True


def products_add(x: Tensor, weight: Tensor) -> bool:
    """Return whether the product of x `[…, I]` and a weight adds to the weight's gradient."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not getattr(weight, "products_add", False):
        return False
    return x.dtype == weight.dtype == torch.bfloat16 and not torch.is_autocast_enabled(x.device.type)


def adding_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x weightᵀ + bias`, where products add: x `[…, I]`, weight `[O, I]` → `[…, O]`."""
    return cast(Tensor, _AddingLinear.apply(x, weight, bias))  # type: ignore[no-untyped-call]


class _AddingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Recompute gives the backward pass a detached weight, which has no `grad`.
        ctx.weight = weight
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dy_TO = dy.reshape(-1, dy.shape[-1])
        x_TI = x.reshape(-1, x.shape[-1])
        dw = None
        if ctx.needs_input_grad[1]:
            total = ctx.weight.grad
            if total is not None and total.dtype == torch.float32:
                add_product_(total, dy_TO.t(), x_TI)
            else:
                # ZeRO-2 and 3 have no memory for gradients before the first one.
                dw = dy_TO.t() @ x_TI
        db = dy_TO.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, db


def adds_in_one_kernel(total: Tensor, a: Tensor) -> bool:
    """Return whether `add_product_` adds the product of a bfloat16 matrix a to a float32 `total` in one kernel."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(total.device.type):
        return False
    return a.dtype == torch.bfloat16 and total.dtype == torch.float32 and devices.adds_products(total.device)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a b` to `total`, in place: a `[O, T]` and b `[T, I]` in bfloat16, total `[O, I]` in float32."""
    if devices.adds_products(total.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)
