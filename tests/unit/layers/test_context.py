"""Which tokens of a sample a rank has."""

import pytest
import torch

from shardwise.layers.context import chunks_of_rank, runs_of_places
from tests.unit.layers.groups import pretend_group


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_token_is_on_one_rank_and_ranks_of_a_grain_have_neighbors(ranks: int) -> None:
    length = 4 * ranks
    tokens = torch.arange(length)
    pairs = set()
    seen = []
    for rank in range(ranks):
        group = pretend_group(rank, ranks)
        own = chunks_of_rank(tokens, group)
        assert own.tolist() == [place for run in runs_of_places(len(own), rank, ranks) for place in run]
        pairs.add(int((own + 1).sum()))
        seen += own.tolist()
    assert sorted(seen) == tokens.tolist()
    assert len(pairs) == 1, "queries of all ranks see equally many keys"
    tokens = torch.arange(16)
    in_order = torch.cat([chunks_of_rank(tokens, pretend_group(rank, 4)) for rank in range(4)])
    for rank, wanted in enumerate(in_order.chunk(ranks)):
        group = pretend_group(rank, ranks)
        group.grain = 4
        assert chunks_of_rank(tokens, group).tolist() == wanted.tolist()
