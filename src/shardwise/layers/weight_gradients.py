"""Weight gradients that a matmul adds to `grad` by itself, as in Megatron-LM.

Autograd's way is a product in bfloat16, its cast to float32 and an addition: 20 bytes an element, and each micro-batch
rounds the product to bfloat16. A device that multiplies bfloat16 and adds to float32 in one kernel moves 8 bytes and
does not round. Autograd is then given no gradient, and calls the hooks of the weight all the same.

If there is no gradient to add to, or autograd itself must have the gradient, the same kernel makes it in float32, so
that no layout and no stage of ZeRO rounds otherwise than the others.

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


def let_products_add(weights: Iterable[nn.Parameter], *, in_place: bool = True) -> None:
    """Let products of linear layers make the gradients of these weights `[O, I]` in float32.

    Args:
        weights: weights whose gradients are summed in float32.
        in_place: True if products add to `grad`. Only `backward()` may then compute the gradients:
            `torch.autograd.grad` finds none.
    """
    for weight in weights:
        cast(Any, weight).products_add = "in place" if in_place else "returned"


def products_add(x: Tensor, weight: Tensor) -> bool:
    """Return whether a linear layer of x `[…, I]` and a weight is one of those that `adding_linear` computes."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and is_made_by_products(x, weight)


def is_made_by_products(x: Tensor, weight: Tensor) -> bool:
    """Return whether `add_or_return` makes the gradient of a weight, for a layer's input x `[…, I]`."""
    is_bfloat16 = x.dtype == weight.dtype == torch.bfloat16
    return is_bfloat16 and hasattr(weight, "products_add") and not torch.is_autocast_enabled(x.device.type)


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
        dw = add_or_return(ctx.weight, dy_TO, x_TI) if ctx.needs_input_grad[1] else None
        db = dy_TO.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, db


def add_or_return(weight: Tensor, dy_TO: Tensor, x_TI: Tensor) -> Tensor | None:
    """Add `dyᵀ x` to the gradient of a weight that `is_made_by_products`, or return it in float32 for autograd.

    ZeRO-2 and 3 have no memory for a gradient before the first one of a step.
    """
    total = weight.grad
    if cast(Any, weight).products_add == "in place" and total is not None and total.dtype == torch.float32:
        add_product_(total, dy_TO.t(), x_TI)
        return None
    gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    add_product_(gradient, dy_TO.t(), x_TI)
    return gradient


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
