"""The matmuls of the sharded layers: torch's own, or oneDNN's where torch would run float32 at half the CPU's rate.

On a CPU torch gives float32 matmuls to MKL, which keeps to a narrow code path on processors that are not Intel's: on a
Zen 4 core it reaches 100 GFLOP/s where oneDNN reaches 230 (benchmarks/matmul.py). Elsewhere, and under
`torch.autocast`, these functions are the native operators; under `torch.compile` too, until `define_linear`.

Legend: T tokens, K input features, N output features.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import device as devices
from shardwise._torch_private import onednn_linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x weightᵀ + bias`: x `[…, K]`, weight `[N, K]` → `[…, N]`; any strides.

    Raises:
        ValueError: x has another width than the rank's weight takes.
    """
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"the width of a layer's input ({x.shape[-1]}) must be that of this rank's weight ({weight.shape[-1]}): a "
            "layer with input_is_parallel=True takes what a column-parallel layer with gather_output=False returns, "
            "every other layer the whole width"
        )
    if not _by_onednn(x, weight):
        return F.linear(x, weight, bias)
    y = cast(Tensor, _Linear.apply(x, weight))  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """`dyᵀ x`: dy `[T, N]`, x `[T, K]` → `[N, K]`. The longer side goes second, where oneDNN is faster."""
    return linear(dy.t(), x.t()) if dy.shape[1] <= x.shape[1] else linear(x.t(), dy.t()).t()


class _Linear(torch.autograd.Function):
    """Its gradients are matmuls of the same kind, so that they have gradients too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if torch.compiler.is_compiling():
            return cast(Tensor, torch.ops.shardwise.linear(x, weight))
        return onednn_linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dy = grads[0]
        dx = linear(dy, weight.t()) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))
        return dx, dw


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and (_defined if torch.compiler.is_compiling() else devices.cpu_prefers_onednn())
    )


_defined = False
"""Whether compiled graphs have the operator."""


def define_linear() -> None:
    """Define the operator by which compiled graphs multiply as eager code does, where that is by oneDNN.

    The compiler's own use of oneDNN takes weights that are constants.
    """
    global _defined
    if _defined or not devices.cpu_prefers_onednn():
        return
    operator = torch.library.custom_op("shardwise::linear", _onednn_linear, mutates_args=())
    operator.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], len(weight)))
    _defined = True


def _onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    return onednn_linear(x, weight)
