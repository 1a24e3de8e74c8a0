"""Plans of runs whose stages have other sizes: the neediest stage, and the time of all steps."""

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import Config, check_layout, largest_size_stage, load_config, size_stages_of
from shardwise.estimates.memory import expected_memory, neediest_stage
from shardwise_plan.data_stages import check_other_stages, stages_with_layout
from shardwise_plan.device_specs import parse_cluster
from shardwise_plan.plan import predict_layout
from shardwise_plan.search import search_layouts
from shardwise_plan.step_time import step_time

MACHINES = parse_cluster("h100:8", 1)


def config(stage: str, *keys: str) -> Config:
    return load_config("llama3-tiny", ["model.max_position_embeddings=2048", f"data.stages=[{stage}]", *keys])


def test_with_all_micro_batches_kept_the_stage_with_most_of_them_needs_most() -> None:
    stage = "{at: 10, sequence_length: 128, global_batch: 8, micro_batch: 8}"
    run = config(stage, "parallel.pipeline=2", "parallel.schedule=gpipe", "train.global_batch=512")
    layout = check_layout(run, 2)
    stages = size_stages_of(run)
    memory = [expected_memory(each, layout) for each in stages]
    assert memory[0].total > 2 * memory[1].total
    assert largest_size_stage(run) == stages[1]
    assert neediest_stage(stages, layout) is stages[0]


def test_the_time_of_a_run_is_that_of_the_steps_of_each_stage() -> None:
    run = config(
        "{at: 18, sequence_length: 2048, global_batch: 8, micro_batch: 1}", "train.global_batch=256", "train.steps=20"
    )
    layout = check_layout(run, 8)
    short, long = size_stages_of(run)
    plan = predict_layout(long, layout, MACHINES)
    before = step_time(stages_with_layout(plan.config, layout)[0], layout, MACHINES) if plan else None
    assert plan.seconds == pytest.approx(18 * before.total + 2 * plan.time.total)
    assert plan.calendar.steps == pytest.approx(plan.seconds)
    assert stages_with_layout(plan.config, layout)[0].train == short.train


def test_a_layout_must_suit_every_stage() -> None:
    run = config("{at: 10, sequence_length: 2048, global_batch: 8}", "train.global_batch=12")
    long = largest_size_stage(run)
    long = long.model_copy(update={"train": long.train.model_copy(update={"micro_batch": 1})})
    check_other_stages(long, check_layout(long, 4))
    with pytest.raises(ConfigError, match=r"train.global_batch \(12\) must be a multiple"):
        check_other_stages(long, check_layout(long, 8))
    result = search_layouts(long, MACHINES, best=3)
    assert result.refused["train.global_batch"]
    assert all(plan.layout.data < 8 for plan in result.plans)
