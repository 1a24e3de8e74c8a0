"""What modules and parameters of a class of the user's own must be to be trained and saved; batch-first classes."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.own_model import plain
from shardwise import batch_first
from shardwise.base.errors import ConfigError
from shardwise.config.model import PLAIN_MODULE
from shardwise.distributed.mesh import Group
from tests.dist.test_own_training import trainer
from tests.rows import rows_of
from tests.unit.layers.makers import pretend_group
from tests.unit.models.own_classes import PLAIN, Write, build, config, problem, unbuildable

ROWS = rows_of(__file__)


@pytest.mark.parametrize(("layers", "said"), ROWS["uncut"])
def test_under_tensor_parallelism_all_modules_must_be_cut(layers: str, said: str, write: Write) -> None:
    family = write(f"""
    def __init__(self, vocab_size, group=None):
        super().__init__()
        self.last = sw.RMSNorm(3, group=group, seed=1, name="last")
        {layers}
""")
    assert unbuildable(config(family), pretend_group(0, 2)) == f"model.family (mine:Model): parallel.tensor (2) {said}"
    assert isinstance(build(config(family)), nn.Module), "alone they are whole"


@pytest.mark.parametrize(
    "parameter",
    [
        "nn.Parameter(torch.ones(4))",
        "sw.make_parameter((4,), (sw.Piece.rows('scale', (4,), group, sw.Init.constant(1.0)),), group)",
        "sw.RMSNorm(4, seed=1, name='scale').weight",
    ],
    ids=["bare", "placed", "without the group"],
)
def test_with_a_grain_only_layers_of_shardwise_give_gradients_one_order(parameter: str, write: Write) -> None:
    """The sum over the tokens of such a parameter is that of a rank, whatever its part of the sequence is."""
    family = write(f"""
    def __init__(self, vocab_size, group=None):
        super().__init__()
        self.norm = sw.RMSNorm(4, group=group, seed=1, name="norm")
        self.scale = {parameter}
""")
    assert unbuildable(config(family), Group(grain=4)) == (
        "model.family (mine:Model): train.bitwise (true) with parallel.grain (4) needs parameters that layers of "
        "shardwise make, with group=group; gradients of other parameters, scale, are summed in another order at each "
        "layout: set parallel.grain=1, with which parallel.tensor is 1"
    )
    assert isinstance(build(config(family), Group(grain=1)), nn.Module), "no sum is cut"


def test_dropout_without_its_key_or_a_place_of_its_own_is_refused(write: Write) -> None:
    dropping = """
    def __init__(self, vocab_size):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.drop = nn.ModuleList(sw.Dropout(p, layer=0, site=s) for p, s in ((0.1, 0), (0.0, 0), (0.2, 1), (0.2, 1)))
    """
    with pytest.raises(ConfigError) as caught:
        build(config(write(dropping)))
    assert caught.value.problems == [
        "model.family (mine:Model): forward must take dropout, the step's key, and give it to drop.0, drop.2 and "
        "drop.3, which drop nothing without it",
        "model.family (mine:Model): drop.2 and drop.3 must have a layer and a site of their own, or they draw one mask",
    ]


@pytest.mark.parametrize(("layers", "said"), ROWS["unheld"])
def test_what_no_checkpoint_could_hold_is_refused(layers: str, said: str, write: Write) -> None:
    family = write(f"""
    def __init__(self, vocab_size):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("places", torch.ones(3), persistent=False)
        {layers}
""")
    assert unbuildable(config(family)).startswith(f"model.family (mine:Model): {said}")


FP8 = {"precision": {"mode": "float32", "matmul": "fp8"}, "train": {"sequence_length": 16}}


def test_layers_outside_of_blocks_keep_their_dtype(write: Write) -> None:
    family = write("""
    def __init__(self, vocab_size, group=None):
        super().__init__()
        self.blocks = nn.ModuleList([sw.ColumnParallelLinear(32, 48, group=group, seed=1, name="inside")])
        self.layer = sw.ColumnParallelLinear(32, 48, group=group, seed=1, name="outside")
""")
    model = build(config(family, FP8))
    inside, outside = model.blocks[0], model.layer
    x = torch.randn(4, 2, 32)
    plain = {layer: x @ layer.weight.T for layer in (inside, outside)}
    assert torch.allclose(outside(x), plain[outside], atol=1e-6)
    assert not torch.allclose(inside(x), plain[inside], atol=1e-4)
    assert torch.allclose(inside.eval()(x), plain[inside], atol=1e-6), "an evaluation has no scales of its batch"


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
