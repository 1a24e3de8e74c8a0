"""Weight gradients that a matmul adds to `grad` by itself, as in Megatron-LM.

Autograd's way is a product in bfloat16 and its addition to `grad`: 12 bytes an element, and each micro-batch rounds the
product to bfloat16. A device that multiplies bfloat16 and adds to float32 in one kernel moves 8 bytes and does not
round. Autograd is then given no gradient, and calls the hooks of the weight all the same.

If there is no gradient to add to, or autograd itself must have the gradient, the same kernel makes it in float32, so
that no layout and no stage of ZeRO rounds otherwise than the others.

Compiled graphs add by an operator, to gradients that are inputs of the graph (`graph_gradients`).

Shapes per rank: T tokens, I input features, O output features.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


def add_without_cast(weights: Iterable[nn.Parameter]) -> None:
    """Let autograd add gradients of these weights to sums in another dtype without copies in that dtype.

    Each weight must be used once in a backward pass: the gradients of several uses would be added in their own dtype.
    """
    for weight in weights:
        weight.grad_dtype = None


def products_add(x: Tensor, weight: Tensor) -> bool:
    """Return whether a linear layer of x `[…, I]` and a weight is one of those that `adding_linear` computes."""
    if not torch.is_grad_enabled() or not is_made_by_products(x, weight):
        return False
    return not torch.compiler.is_compiling() or graph_gradient_of(weight) is not None


def is_made_by_products(x: Tensor, weight: Tensor) -> bool:
    """Return whether `add_or_return` makes the gradient of a weight, for a layer's input x `[…, I]`."""
    is_bfloat16 = x.dtype == weight.dtype == torch.bfloat16
    return is_bfloat16 and hasattr(weight, "products_add") and not torch.is_autocast_enabled(x.device.type)


def adding_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x weightᵀ + bias`, where products add: x `[…, I]`, weight `[O, I]` → `[…, O]`."""
    if torch.compiler.is_compiling():
        return cast(Tensor, _GraphLinear.apply(x, weight, bias, graph_gradient_of(weight)))  # type: ignore[no-untyped-call]
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
        dy_TO = dy.reshape(-1, dy.shape[-1])
        x_TI = x.reshape(-1, x.shape[-1])
        dx = (dy_TO @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        dw = add_or_return(ctx.weight, dy_TO, x_TI) if ctx.needs_input_grad[1] else None
        db = dy_TO.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, db


class _GraphLinear(torch.autograd.Function):
    """The same in a compiled graph, whose input `total` is the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, total)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, total = ctx.saved_tensors
        dy = grads[0]
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dy_TO = dy.reshape(-1, dy.shape[-1])
        torch.ops.shardwise.add_product_(total, dy_TO.t(), x.reshape(-1, x.shape[-1]))
        db = dy_TO.sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, db, None


def graph_gradient_of(weight: Tensor) -> Tensor | None:
    """Return the gradient of a weight that a graph of a linear layer takes as its input, if it does."""
    return getattr(weight, "graph_gradient", None)


@contextmanager
def graph_gradients(gradients: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, a graph of linear layers takes the gradients to which their products add in place as inputs.

    Args:
        gradients: pairs of a parameter and its gradient in float32.
    """
    weights = []
    for weight, gradient in gradients:
        if getattr(weight, "products_add", None) == "in place":
            # Autograd refuses a saved tensor that has changed, as these do with each micro-batch: this one counts only
            # the changes that are made by itself.
            cast(Any, weight).graph_gradient = gradient.data
            weights.append(weight)
    try:
        yield
    finally:
        for weight in weights:
            del cast(Any, weight).graph_gradient


def add_or_return(weight: Tensor, dy_TO: Tensor, x_TI: Tensor) -> Tensor | None:
    """Add `dyᵀ x` to the gradient of a weight that `is_made_by_products`, or return it in float32 for autograd.

    ZeRO-2 and 3 have no memory for a gradient before the first one of a step.
    """
    total = gradient_to_add_to(weight)
    if total is not None:
        add_product_(total, dy_TO.t(), x_TI)
        return None
    gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    add_product_(gradient, dy_TO.t(), x_TI)
    return gradient


def gradient_to_add_to(weight: Tensor) -> Tensor | None:
    """Return the float32 gradient of a weight if a backward pass adds to it by itself, or None."""
    # Views of a weight have no gradient, and torch warns of each question for it.
    total = weight.grad if getattr(weight, "products_add", None) == "in place" else None
    return total if total is not None and total.dtype == torch.float32 else None


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


@functools.cache
def define_add_product() -> None:
    """Define the operator of compiled graphs."""

    @torch.library.custom_op("shardwise::add_product_", mutates_args=("total",))
    def operator(total: Tensor, a: Tensor, b: Tensor) -> None:
        add_product_(total, a, b)
