"""What the modules and parameters of a class of the user's own must be, so that it can be trained and saved."""

import pytest
import torch
from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.distributed.mesh import Group
from tests.rows import rows_of
from tests.unit.layers.groups import pretend_group
from tests.unit.models.own_classes import Write, build, config, unbuildable

ROWS = rows_of(__file__)


@pytest.mark.parametrize(
    ("layers", "said"),
    ROWS["uncut"],
)
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


@pytest.mark.parametrize(
    ("layers", "said"),
    ROWS["unheld"],
)
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
