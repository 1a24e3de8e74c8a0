"""The proposals among plans, and how plans depend on what is assumed."""

from dataclasses import replace

import pytest

from shardwise.base.errors import ConfigError
from shardwise.base.units import Price
from shardwise.config import load_config
from shardwise_plan.device_specs import parse_cluster
from shardwise_plan.plan import Plan
from shardwise_plan.proposals import objective_value, proposals, sensitivities
from shardwise_plan.search import search_layouts

FIXED = ("train.micro_batch", "parallel.schedule", "train.recompute")


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    config = load_config("gpt3-23b", ["train.global_batch=64", "train.micro_batch=1", "train.recompute=selective"])
    found = [search_layouts(config, parse_cluster("h100:8", nodes), best=10, fixed=FIXED).plans for nodes in (2, 8)]
    return [plan for of_cluster in found for plan in of_cluster]


def test_each_proposal_is_the_best_in_its_respect(plans: list[Plan]) -> None:
    named = {name: proposal.plan for proposal in proposals(plans) for name in proposal.names}
    assert named["fastest"].calendar.seconds == min(plan.calendar.seconds for plan in plans)
    assert named["cheapest"].device_hours == min(plan.device_hours for plan in plans)
    assert (named["fastest"].cluster.nodes, named["cheapest"].cluster.nodes) == (8, 2)
    assert not named["most robust"].is_tight
    tight = [plan for plan in plans if plan.is_tight]
    assert tight, "some layouts leave little memory"
    assert "no layout has a tenth of the memory free" in proposals(tight)[-1].reason
    fast, slow = named["fastest"], named["cheapest"]
    full = replace(fast, memory=replace(fast.memory, activations=fast.memory.activations + int(fast.headroom)))
    roomy = replace(slow, memory=replace(slow.memory, activations=0))
    (robust,) = (proposal.plan for proposal in proposals([full, roomy]) if "most robust" in proposal.names)
    assert robust is roomy, "the faster one has no memory left"


def test_worse_assumptions_take_longer_by_each_objective(plans: list[Plan]) -> None:
    plan = plans[0]
    network, products, failures, longer_steps, everything = (other.seconds for other in sensitivities(plan))
    now = plan.calendar.seconds
    assert all(now < seconds < everything for seconds in (network, products, failures))
    assert longer_steps == now, "published runs with ZeRO-1 took no longer"
    # Products are a part of the step, so that a tenth less of them takes less than a ninth more time.
    assert products < now / 0.9
    assert plan.on(plan.cluster.device).time == plan.time
    plan = replace(plans[0], choice=replace(plans[0].choice, zero=2))
    *_, longer, everything = sensitivities(plan)
    assert "ZeRO-2 or ZeRO-3 take 10% longer" in longer.assumption
    assert longer.seconds == pytest.approx(1.1 * plan.calendar.seconds, rel=0.01)
    assert everything.seconds == pytest.approx(1.1 * sensitivities(plans[0])[-1].seconds, rel=0.02)
    (robust,) = (proposal for proposal in proposals([plan, plans[0]]) if "most robust" in proposal.names)
    assert robust.plan is plans[0], "of two equal steps the one without freed parts"
    named = {name: proposal for proposal in proposals([plan, plans[0]]) for name in proposal.names}
    assert named["fastest"].plan is plan
    assert "take 10% longer, as published runs did, layout 2 is faster" in named["fastest"].reason
    plan = plans[0]
    priced = replace(plan.cluster, device=replace(plan.cluster.device, price=Price(3, "USD"), watts=500))
    plan = replace(plan, cluster=priced)
    hours = plan.calendar.seconds / 3600 * plan.cluster.world
    assert objective_value(plan, "time") == plan.calendar.seconds
    assert objective_value(plan, "cost") == pytest.approx(3 * hours)
    assert objective_value(plan, "energy") == pytest.approx(0.5 * hours)
    unknown = replace(plan, cluster=replace(priced, device=replace(priced.device, price=None, watts=None)))
    for objective, message in (("cost", r"must have a price of NVIDIA H100"), ("energy", "must have the power of")):
        with pytest.raises(ConfigError, match=message):
            objective_value(unknown, objective)
