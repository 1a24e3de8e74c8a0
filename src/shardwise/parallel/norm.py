"""Normalisation over the hidden dimension, replicated in a tensor-parallel group.

Under sequence parallelism each rank normalises its part of the sequence: the weight's gradient is then partial over
the group, which its placement says, so that the optimizer sums it once a step.
"""

from __future__ import annotations

from typing import Any, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import placement
from shardwise.parallel.arguments import sharing_group
from shardwise.parallel.linear import LayerOptions, full_name, tensor_options
from shardwise.placement import Init


class _Norm(placement.PlacedModule):
    def __init__(
        self,
        normalized_shape: int,
        eps: float,
        sequence_parallel_enabled: bool,
        name: str | None,
        leaves: dict[str, float],
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        where = tensor_options(self, options)
        group = sharing_group(type(self).__name__, options.get("group"), needed=sequence_parallel_enabled)
        seed = options.get("seed")
        self.normalized_shape, self.eps = (normalized_shape,), eps
        for leaf, value in leaves.items():
            piece = placement.replicated(
                full_name(name, leaf, seed),
                self.normalized_shape,
                group,
                Init.constant(value),
                partial=sequence_parallel_enabled,
            )
            parameter = placement.make_parameter(
                self.normalized_shape,
                (piece,),
                group,
                **where,
            )
            self.register_parameter(leaf, parameter)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape[0]}, eps={self.eps}"


class RMSNorm(_Norm):
    """`y = x / sqrt(mean(x²) + eps) · weight` (arXiv:1910.07467). x, y: `[…, H]`; no communication."""

    weight: nn.Parameter

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-6,
        *,
        sequence_parallel_enabled: bool = False,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(normalized_shape, eps, sequence_parallel_enabled, name, {"weight": 1.0}, **options)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or torch.compiler.is_compiling() or not x.dtype == self.weight.dtype == torch.float32:
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return cast(Tensor, _RMSNorm.apply(x, self.weight, self.eps))  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    """RMSNorm where torch has no kernel for it and would keep x and the normalised x: this keeps x and 1/rms.

    With r = 1 / sqrt(mean(x²) + eps) and u = x·r: dx = r·(dy·w - u·mean(dy·w·u)), dw = Σ dy·u.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.eps = eps
        y: Tensor = (x * inverse).mul_(weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # this gradient is differentiated again, and what was saved is no function of x
            inverse = x.square().mean(dim=-1, keepdim=True).add(ctx.eps).rsqrt()
        dy, unit = grads[0], x * inverse
        dy_unit = dy * unit
        dw = dy_unit.reshape(-1, x.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        dx = None
        if ctx.needs_input_grad[0]:
            mean = (dy_unit @ weight).div_(x.shape[-1]).unsqueeze(-1)
            dx = (dy * weight).addcmul_(unit, mean, value=-1).mul_(inverse)
        return dx, dw, None


class LayerNorm(_Norm):
    """`y = (x - mean) / sqrt(var + eps) · weight + bias` (arXiv:1607.06450). x, y: `[…, H]`; no communication."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        sequence_parallel_enabled: bool = False,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(
            normalized_shape, eps, sequence_parallel_enabled, name, {"weight": 1.0, "bias": 0.0}, **options
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
