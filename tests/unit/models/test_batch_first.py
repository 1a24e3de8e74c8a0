"""A plain module, batch first and with logits, trains as the class that one line makes of it."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.own_model import plain
from shardwise import batch_first
from shardwise.base.errors import ConfigError
from shardwise.config.model import PLAIN_MODULE
from tests.dist.test_own_training import trainer
from tests.unit.models.own_classes import PLAIN, Write, config, problem

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS_ALONE = """
    def forward(self, ids):
        return self.layer(ids)

    def head(self, ids):
        return self.layer(ids)
"""


class Output(NamedTuple):
    loss: Tensor | None
    logits: Tensor


class Module(nn.Module):
    """`kind`: the form in which its logits come."""

    def __init__(self, vocab_size: int, kind: str = "tensor") -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, vocab_size)

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(self.embedding(ids).cumsum(1))
        pair = logits.mean(), logits
        return {"tensor": logits, "tuple": pair, "named": Output(None, logits), "none": {}}[self.kind]


def test_it_is_the_sum_over_targets_of_the_same_weights() -> None:
    torch.manual_seed(0)
    module = batch_first(plain.Decoder)(64, **SIZES)
    assert type(module).__name__ == "Decoder"
    whole = plain.Decoder(64, **SIZES)
    whole.load_state_dict(module.state_dict())
    ids_SB, targets_SB = torch.randint(64, (2, 8, 3))
    targets_SB[-1] = -100
    expected = whole(ids_SB.t(), targets_SB.t()) * (targets_SB != -100).sum()
    assert module(ids_SB, targets_SB).item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(module.logits(ids_SB), whole.logits(ids_SB.t()).transpose(0, 1))


@pytest.mark.parametrize("kind", ["tensor", "tuple", "named"])
def test_the_forms_of_logits(kind: str) -> None:
    torch.manual_seed(0)
    module = batch_first(Module)(16, kind=kind)
    ids_SB, targets_SB = torch.randint(16, (2, 6, 2))
    logits_SBV = module.head(module.embedding(ids_SB).cumsum(0))
    expected = F.cross_entropy(logits_SBV.flatten(0, 1), targets_SB.flatten(), reduction="sum")
    assert module(ids_SB, targets_SB).item() == pytest.approx(expected.item(), rel=1e-6)
    zeros = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"must return logits \[batch, sequence, vocabulary\], not a dict"):
        batch_first(Module)(16, kind="none")(zeros, zeros)


def test_the_first_errors_of_a_plain_module_name_it(write: Write) -> None:
    """Each of: a forward of ids alone, an output that is no sum, swapped axes, a loss that gets no logits."""
    family = write(PLAIN, IDS_ALONE)
    assert problem(config(family)).endswith(PLAIN_MODULE)
    said = problem(config(family, {"hooks": {"loss": "tests.own_hooks:cross_entropy"}}))
    needs = "hooks.loss (tests.own_hooks:cross_entropy) needs a method logits(ids) of model.family (mine:"
    assert said.startswith(needs)
    assert said.endswith(PLAIN_MODULE)
    for name in ("Pairs", "Summing"):
        with pytest.raises(ConfigError) as refused:
            trainer(name, **({"axis": 1} if name == "Summing" else {}))
        assert PLAIN_MODULE in str(refused.value)
