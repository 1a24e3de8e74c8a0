"""Products of linear layers in 8-bit floating point (`precision.matmul=fp8`).

Inputs and weights are rounded to e4m3, and gradients of outputs to e5m2 (arXiv:2209.05433). Each tensor has a scale of
its own: the least power of two by which its largest number fits the format (as in arXiv:2412.19437). The ranks that
hold parts of a tensor agree on that number, so that no cut of a layer or of samples changes a scale. Powers of two make
the rounded numbers exact in bfloat16 too, where bit-equal layers multiply them (`bitwise/`).

Shapes per rank: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group
from shardwise.distributed.torch_private import scaled_matmul
from shardwise.layers.matmul import graph_gradient_of, is_made_by_products, wrong_width

OPERAND = torch.float8_e4m3fn
"""The format of inputs and weights."""
GRADIENT = torch.float8_e5m2
"""The format of gradients of outputs."""
_MANTISSA = 2**23 - 1
_EXPONENT = 0xFF << 23  # bits of a float32 number


@dataclass(frozen=True)
class Scaling:
    """The scales of a linear layer's tensors.

    Attributes:
        context_group: ranks that share the tokens of each sample, and so have parts of inputs and of gradients.
    """

    group: Group
    cuts_outputs: bool
    context_group: Group = field(default_factory=Group)

    def of_input(self, x: Tensor) -> Tensor:
        """Return the scale of x `[…, I]`. A collective where the inputs or the samples are cut."""
        groups = [self.context_group] if self.cuts_outputs else [self.group, self.context_group]
        return _scales([x], groups, OPERAND)[0]

    def of_weight(self, weight: Tensor) -> Tensor:
        """Return the scale of a weight `[O, I]`. A collective, unless `keep_scales` has kept it."""
        scale: Tensor | None = getattr(weight, "fp8_scale", None)
        return _scales([weight.detach()], [self.group], OPERAND)[0] if scale is None else scale

    def of_gradient(self, dy: Tensor) -> Tensor:
        """Return the scale of the gradient of the outputs. A collective where the outputs or the samples are cut."""
        groups = [self.group, self.context_group] if self.cuts_outputs else [self.context_group]
        return _scales([dy], groups, GRADIENT)[0]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x weightᵀ + bias` by `fp8_linear`."""
        return fp8_linear(x, weight, bias, self)


def keep_scales(weights: Sequence[Tensor], group: Group) -> None:
    """Compute the scales of weights that the ranks of a group share, with one collective, and keep them."""
    for weight, scale in zip(weights, _scales([weight.detach() for weight in weights], [group], OPERAND), strict=True):
        # In memory of its own: kernels of compiled graphs want their inputs aligned.
        cast(Any, weight).fp8_scale = scale.clone()


def _scales(tensors: Sequence[Tensor], groups: Sequence[Group], dtype: torch.dtype) -> list[Tensor]:
    bounds = [x.aminmax() for x in tensors]
    largest = torch.stack([torch.maximum(-lowest, highest) for lowest, highest in bounds]).float()
    for group in groups:
        largest = collectives.all_reduce_(largest, group, op="max")
    ratios = (largest / torch.finfo(dtype).max).clamp_min(torch.finfo(torch.float32).tiny)
    # A ratio that is no power of two has a mantissa, which carries into the exponent.
    return list((ratios.view(torch.int32) + _MANTISSA & _EXPONENT).view(torch.float32).unbind())


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x as numbers of an fp8 format times the scale, in the dtype of x."""
    return _to_fp8(x, scale, dtype).to(x.dtype) * scale


def _to_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * scale.reciprocal()).to(dtype)


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
    """Return `x weightᵀ + bias`: x `[…, I]`, weight `[O, I]` → `[…, O]`.

    Raises:
        ValueError: x has another width than the rank's weight takes.
    """
    if x.shape[-1] != weight.shape[-1]:
        raise wrong_width(x, weight)
    total = graph_gradient_of(weight)
    y = cast(Tensor, _Fp8Linear.apply(x, weight, scaling.of_weight(weight), total, scaling))  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


class _Fp8Linear(torch.autograd.Function):
    """Keeps x in fp8. The weight is kept as it is, and rounded again: ZeRO-3 frees it between the passes.

    `total`: float32 gradient to which that of the weight is added in a compiled graph; None: autograd adds it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, weight_scale: Tensor, total: Tensor | None, scaling: Scaling
    ) -> Tensor:
        x_scale = scaling.of_input(x)
        x8 = _to_fp8(x.reshape(-1, x.shape[-1]), x_scale, OPERAND)
        ctx.save_for_backward(x8, weight, x_scale, weight_scale, total)
        ctx.scaling = scaling
        ctx.shape = x.shape
        ctx.dtype = x.dtype
        ctx.gradient_dtype = torch.float32 if is_made_by_products(x, weight) else weight.dtype
        weight8 = _to_fp8(weight, weight_scale, OPERAND)
        y = scaled_matmul(x8, weight8.t(), x_scale, weight_scale, x.dtype, fast=True)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x8, weight, x_scale, weight_scale, total = ctx.saved_tensors
        scale = ctx.scaling.of_gradient(grads[0])
        dy8 = _to_fp8(grads[0].reshape(-1, grads[0].shape[-1]), scale, GRADIENT)
        dx = None
        dw = None
        if ctx.needs_input_grad[0]:
            weight8 = _to_fp8(weight, weight_scale, OPERAND)
            dx = scaled_matmul(dy8, weight8, scale, weight_scale, ctx.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            dw = scaled_matmul(dy8.t(), x8, scale, x_scale, ctx.gradient_dtype)
            if total is not None:
                total.add_(dw)
                dw = None
        return dx, dw, None, None, None
