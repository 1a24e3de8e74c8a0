"""`act(gate) · up` (GLU variants, arXiv:2002.05202) of two projections side by side, in fewer passes over memory.

Shapes per rank: F width of the gate, and of `up`.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Gate: TypeAlias = Literal["silu", "gelu_tanh"]


def gated(gate_up: Tensor, act: Gate) -> Tensor:
    """Return `act(gate) · up` of `[…, 2F]`, the gate first → `[…, F]`; only the input is kept for the backward pass.

    The bits are those of single operations.
    """
    return cast(Tensor, _Gated.apply(gate_up, act))  # type: ignore[no-untyped-call]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, act: Gate) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.act = act
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")
        return activated.mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        dy = grads[0]
        gate, up = gate_up.chunk(2, dim=-1)
        if torch.is_grad_enabled():
            return _differentiable_gradient(dy, gate, up, ctx.act), None
        gradient = torch.empty_like(gate_up)
        dgate, dup = gradient.chunk(2, dim=-1)
        if ctx.act == "silu":
            torch.ops.aten.silu.out(gate, out=dup).mul_(dy)
            torch.ops.aten.silu_backward.grad_input(torch.mul(dy, up, out=dgate), gate, grad_input=dgate)
        else:
            torch.ops.aten.gelu.out(gate, approximate="tanh", out=dup).mul_(dy)
            d_activated = torch.mul(dy, up, out=dgate)
            torch.ops.aten.gelu_backward.grad_input(d_activated, gate, approximate="tanh", grad_input=dgate)
        return gradient, None


def _differentiable_gradient(dy: Tensor, gate: Tensor, up: Tensor, act: Gate) -> Tensor:
    """Return the gradient by operations that torch differentiates again."""
    if act == "gelu_tanh":
        dgate = torch.ops.aten.gelu_backward(dy * up, gate, approximate="tanh")
        return torch.cat((dgate, dy * F.gelu(gate, approximate="tanh")), dim=-1)
    # torch's `silu_backward` has no gradient.
    sigmoid = torch.sigmoid(gate)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return torch.cat((dy * up * slope, dy * gate * sigmoid), dim=-1)
