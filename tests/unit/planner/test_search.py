"""What the search says of a layout is what the dry run says of it, and what does not fit is dropped."""

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import UserModelConfig, load_config
from shardwise.planner.device_specs import cluster
from shardwise.planner.memory import expected_memory
from shardwise.planner.search import RESERVED, search

CONFIG = load_config("gpt3-23b", ["train.global_batch=512"])
FIXED = ("train.micro_batch", "train.recompute", "optimizer.zero", "parallel.sequence")


def test_memory_is_that_of_the_whole_step() -> None:
    """The search looks at a shorter step, and only at some of the pipeline ranks."""
    on = cluster("h100:8", 4)
    plans = search(CONFIG, on, best=1000, fixed=FIXED).plans
    assert {plan.choice.pipeline for plan in plans} > {1, 4}
    for plan in plans:
        whole = expected_memory(plan.config, plan.layout, True)
        assert whole is not None
        assert 0.99 < plan.memory.total / whole.total <= 1, plan.text()


def test_what_does_not_fit_is_dropped() -> None:
    large = cluster("h100:8", 4)
    everything = search(CONFIG, large, best=1000, fixed=FIXED)
    needs = sorted(plan.memory.total for plan in everything.plans)
    device = replace(large.device, memory=needs[len(needs) // 2] / (1 - RESERVED) + 1)
    fewer = search(CONFIG, replace(large, device=device), best=1000, fixed=FIXED)
    assert len(fewer.plans) == sum(need <= needs[len(needs) // 2] for need in needs)
    assert all(plan.headroom >= 0 for plan in fewer.plans)
    assert len(fewer.plans) + sum(fewer.too_large.values()) == fewer.valid == everything.valid
    assert fewer.too_large["activations do not fit beside parameters, gradients and optimizer state"] > 0


def test_a_model_of_ones_own_is_refused(tmp_path: Path) -> None:
    own = load_config("llama2-tiny").model_copy(update={"model": UserModelConfig(family="mine:Model", vocab_size=300)})
    with pytest.raises(ConfigError, match=r"model\.family \(mine:Model\) must be one whose shapes are known: a model"):
        search(own, cluster("cpu:1", 1))
