"""Pipelines that a model, a schedule or a batch does not fit, each told in one sentence with what would do."""

from typing import Any

import pytest

from shardwise.base.errors import ConfigError, listing
from shardwise.config import ParallelConfig, check_layout, config_from, load_config
from shardwise.config.rules import fits_schedule


def problems(*overrides: str, recipe: str = "gpt-tiny", world: int | None = None) -> list[str]:
    """Of gpt-tiny, which has 8 blocks, with a global batch of 8 micro-batches."""
    config = load_config(recipe, ["train.micro_batch=1", *overrides])
    with pytest.raises(ConfigError) as caught:
        check_layout(config, world or config.parallel.tensor * config.parallel.pipeline)
    return caught.value.problems


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            "pipeline=9",
            "parallel.pipeline (9) must be at most model.num_hidden_layers (8), as each stage has a block: "
            "set parallel.pipeline=8 or less",
        ),
        (
            "pipeline=5 schedule=interleaved",
            "parallel.pipeline × stages on each rank (5 × 2 = 10) must be at most model.num_hidden_layers (8), as each "
            "stage has a block: set parallel.pipeline=4",
        ),
        (
            "pipeline=2 schedule=interleaved virtual_stages=5",
            "parallel.pipeline × stages on each rank (2 × 5 = 10) must be at most model.num_hidden_layers (8), as each "
            "stage has a block: set parallel.schedule=1f1b and leave parallel.virtual_stages out",
        ),
        (
            "pipeline=9 schedule=interleaved virtual_stages=3",
            "parallel.pipeline × stages on each rank (9 × 3 = 27) must be at most model.num_hidden_layers (8), as each "
            "stage has a block: set parallel.schedule=1f1b, leave parallel.virtual_stages out and set "
            "parallel.pipeline=8 or less",
        ),
        (
            "pipeline=5 schedule=zbv stages=[1,1,1,1,1,1,1,1,1,1]",
            "parallel.pipeline × stages on each rank (5 × 2 = 10) must be at most model.num_hidden_layers (8), as each "
            "stage has a block: set parallel.pipeline=4 or less",
        ),
        (
            "pipeline=2 virtual_stages=2",
            "parallel.virtual_stages (2) must be 1 with parallel.schedule 1f1b, which has one stage on each rank: set "
            "parallel.schedule=interleaved, or leave parallel.virtual_stages out",
        ),
        (
            "pipeline=2 schedule=zbv virtual_stages=4",
            "parallel.virtual_stages (4) must be 2 with parallel.schedule zbv, whose stages go to the last rank and "
            "back: leave parallel.virtual_stages out",
        ),
        (
            "pipeline=2 schedule=interleaved_zero_bubble virtual_stages=1",
            "parallel.virtual_stages (1) must be at least 2 with parallel.schedule interleaved_zero_bubble: leave "
            "parallel.virtual_stages out, or set parallel.schedule=1f1b, which has one stage on each rank",
        ),
        (
            "pipeline=3 schedule=zbv",
            "parallel.pipeline × stages on each rank (3 × 2 = 6) must divide model.num_hidden_layers (8) with "
            "parallel.schedule zbv, which has equal stages: set parallel.pipeline=2 or 4, name unequal ones by "
            "parallel.stages, or set parallel.schedule=1f1b",
        ),
        (
            "pipeline=2 schedule=interleaved virtual_stages=3",
            "parallel.pipeline × stages on each rank (2 × 3 = 6) must divide model.num_hidden_layers (8) with "
            "parallel.schedule interleaved, which has equal stages: name unequal ones by parallel.stages, or set "
            "parallel.schedule=1f1b and leave parallel.virtual_stages out",
        ),
        (
            "pipeline=3 stages=[4,4]",
            "the length of parallel.stages [4, 4] (2) must be parallel.pipeline (3), such as [2, 3, 3]",
        ),
        (
            "pipeline=2 stages=[4,5]",
            "the sum of parallel.stages [4, 5] (9) must be model.num_hidden_layers (8), such as [4, 4]",
        ),
        (
            "pipeline=2 stages=[8,0]",
            "each number of parallel.stages [8, 0] must be at least 1: a stage has a block, such as [4, 4]",
        ),
        (
            "pipeline=2 schedule=interleaved stages=[4,4]",
            "the length of parallel.stages [4, 4] (2) must be parallel.pipeline × stages on each rank (2 × 2 = 4), "
            "such as [2, 2, 2, 2]",
        ),
        (
            "stages=[4,4]",
            "parallel.stages ([4, 4]) must be left out with parallel.pipeline (1), which cuts no model: leave it out, "
            "or set parallel.pipeline=2",
        ),
        (
            "stages=[2,2,2,2] schedule=zbv",
            "parallel.stages ([2, 2, 2, 2]) must be left out with parallel.pipeline (1), which cuts no model: leave it "
            "out, or set parallel.pipeline=2, which with parallel.schedule zbv has 2 stages on each rank",
        ),
        (
            "stages=[3,3,2] schedule=interleaved",
            "parallel.stages ([3, 3, 2]) must be left out with parallel.pipeline (1), which cuts no model: leave it "
            "out",
        ),
        (
            "pipeline=2 schedule=zbv tensor_overlap=pieces",
            "parallel.tensor_overlap (pieces) must be null with parallel.schedule zbv, which computes the gradients "
            "that it overlaps apart from each other: choose another schedule, such as 1f1b",
        ),
        (
            "pipeline=2 schedule=zbv sequence_regather=true",
            "parallel.sequence_regather (true) must be false with parallel.schedule zbv, which computes the gradients "
            "of inputs and weights apart from each other, and would gather twice: choose another schedule, such as "
            "1f1b",
        ),
        (
            "tensor_overlap=symmetric_memory",
            "parallel.tensor_overlap (symmetric_memory) must go with parallel.sequence (true): its operators gather "
            "and scatter the sequence",
        ),
    ],
)
def test_what_cannot_be_cut_so(overrides: str, problem: str) -> None:
    assert problems(*(f"parallel.{one}" for one in overrides.split())) == [problem]


