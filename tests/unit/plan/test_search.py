"""What the search says of a layout is what a dry run says; what does not fit is dropped; stages; the proposals."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from shardwise.base.errors import ConfigError
from shardwise.base.prices import Price
from shardwise.config import Config, check_layout, largest_size_stage, load_config, size_stages_of
from shardwise.estimates.memory import RESERVED, expected_memory, neediest_stage
from shardwise.estimates.memory_choice import first_fitting_candidate
from shardwise_plan.data_stages import check_other_stages, stages_with_layout
from shardwise_plan.device_specs import parse_cluster
from shardwise_plan.layout_choices import layout_choices, with_compiled_blocks
from shardwise_plan.plan import Plan, predict_layout
from shardwise_plan.proposals import objective_value, proposals, sensitivities
from shardwise_plan.search import _Asked, search_layouts
from shardwise_plan.search_memory import LeastMemory, short_step_memory
from shardwise_plan.step_time import least_step_times, step_time

CONFIG = load_config("gpt3-23b", ["train.global_batch=512"])
FIXED = ("train.micro_batch", "train.recompute", "optimizer.zero", "parallel.sequence")


def test_memory_is_that_of_the_whole_step() -> None:
    """The search looks at a shorter step, and only at some of the pipeline ranks."""
    on = parse_cluster("h100:8", 4)
    plans = search_layouts(CONFIG, on, best=1000, fixed=FIXED).plans
    assert {plan.choice.pipeline for plan in plans} > {1, 4}
    for plan in plans[::3]:
        whole = expected_memory(plan.config, plan.layout, True)
        assert 0.99 < plan.memory.total / whole.total <= 1, plan.text()


def test_pruning_loses_no_layout() -> None:
    """The best of all by brute force: the memory and the time of every layout, without bounds."""
    config = load_config("gpt3-23b", ["train.global_batch=16", "train.micro_batch=4", "model.num_hidden_layers=24"])
    on = parse_cluster("h100:8", 1)
    limit = on.device.memory * (1 - RESERVED)
    fixed = ("train.micro_batch", "parallel.sequence")
    least_memory = LeastMemory(config, on)
    asked = _Asked(config, on)
    refused = Counter[str]()
    expected: list[tuple[float, int, str]] = []
    number = 0
    for lists, layout in layout_choices(config, on.world, on.per_node, fixed, refused):
        for shardings in lists:
            number += 1
            for choice in shardings:
                chosen = with_compiled_blocks(choice.applied(config), on.device)
                estimated = partial(short_step_memory, layout=layout, cluster=on, limit=math.inf)
                chosen, memory = first_fitting_candidate(chosen, layout, estimated, limit)
                assert least_memory(choice, layout) <= memory.total * (1 + 1e-9), choice
                time = step_time(chosen, layout, on)
                closer = [
                    asked.work_seconds(choice, layout),
                    *(least_step_times([chosen], layout, on, simulated=simulated)[0] for simulated in (False, True)),
                    time.total,
                ]
                assert all(bound <= next_bound * (1 + 1e-9) for bound, next_bound in pairwise(closer)), choice
                if memory.total <= limit:
                    regathers = chosen.regathers
                    expected.append((time.total, number, replace(choice, regathers=regathers).text(on.world)))
                    break
    expected.sort()
    result = search_layouts(config, on, best=1000, fixed=fixed)
    assert (result.valid, result.refused) == (number, refused)
    assert [(plan.time.total, plan.text()) for plan in result.plans] == [(time, text) for time, _, text in expected]
    assert len(result.plans) + sum(result.too_large.values()) == result.valid
    few = search_layouts(config, on, best=5, fixed=fixed)
    assert [plan.text() for plan in few.plans] == [text for _, _, text in expected[:5]]
    assert few.slower == few.valid - sum(few.too_large.values()) - 5 > 0


@pytest.mark.parametrize(
    ("length", "nodes", "degrees"),
    [
        (6144, 3, {1, 2, 3}),
        (12288, 3, {1, 2, 3, 4, 6}),
        # Chunks of 1,025 tokens.
        (2 * 1025 * 5, 5, {1, 5}),
    ],
)
def test_context_degrees_divide_into_chunks_of_1024_tokens(length: int, nodes: int, degrees: set[int]) -> None:
    keys = [f"train.sequence_length={length}", f"model.max_position_embeddings={length}", "train.micro_batch=1"]
    config = load_config("llama2-7b", [*keys, f"train.global_batch={8 * nodes}", "parallel.tensor=1"])
    fixed = ("parallel.tensor", "parallel.pipeline", "train.micro_batch")
    on = parse_cluster("h100:8", nodes)
    layouts = [layout for _, layout in layout_choices(config, on.world, on.per_node, fixed)]
    assert {layout.context for layout in layouts} == degrees
    assert all(layout.context * layout.data == on.world for layout in layouts)


SPARSE = ["train.global_batch=64", "train.micro_batch=1", "model.num_hidden_layers=8", "model.num_local_experts=8"]


def test_a_search_divides_experts_and_loses_no_layout() -> None:
    """The best of all by brute force, and memory as a dry run has it."""
    config = load_config("mixtral-8x7b", [*SPARSE, "parallel.pipeline=1", "train.recompute=none"])
    on = parse_cluster("h100:8", 2)
    fixed = ("train.micro_batch", "train.recompute", "parallel.pipeline", "parallel.tensor", "parallel.context")
    limit = on.device.memory * (1 - RESERVED)
    least_memory = LeastMemory(config, on)
    expected = []
    degrees = set()
    for lists, layout in layout_choices(config, on.world, on.per_node, fixed):
        degrees.add(layout.expert)
        for shardings in lists:
            for choice in shardings:
                chosen = with_compiled_blocks(choice.applied(config), on.device)
                assert not chosen.compile.enabled, "experts are not compiled"
                memory = short_step_memory(chosen, layout, on, math.inf)
                whole = expected_memory(chosen, layout, True)
                assert 0.99 < memory.total / whole.total <= 1
                assert least_memory(choice, layout) <= memory.total * (1 + 1e-9), choice
                time = step_time(chosen, layout, on)
                assert time.total >= least_step_times([chosen], layout, on)[0] * (1 - 1e-9)
                assert (time.experts > 0) == (layout.expert > 1)
                if memory.total <= limit:
                    expected.append((time.total, choice.text(on.world)))
                    break
    assert degrees == {1, 2, 4, 8}
    plans = search_layouts(config, on, best=1000, fixed=fixed).plans
    assert [(plan.time.total, plan.text()) for plan in plans] == sorted(expected)
    assert any("(EP 8)" in plan.text() for plan in plans)
    four = config.with_keys(parallel={"expert": 4})
    only = search_layouts(four, on, best=1000, fixed=(*fixed, "parallel.expert")).plans
    assert {plan.layout.expert for plan in only} == {4}


MACHINES = parse_cluster("h100:8", 1)


def config(stage: str, *keys: str) -> Config:
    return load_config("llama3-tiny", ["model.max_position_embeddings=2048", f"data.stages=[{stage}]", *keys])


def test_stages_need_memory_time_and_a_layout_for_all() -> None:
    stage = "{at: 10, sequence_length: 128, global_batch: 8, micro_batch: 8}"
    run = config(stage, "parallel.pipeline=2", "parallel.schedule=gpipe", "train.global_batch=512")
    layout = check_layout(run, 2)
    stages = size_stages_of(run)
    memory = [expected_memory(each, layout) for each in stages]
    assert memory[0].total > 2 * memory[1].total
    assert largest_size_stage(run) == stages[1]
    assert neediest_stage(stages, layout) is stages[0]
    stage = "{at: 18, sequence_length: 2048, global_batch: 8, micro_batch: 1}"
    run = config(stage, "train.global_batch=256", "train.steps=20")
    layout = check_layout(run, 8)
    short, long = size_stages_of(run)
    plan = predict_layout(long, layout, MACHINES)
    before = step_time(stages_with_layout(plan.config, layout)[0], layout, MACHINES) if plan else None
    assert plan.seconds == pytest.approx(18 * before.total + 2 * plan.time.total)
    assert plan.calendar.steps == pytest.approx(plan.seconds)
    assert stages_with_layout(plan.config, layout)[0].train == short.train
    run = config("{at: 10, sequence_length: 2048, global_batch: 8}", "train.global_batch=12")
    long = largest_size_stage(run)
    long = long.model_copy(update={"train": long.train.model_copy(update={"micro_batch": 1})})
    check_other_stages(long, check_layout(long, 4))
    with pytest.raises(ConfigError, match=r"train.global_batch \(12\) must be a multiple"):
        check_other_stages(long, check_layout(long, 8))
    result = search_layouts(long, MACHINES, best=3)
    assert result.refused["train.global_batch"]
    assert all(plan.layout.data < 8 for plan in result.plans)


KEPT = ("train.micro_batch", "parallel.schedule", "train.recompute")


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    config = load_config("gpt3-23b", ["train.global_batch=64", "train.micro_batch=1", "train.recompute=selective"])
    found = [search_layouts(config, parse_cluster("h100:8", nodes), best=10, fixed=KEPT).plans for nodes in (2, 8)]
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
