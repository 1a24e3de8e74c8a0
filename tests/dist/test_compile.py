"""torch.compile traces whole models, collectives and losses included, and computes what eager does.

torch 2.11 traces a function whose forward pass returns an in-place result, and gives it no gradient without a word.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.config import LlamaConfig
from shardwise.config.decoders import Olmo2Config
from shardwise.distributed import collectives
from shardwise.layers.loss import parallel_cross_entropy
from shardwise.models.blocks import Context
from shardwise.models.llama import Llama
from tests.dist.dense import check, error, fill, mesh, random, run
from tests.dist.test_comm import WHOLE_TO_PARTS

S, B = 8, 2
SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "attention_bias": True,
}


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


def test_functions_of_comm(ranks: Any) -> None:
    check(run(ranks, 2, functions), 1e-6)


def compiled(sequence: bool, backend: str, whole: bool, kind: Any = LlamaConfig) -> dict[str, float]:
    group, family = mesh(2).tp, kind.__name__.removesuffix("Config").lower()
    model = Llama(kind(family=family, **SIZES), group, sequence_parallel=sequence, seed=1)
    fill(model)
    ids = torch.randint(31, (S, B), generator=torch.Generator().manual_seed(0))
    group.meter.reset()
    if whole:
        return compare("model", model, dict(model.named_parameters()), ids, ids, backend=backend)
    block, rows = model.layers[0], S // 2 if sequence else S
    x = random(group.rank if sequence else 0, rows, B, 16).requires_grad_()
    assert model.rotary is not None
    tables = model.rotary.tables(S, x)
    errors = compare(
        "block",
        block,
        {"x": x, **dict(block.named_parameters())},
        x,
        Context(rotary_tables={None: tables}),
        backend=backend,
    )
    assert group.meter.calls, "eager did not communicate"
    return errors


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow, id="inductor, which needs a C++ compiler")],
)
@pytest.mark.parametrize(
    ("sequence", "whole"),
    [
        pytest.param(False, False, id="block", marks=pytest.mark.slow),
        pytest.param(True, False, id="block, sequence parallelism", marks=pytest.mark.slow),
        pytest.param(False, True, id="model and loss", marks=pytest.mark.slow),
        pytest.param(True, True, id="model and loss, sequence parallelism"),
    ],
)
def test_llama_is_traced_whole_and_computes_what_eager_does(
    sequence: bool, whole: bool, backend: str, ranks: Any
) -> None:
    check(run(ranks, 2, compiled, sequence, backend, whole), 5e-6)


@pytest.mark.slow
def test_norms_of_queries_and_keys_are_traced(ranks: Any) -> None:
    check(run(ranks, 2, compiled, False, "aot_eager", False, Olmo2Config), 5e-6)


def cross_entropy() -> dict[str, float]:
    group = mesh(2).tp
    logits = random(group.rank, S, B, 16).requires_grad_()
    target = torch.randint(31, (S, B), generator=torch.Generator().manual_seed(0))

    def loss(logits: Tensor) -> Tensor:
        return parallel_cross_entropy(logits * 2, target, 0.1, group=group, vocab_size=31)

    return compare("loss", loss, {"logits": logits}, logits, backend="aot_eager")


def test_parallel_cross_entropy(ranks: Any) -> None:
    check(run(ranks, 2, cross_entropy), 1e-6)