@pytest.mark.parametrize(
    ("overrides", "needs", "batches"),
    [
        ("pipeline=4 schedule=1f1b train.global_batch=3", "at least parallel.pipeline (4)", "4"),
        (
            "pipeline=2 schedule=dualpipev train.global_batch=3",
            "at least 2 × parallel.pipeline (2 × 2 = 4)",
            "4",
        ),
        (
            "pipeline=4 schedule=interleaved train.global_batch=9",
            "a multiple of the 2 rounds that parallel.pipeline (4) takes them in",
            "8 or 10",
        ),
        (
            "pipeline=4 schedule=interleaved_zero_bubble train.global_batch=13",
            "a multiple of the 3 rounds that parallel.pipeline (4) takes them in",
            "12 or 15",
        ),
    ],
)
def test_too_few_or_uneven_micro_batches(overrides: str, needs: str, batches: str) -> None:
    settings = [one if "." in one else f"parallel.{one}" for one in overrides.split()]
    config = load_config("gpt-tiny", ["train.micro_batch=1", *settings])
    number = config.train.global_batch
    assert problems(*settings) == [
        f"the micro-batches of a step on each rank ({number}) must be {needs} with parallel.schedule "
        f"{config.parallel.schedule}: set train.global_batch={batches}"
    ]
    for valid in batches.split(" or "):
        changed = load_config("gpt-tiny", ["train.micro_batch=1", *settings, f"train.global_batch={valid}"])
        assert check_layout(changed, config.parallel.pipeline).pipeline == config.parallel.pipeline


def test_smaller_micro_batches_are_more() -> None:
    (found,) = problems("parallel.pipeline=4", "train.micro_batch=4", world=8, recipe="gpt-tiny")
    assert found.endswith("(1) must be at least parallel.pipeline (4) with parallel.schedule 1f1b: "
                          "set train.global_batch=32, or lower train.micro_batch (4)")  # fmt: skip


@pytest.mark.parametrize(
    ("parallel", "problem"),
    [
        (
            {"pipeline": 2},
            "parallel.pipeline (2) must be 1 with a model of your own (model.family package.module:Own): shardwise "
            "does not know how to cut it into stages",
        ),
        (
            {"stages": [4, 4]},
            "parallel.stages ([4, 4]) must be left out with parallel.pipeline (1), which cuts no model: leave it out",
        ),
    ],
)
def test_a_model_of_your_own_has_no_stages(parallel: dict[str, Any], problem: str) -> None:
    config = config_from(
        {
            "model": {"family": "package.module:Own", "vocab_size": 50},
            "parallel": parallel,
            "train": {"steps": 1, "global_batch": 4, "sequence_length": 16},
            "optimizer": {"lr": 1e-3},
        }
    )
    with pytest.raises(ConfigError) as caught:
        check_layout(config, 2)
    assert caught.value.problems == [problem]


@pytest.mark.parametrize(
    ("schedule", "degree", "fitting"),
    [
        ("gpipe", 4, range(1, 17)),
        ("zbv", 4, range(1, 17)),
        ("1f1b", 4, range(4, 17)),
        ("dualpipev", 4, range(8, 17)),
        ("interleaved", 4, (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16)),
        ("interleaved_zero_bubble", 3, (1, 2, 3, 4, 5, 6, 8, 9, 12, 15)),
    ],
)
def test_how_many_micro_batches_fit(schedule: str, degree: int, fitting: range | tuple[int, ...]) -> None:
    """Torch's own schedules are asked the same in tests/unit/pipeline/test_action_order.py."""
    parallel = ParallelConfig.model_validate({"pipeline": degree, "schedule": schedule})
    assert listing(n for n in range(1, 17) if fits_schedule(parallel, n)) == listing(fitting)


@pytest.mark.parametrize(
    ("overrides", "stages"),
    [
        ("", 1),
        ("pipeline=2 schedule=zbv", 2),
        ("pipeline=2 schedule=interleaved virtual_stages=4", 4),
    ],
)
def test_stages_on_each_rank(overrides: str, stages: int) -> None:
    settings = [f"parallel.{one}" for one in overrides.split()]
    config = load_config("gpt-tiny", ["train.micro_batch=1", *settings])
    layout = check_layout(config, config.parallel.pipeline)
    assert layout.virtual == config.parallel.stages_per_rank == stages
    assert layout.stages == stages * config.parallel.pipeline


def test_without_a_pipeline_the_schedule_has_no_effect() -> None:
    config = load_config(
        "gpt-tiny", ["parallel.schedule=dualpipev", "parallel.virtual_stages=7", "train.global_batch=2"]
    )
    assert check_layout(config, 1).stages == 1


def test_stages_may_be_unequal_by_name() -> None:
    config = load_config("gpt-tiny", ["train.micro_batch=1", "parallel.pipeline=3", "parallel.stages=[2,4,2]"])
    assert check_layout(config, 3).stages == 3
