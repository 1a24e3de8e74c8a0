"""The class of a layer follows from its group."""

import copy

import pytest
import torch
from torch import Tensor

from shardwise.distributed.mesh import Group
from shardwise.layers.bitwise.linear import BitEqualColumnParallel
from shardwise.layers.bitwise.norm import BitEqualRMSNorm
from shardwise.layers.linear import ColumnParallelLinear
from shardwise.layers.loss import VocabularyShard
from shardwise.layers.norm import RMSNorm
from tests.unit.layers.makers import MAKERS


@pytest.mark.parametrize("kind", MAKERS, ids=lambda kind: kind.__name__)
def test_a_group_with_a_grain_has_bit_equal_layers_and_another_one_ordinary_ones(kind: type) -> None:
    assert type(MAKERS[kind](group=Group())) is kind
    layer = MAKERS[kind](group=Group(grain=2))
    assert isinstance(layer, kind)
    assert type(layer).__module__.startswith("shardwise.layers.bitwise.")
    assert type(copy.deepcopy(layer)) is type(MAKERS[kind](group=Group(grain=4))) is type(layer)


def test_losses_follow_their_group_too() -> None:
    kinds = [type(VocabularyShard.make(Group(grain=grain), 8, None, -100, 0.0)) for grain in (None, 1)]
    assert [kind.__name__ for kind in kinds] == ["VocabularyShard", "BitEqualShard"]


class Doubled(RMSNorm):
    """A layer of a user's own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_subclass_overrides_what_is_bit_equal() -> None:
    group = Group(grain=2)
    norm = Doubled(8, group=group)
    x = torch.randn(4, 1, 8)
    assert isinstance(norm, BitEqualRMSNorm)
    assert torch.equal(norm(x), 2 * RMSNorm(8, group=group)(x))
    assert isinstance(ColumnParallelLinear(8, 8, group=group), BitEqualColumnParallel)
