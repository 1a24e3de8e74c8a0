"""What the plain MLP of GPT-2, GPT-NeoX and BERT drops, and what hooks keep of a gated one."""

from typing import Any

import pytest
import torch

from shardwise.distributed.mesh import Group
from shardwise.layers.dropout import DropoutKey
from shardwise.models.build import build_model
from tests.unit.estimates.families import make_config, section


@pytest.mark.parametrize(("name", "mode"), [("gpt", "fast"), ("gpt_neox", "invariant")])
def test_ffn_dropout_drops_what_comes_out_of_the_activation(name: str, mode: Any) -> None:
    model: Any = build_model(make_config(section(name, ffn_dropout=0.5)), Group(), sequence_parallel=False)
    inputs: list[torch.Tensor] = []
    mlp = model.layers[0].mlp
    kept = mlp.dropout.register_forward_hook(lambda _module, args, y: inputs.extend((args[0], y)))
    ids = torch.arange(32).view(16, 2)
    model.hidden(ids, dropout=DropoutKey(1, 1, torch.arange(2), 0, mode))
    kept.remove()
    before, after = (x.detach() for x in inputs)
    assert before.min() > -0.2, "GELU has no value below -0.17: this is not what comes out of it"
    assert abs(float((after == 0).float().mean()) - 0.5) < 0.1
    assert torch.allclose(after[after != 0], 2 * before[after != 0])
    plain, dropped = model.hidden(ids), model.hidden(ids, dropout=DropoutKey(1, 1, torch.arange(2), 0, mode))
    assert not torch.allclose(plain, dropped), "what was dropped reached the last projection"
