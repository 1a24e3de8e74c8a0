"""What ranks that divide experts hold and send, against what is computed before."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.config import Config, Layout, check_layout
from shardwise.config.routing import Routing
from shardwise.estimates.communication import step_transfers, wire_bytes
from shardwise.estimates.memory import memory_by_rank
from shardwise.layers import experts
from tests.dist.cells import check_sent
from tests.dist.test_memory import ShardedStep, check_held, measure_sharded
from tests.dist.training import MODELS, Sections, cases, make_config, sizes
from tests.sweeps import few

SIZES = sizes(1000, 256, 128, layers=4, heads=4, positions=64)
CASES = cases("cost of experts")
OBJECTIVES = cases("cost of objectives")


def by_turns(routing: Routing, scores: Tensor) -> Tensor:
    """Experts of each token by turns, so that all get equally many rows of each rank."""
    rows = torch.arange(len(scores) * routing.per_token, device=scores.device)
    return (rows % routing.experts).view(len(scores), -1).sort(dim=-1).values


def of_first_rank(routing: Routing, scores: Tensor) -> Tensor:
    """The first experts for all tokens."""
    return torch.arange(routing.per_token, device=scores.device).expand(len(scores), -1).contiguous()


@pytest.fixture(autouse=True)
def of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of each token by turns, and the first ones, are on one rank: it travels to no other."""
    monkeypatch.setattr(Routing, "visits", lambda _routing, _ranks: 1.0)


def measured(config: Config, is_balanced: bool = True) -> ShardedStep:
    choose = experts.choose
    experts.choose = by_turns if is_balanced else of_first_rank
    try:
        return measure_sharded(config)
    finally:
        experts.choose = choose


def configuration(family: str, optimizer: dict[str, Any], sections: Sections) -> Config:
    train = {"global_batch": 8, "micro_batch": 1, "sequence_length": 16} | sections.get("train", {})
    others = {name: values for name, values in sections.items() if name != "train"}
    model = SIZES | MODELS["costs"][family]
    return make_config(model=model, optimizer={"bucket_mib": None} | optimizer, train=train, **others)


def planned(config: Config, layout: Layout, rank: int, imbalance: float = 1.0) -> dict[tuple[str, str], float]:
    place = layout.coordinates(rank)
    data_rank = place["dp"] * layout.context + place.get("cp", 0)
    ranks = {"pipeline_rank": place["pp"], "data_rank": data_rank, "tensor_rank": place["tp"]}
    return wire_bytes(step_transfers(config, layout, **ranks, imbalance=imbalance))


@pytest.mark.parametrize(("family", "optimizer", "sections"), few(CASES, CASES[0]))
def test_a_step_is_what_cost_has(family: str, optimizer: dict[str, Any], sections: Sections, ranks: Any) -> None:
    config = configuration(family, optimizer, sections)
    layout = check_layout(config, 4)
    memory = memory_by_rank(config, layout)
    for rank, found in enumerate(ranks(4).run(measured, config)):
        estimate = memory[layout.pipeline_rank(rank)]
        assert (found.parameters, found.gradients) == (estimate.parameters, estimate.gradients), f"rank {rank}"
        check_held(found.peak, estimate.total, f"rank {rank}", tolerance=0.02)
        check_sent(found.sent, planned(config, layout, rank), found.calls, f"rank {rank}")


@pytest.mark.slow
@pytest.mark.parametrize("case", OBJECTIVES, ids=str)
def test_objectives_of_routers_send_what_cost_has(case: tuple[str, dict[str, Any], dict[str, Any]], ranks: Any) -> None:
    config = configuration(*case)
    layout = check_layout(config, 4)
    for rank, found in enumerate(ranks(4).run(measured, config)):
        check_sent(found.sent, planned(config, layout, rank), found.calls, f"rank {rank}")


def test_rows_of_one_rank_are_as_many_as_the_imbalance_says(ranks: Any) -> None:
    """All tokens have the experts of the first of two ranks, so that it computes twice the rows of balanced loads."""
    config = configuration("olmoe", {"zero": 0}, {"parallel": {"expert": 2}, "train": {"global_batch": 4}})
    layout = check_layout(config, 2)
    balanced = planned(config, layout, 0)
    for rank, found in enumerate(ranks(2).run(measured, config, False)):
        wanted = planned(config, layout, rank, 2.0 * (rank == 0))
        assert wanted["dp", "all_to_all"] != balanced["dp", "all_to_all"]
        check_sent(found.sent, wanted, found.calls, f"rank {rank}")
