"""torch.compile traces a block whole, collectives included, and computes what eager does."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.config import LlamaConfig
from shardwise.models import Llama
from tests.dist.dense import check, error, fill, mesh, random, run

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


def outcome(model: nn.Module, function: Any, x: Tensor, pull: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_() if x.is_floating_point() else x
    y = function(leaf)
    y.backward(pull)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients
    return {"output": y.detach(), **gradients, **({"input": leaf.grad} if leaf.grad is not None else {})}


def compiled(tp: int, sequence: bool, backend: str) -> dict[str, float]:
    torch._dynamo.reset()
    group = mesh(tp).tp
    model = Llama(LlamaConfig(family="llama", **SIZES), group, sequence_parallel=sequence, seed=1)
    fill(model)
    rows = S // tp if sequence else S
    x, pull = random(group.rank if sequence else 0, rows, B, 16), random(10 + group.rank, rows, B, 16)
    ids = torch.randint(31, (S, B), generator=torch.Generator().manual_seed(0))
    block, embedding = model.layers[0], model.embed_tokens
    errors: dict[str, float] = {}
    for what, module, given in (("block", block, x), ("embedding", embedding, ids)):
        group.meter.reset()
        eager = outcome(module, module, given, pull)
        assert tp == 1 or group.meter.calls, "eager did not communicate"
        traced = outcome(module, torch.compile(module, fullgraph=True, backend=backend), given, pull)
        assert traced.keys() == eager.keys()
        errors |= {f"{what}: {name}": error(traced[name], eager[name]) for name in eager}
    return errors


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow, id="inductor (needs a C++ compiler)")]
)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_is_traced_whole_and_computes_what_eager_does(sequence: bool, backend: str, ranks: Any) -> None:
    check(run(ranks, 2, compiled, 2, sequence, backend), 5e-6)
