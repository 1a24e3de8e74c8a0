"""The plan of stages: balanced by cost, equal or by name; on which ranks they are, and what that costs."""

import itertools

import pytest

from shardwise.config import Config, ParallelConfig, check_layout, load_config
from shardwise.pipeline.partition import balanced, compute_shares, pipeline_rank_of, stage_plan


def sizes(config: Config) -> list[int]:
    layout = check_layout(config, config.parallel.tensor * config.parallel.pipeline)
    return [len(stage.layers) for stage in stage_plan(config, layout)]


def tiny(*overrides: str) -> Config:
    return load_config("gpt-tiny", ["train.micro_batch=1", *(f"parallel.{one}" for one in overrides)])


@pytest.mark.parametrize("head", [0.0, 0.4, 1.0, 1.7, 3.2, 40.0])
@pytest.mark.parametrize(("layers", "stages"), [(8, 1), (8, 2), (7, 3), (12, 4), (9, 5), (5, 5)])
def test_no_other_cut_has_a_cheaper_dearest_stage(layers: int, stages: int, head: float) -> None:
    def dearest(cut: list[int]) -> float:
        return max(cut[-1] + head, *cut[:-1], 0)

    cuts = [
        [stop - start for start, stop in itertools.pairwise((0, *inner, layers))]
        for inner in itertools.combinations(range(1, layers), stages - 1)
    ]
    found = list(balanced(layers, stages, head))
    assert found in cuts
    assert dearest(found) == min(map(dearest, cuts))
    assert found[:-1] == sorted(found[:-1]), "an earlier stage holds more micro-batches: it has not more blocks"


def test_the_plan_of_stages() -> None:
    wide = load_config("gpt-tiny", ["train.micro_batch=1", "parallel.pipeline=2", "model.vocab_size=4096"])
    shares = compute_shares(wide, check_layout(wide, 2))
    assert sizes(wide) == [6, 2]
    assert shares[1] > shares[0]
    assert sizes(tiny("pipeline=2")) == [4, 4]
    for recipe in ("gpt3-23b", "gpt-neox-20b-pp4"):
        config = load_config(recipe)
        shares = compute_shares(config, check_layout(config, 128))
        assert sum(shares) == pytest.approx(1.0)
        assert shares[0] == shares[1] < shares[-1]
    whole = load_config("gpt-tiny")
    assert compute_shares(whole, check_layout(whole, 1)) == (1.0,)
    config = tiny("pipeline=2", "schedule=interleaved", "virtual_stages=4")
    plan = stage_plan(config, check_layout(config, 2))
    assert [list(stage.layers) for stage in plan] == [[block] for block in range(8)]
    assert [stage.index for stage in plan] == list(range(8))
    assert [stage.is_first for stage in plan] == [True] + [False] * 7
    assert [stage.is_last for stage in plan] == [False] * 7 + [True]
    assert sizes(tiny("pipeline=3", "stages=[2,4,2]")) == [2, 4, 2]
    assert sizes(tiny("pipeline=2", "schedule=zbv", "stages=[1,2,3,2]")) == [1, 2, 3, 2]
    for schedule, ranks in [("1f1b", [0, 1, 2]), ("interleaved", [0, 1, 2, 0, 1, 2]), ("zbv", [0, 1, 2, 2, 1, 0])]:
        parallel = ParallelConfig.model_validate({"pipeline": 3, "schedule": schedule})
        assert [pipeline_rank_of(parallel, stage) for stage in range(len(ranks))] == ranks
