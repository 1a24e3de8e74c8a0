"""The second half of a backward pass, which torch before 2.13 computes wrong."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.distributed.torch_private import add_weight_gradients


class TwoProducts(torch.autograd.Function):
    """x W and x Wᵀ, of which a loss may use the second one alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x @ weight, x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.t() + grads[1] @ weight, x.t() @ grads[0] + grads[1].t() @ x


def both(x: Tensor, weight: Tensor) -> Tensor:
    a, b = TwoProducts.apply(x, weight)
    return a.square().sum() + 3 * b.sum()


def second(x: Tensor, weight: Tensor) -> Tensor:
    return TwoProducts.apply(x, weight)[1].square().sum()


def twice(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight @ weight).square().sum()


@pytest.mark.parametrize("function", [both, second, twice])
def test_a_weight_has_its_whole_gradient_once(function: Any) -> None:
    from torch.distributed.pipelining._backward import stage_backward_input  # with it, torch's compiler is imported

    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    (wanted,) = torch.autograd.grad(function(x, weight), weight)
    for _ in range(2):
        loss = function(x, weight)
        graph = loss.grad_fn  # torch 2.11 frees functions written in Python with the loss
        _, groups = stage_backward_input([loss], None, [x], iter([weight]))
        add_weight_gradients(iter([weight]), groups)
        del graph
    torch.testing.assert_close(weight.grad, 2 * wanted)
