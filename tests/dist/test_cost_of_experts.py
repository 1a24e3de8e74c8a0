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
from tests.dist.test_memory import ShardedStep, measure_sharded
from tests.dist.training import MODELS, Sections, cases, make_config, sizes

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
    transfers = step_transfers(
        config,
        layout,
        pipeline_rank=place["pp"],
        data_rank=place["dp"] * layout.context + place.get("cp", 0),
        tensor_rank=place["tp"],
        imbalance=imbalance,
    )
    return wire_bytes(transfers)


def require_sent(found: ShardedStep, wanted: dict[tuple[str, str], float], where: str) -> None:
    assert set(found.sent) == set(wanted), f"{where}: other collectives than cost has"
    for key, amount in wanted.items():
        # The meter rounds each call down to a whole byte.
        off = amount - found.sent[key]
        assert 0 <= off <= found.calls[key], f"{where}: {found.sent[key]:,} by {key}, cost has {amount:,}"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case is CASES[0] else pytest.mark.slow, id=str(case)) for case in CASES]
)
def test_a_step_holds_and_sends_what_cost_has(case: tuple[str, dict[str, Any], dict[str, Any]], ranks: Any) -> None:
    config = configuration(*case)
    layout = check_layout(config, 4)
    memory = memory_by_rank(config, layout)
    for rank, found in enumerate(ranks(4).run(measured, config)):
        estimate = memory[layout.pipeline_rank(rank)]
        assert (found.parameters, found.gradients) == (estimate.parameters, estimate.gradients), f"rank {rank}"
        off = estimate.total / found.peak - 1
        assert abs(off) <= 0.02, f"rank {rank}: held {found.peak:,}, cost has {estimate.total:,} ({off:+.1%})"
        require_sent(found, planned(config, layout, rank), f"rank {rank}")


@pytest.mark.slow
@pytest.mark.parametrize("case", OBJECTIVES, ids=str)
def test_objectives_of_routers_send_what_cost_has(case: tuple[str, dict[str, Any], dict[str, Any]], ranks: Any) -> None:
    config = configuration(*case)
    layout = check_layout(config, 4)
    for rank, found in enumerate(ranks(4).run(measured, config)):
        require_sent(found, planned(config, layout, rank), f"rank {rank}")


def test_rows_of_one_rank_are_as_many_as_the_imbalance_says(ranks: Any) -> None:
    """All tokens have the experts of the first of two ranks, so that it computes twice the rows of balanced loads."""
    config = configuration("olmoe", {"zero": 0}, {"parallel": {"expert": 2}, "train": {"global_batch": 4}})
    layout = check_layout(config, 2)
    balanced = planned(config, layout, 0)
    for rank, found in enumerate(ranks(2).run(measured, config, False)):
        wanted = planned(config, layout, rank, 2.0 * (rank == 0))
        assert wanted["dp", "all_to_all"] != balanced["dp", "all_to_all"]
        require_sent(found, wanted, f"rank {rank}")
