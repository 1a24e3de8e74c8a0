"""The ranks that a token visits."""

from itertools import combinations
from statistics import mean

import pytest

from shardwise.config.routing import Routing


@pytest.mark.parametrize("ranks", [1, 3, 4, 12])
@pytest.mark.parametrize(
    "routing",
    [Routing(12, 1), Routing(12, 3), Routing(12, 12), Routing(12, 2, groups=3, chosen_groups=2),
     Routing(12, 3, groups=6, chosen_groups=3), Routing(12, 4, groups=4, chosen_groups=2)],
    ids=str,
)  # fmt: skip
def test_a_token_visits_as_many_ranks_as_the_mean_of_all_its_choices(routing: Routing, ranks: int) -> None:
    size, held = routing.experts // routing.groups, routing.experts // ranks
    visits = [
        len({expert // held for expert in chosen})
        for groups in combinations(range(routing.groups), routing.chosen_groups)
        for chosen in combinations(
            [expert for expert in range(routing.experts) if expert // size in groups], routing.per_token
        )
    ]
    if max(size, held) % min(size, held) == 0:  # no rank has a part of a group and of another one
        assert routing.visits(ranks) == pytest.approx(mean(visits), rel=1e-12)
