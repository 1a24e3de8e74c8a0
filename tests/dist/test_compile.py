"""torch.compile traces whole models, collectives and losses included, and computes what eager does.

torch 2.11 traces a function whose forward pass returns an in-place result, and gives it no gradient without a word.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.distributed import collectives
from shardwise.layers.loss import parallel_cross_entropy
from tests.dist.dense import check, error, mesh, random, run
from tests.dist.test_comm import WHOLE_TO_PARTS

S, B = 8, 2


def outcome(function: Callable[..., Tensor], leaves: list[Tensor], *args: Any) -> list[Tensor]:
    """A function's value, and its gradients by the leaves."""
    for leaf in leaves:
        leaf.grad = None
    y = function(*args)
    y.backward(random(10, *y.shape))
    assert all(leaf.grad is not None for leaf in leaves)
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def compare(
    what: str, function: Callable[..., Tensor], named: dict[str, Tensor], *args: Any, backend: str
) -> dict[str, float]:
    torch._dynamo.reset()
    eager = outcome(function, list(named.values()), *args)
    traced = outcome(torch.compile(function, fullgraph=True, backend=backend), list(named.values()), *args)
    names = [f"{what}: output", *(f"{what}: gradient of {name}" for name in named)]
    return {name: error(b, a) for name, a, b in zip(names, eager, traced, strict=True)}


def functions() -> dict[str, float]:
    group = mesh(2).tp
    names = list(WHOLE_TO_PARTS)
    inputs = [random(i, 8, 6).requires_grad_() for i in range(len(names))]
    weight = random(len(names), 6, 6).requires_grad_()

    def call(*inputs: Tensor) -> Tensor:
        outputs = (getattr(collectives, name)(x @ weight, group) * 2 for name, x in zip(names, inputs, strict=True))
        return torch.cat([y.flatten() for y in outputs])

    leaves = dict(zip(names, inputs, strict=True)) | {"weight": weight}
    return compare("functions", call, leaves, *inputs, backend="aot_eager")


@pytest.mark.slow
def test_functions_of_comm(ranks: Any) -> None:
    check(run(ranks, 2, functions), 1e-6)


def cross_entropy() -> dict[str, float]:
    group = mesh(2).tp
    logits = random(group.rank, S, B, 16).requires_grad_()
    target = torch.randint(31, (S, B), generator=torch.Generator().manual_seed(0))

    def loss(logits: Tensor) -> Tensor:
        return parallel_cross_entropy(logits * 2, target, 0.1, group=group, vocab_size=31)

    return compare("loss", loss, {"logits": logits}, logits, backend="aot_eager")


@pytest.mark.slow
def test_parallel_cross_entropy(ranks: Any) -> None:
    check(run(ranks, 2, cross_entropy), 1e-6)
