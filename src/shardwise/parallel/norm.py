"""Normalisation over the hidden dimension, replicated in a tensor-parallel group.

Under sequence parallelism each rank normalises its part of the sequence: the weight's gradient is then partial over
the group, which its placement says, so that the optimizer sums it once a step.
"""

from __future__ import annotations

from typing import Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import placement
from shardwise.mesh import Group
from shardwise.parallel.linear import LayerOptions, full_name, tensor_options
from shardwise.placement import Init


class _Norm(nn.Module):
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
        group, seed = Group.of(options.get("group")), options.get("seed")
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
                **tensor_options(options),
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
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


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
