"""The gradient of a gradient through sharded layers, against plain torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.layers.linear import ColumnParallelLinear, RowParallelLinear
from shardwise.layers.norm import RMSNorm
from tests.dist.dense import check, error, fill, gradient_errors, leaves, mesh, random, run
from tests.dist.test_layers import BOOLS, DEGREES, INPUTS, OUTPUTS, B, S, linear, sequence_part


def penalty(tp: int, sequence: bool) -> dict[str, float]:
    """The gradient of a gradient penalty, through an MLP whose matmuls are cut: the square of the input's gradient."""
    options: Any = {"sequence_parallel_enabled": sequence, "seed": 1, "group": mesh(tp).tp}
    layers = nn.ModuleDict(
        {
            "norm": RMSNorm(INPUTS, name="norm", **options),
            "up": ColumnParallelLinear(INPUTS, OUTPUTS, True, False, name="up", **options),
            "down": RowParallelLinear(OUTPUTS, INPUTS, False, True, name="down", **options),
        }
    )
    weights = leaves(fill(layers))
    whole_x, pull = random(1, S, B, INPUTS).requires_grad_(), random(2, S, B, INPUTS)
    scale = (whole_x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    hidden = F.gelu(linear(whole_x * scale * weights["norm.weight"], weights, "up"))
    (wanted,) = torch.autograd.grad((linear(hidden, weights, "down") * pull).sum(), whole_x, create_graph=True)
    wanted.square().sum().backward()
    x = sequence_part(whole_x.detach(), tp, sequence).requires_grad_()
    y = layers["down"](F.gelu(layers["up"](layers["norm"](x))))
    (found,) = torch.autograd.grad((y * sequence_part(pull, tp, sequence)).sum(), x, create_graph=True)
    found.square().sum().backward()
    return {
        "gradient of the penalty by the input": error(x.grad, sequence_part(whole_x.grad, tp, sequence)),
        **gradient_errors(layers, weights),
    }


@pytest.mark.parametrize("sequence", BOOLS)
@pytest.mark.parametrize("tp", DEGREES)
def test_gradients_of_gradients(tp: int, sequence: bool, ranks: Any) -> None:
    check(run(ranks, tp, penalty, tp, sequence))
