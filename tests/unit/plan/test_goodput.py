"""The time on the calendar: checkpoints, evaluations and failures, against a simulation and published trainings."""

import math
import random
from dataclasses import replace

import pytest

from shardwise.config import Config, load_config
from shardwise.estimates.memory import checkpoint_bytes
from shardwise_plan.device_specs import Cluster, Reliability, parse_cluster
from shardwise_plan.goodput import calendar

STEP = 10.0
CONFIG = load_config("gpt3-175b", ["train.steps=100000", "train.eval_every=0", "checkpoint.every_minutes=10"])


def with_reliability(nodes: int, **figures: float) -> Cluster:
    machines = parse_cluster("h100:8", nodes)
    device = machines.device
    return replace(machines, device=replace(device, reliability=replace(device.reliability, **figures)))


def without_an_interval() -> Config:
    return CONFIG.model_copy(update={"checkpoint": type(CONFIG.checkpoint)()})


def test_checkpoints_and_evaluations_take_time() -> None:
    machines = with_reliability(128, failures_per_year=0)
    times = calendar(CONFIG, machines, STEP)
    size = checkpoint_bytes(CONFIG, accelerator=True)
    assert size is not None
    assert times.stall == pytest.approx(size / (25e9 * 1024))
    assert times.write == pytest.approx(size / (2e9 * 128))
    assert times.seconds == pytest.approx(100_000 * STEP * (1 + times.stall / 600))
    evaluated = CONFIG.with_keys(train={"eval_every": 1000})
    batches = CONFIG.train.eval_batches
    assert calendar(evaluated, machines, STEP).evaluations == pytest.approx(100 * batches * STEP / 3)
    machines = with_reliability(128, failures_per_year=0.17, storage=1e7)
    times = calendar(CONFIG.with_keys(checkpoint={"every_minutes": 1}), machines, STEP)
    assert times.write > 20 * (times.interval + times.stall)
    assert times.seconds >= times.steps * times.write / times.interval
    seldom = calendar(without_an_interval(), machines, STEP)
    assert seldom.seconds < times.seconds / 10


def test_failures_cost_what_a_simulation_of_them_costs() -> None:
    machines = with_reliability(512, failures_per_year=5, restart=600)
    times = calendar(CONFIG, machines, STEP)
    assert times.between_failures == pytest.approx(365 * 86_400 / (5 * 4096))
    generator = random.Random(1)
    clock = done = 0.0
    until_failure = generator.expovariate(1 / times.between_failures)
    while done < times.steps:
        # A checkpoint counts once it is stored, and a failure before that repeats its work.
        needed = times.interval + times.stall
        if until_failure >= needed:
            clock += needed
            until_failure -= needed
            done += times.interval
        else:
            clock += until_failure
            lost = times.restart + times.write
            until_failure = generator.expovariate(1 / times.between_failures)
            while until_failure < lost:
                clock += until_failure
                until_failure = generator.expovariate(1 / times.between_failures)
            clock += lost
            until_failure -= lost
    assert times.seconds == pytest.approx(clock, rel=0.02)
    assert times.goodput == pytest.approx(times.steps / times.seconds)


def test_the_best_interval_and_the_goodput_of_published_trainings() -> None:
    config = without_an_interval()
    machines = with_reliability(128)
    best = calendar(config, machines, STEP)
    assert not best.is_given
    assert calendar(CONFIG, machines, STEP).is_given
    for factor in (0.5, 2.0):
        given = config.with_keys(checkpoint={"every_minutes": factor * best.interval / 60})
        assert calendar(given, machines, STEP).interval == pytest.approx(factor * best.interval)
        assert calendar(given, machines, STEP).seconds > best.seconds
    assert calendar(CONFIG.with_keys(checkpoint={"every": 20}), machines, STEP).interval == 20 * STEP
    # Llama 3 405B was trained for more than 90% of its time, with 419 failures in 54 days (arXiv:2407.21783).
    machines = with_reliability(2048)
    times = calendar(without_an_interval(), machines, STEP)
    assert 54 * 86_400 / times.between_failures == pytest.approx(419, rel=0.03)
    assert 0.88 < times.goodput < 0.96
    assert Reliability() == machines.device.reliability
    times = calendar(CONFIG, with_reliability(16_384, failures_per_year=10_000), STEP)
    assert times.seconds == math.inf
    assert not times.ends
    assert times.goodput == 0
    # With a failure every 8 minutes, one attempt in some dozens succeeds.
    rare = calendar(CONFIG, with_reliability(4, failures_per_year=2000), STEP)
    assert rare.ends
    assert 0.001 < rare.goodput < 0.1
