"""What is counted of a model that no formula knows, and what is said of its memory when that runs out."""

import pytest
from torch import nn

from shardwise import ParallelEmbedding, ParallelLMHead
from shardwise.train.build import _count_parameters
from tests.unit.layers.groups import pretend_group


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rank", [0, 3])
def test_each_canonical_element_counts_once(rank: int, tied: bool) -> None:
    """On any rank: one of the last ones holds padding, and a tied weight is one."""
    group = pretend_group(rank, 4)
    embedding = ParallelEmbedding(9, 8, group=group, seed=1, name="embedding")
    weight = embedding.weight if tied else None
    head = ParallelLMHead(8, 9, tied_weight=weight, group=group, seed=1, name="head")
    model = nn.ModuleList([embedding, head, nn.Linear(3, 2)])
    assert _count_parameters(model) == 72 * (1 if tied else 2) + 8
