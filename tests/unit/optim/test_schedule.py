"""The learning rate as a function of the step."""

import math

import pytest

from shardwise.config import Config, config_from
from shardwise.optim import learning_rate


def make(
    schedule: str, *, warmup: int = 4, steps: int = 20, min_lr: float = 1e-5, stop_after: int | None = None
) -> Config:
    return config_from(
        {
            "model": {
                "family": "llama",
                "vocab_size": 64,
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
            },
            "train": {"steps": steps, "global_batch": 1, "sequence_length": 8, "stop_after": stop_after},
            "optimizer": {"lr": 1e-3, "min_lr": min_lr, "warmup_steps": warmup, "schedule": schedule},
        }
    )


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_warmup_rises_from_the_first_step_to_the_peak(schedule: str) -> None:
    config = make(schedule)
    assert [learning_rate(config, step) for step in range(1, 5)] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 5.05e-4), ("cosine", 5.05e-4), ("constant", 1e-3)])
def test_decay_ends_at_the_minimum(schedule: str, middle: float) -> None:
    config = make(schedule)
    assert learning_rate(config, 12) == pytest.approx(middle)
    assert learning_rate(config, 20) == pytest.approx(1e-3 if schedule == "constant" else 1e-5)
    rates = [learning_rate(config, step) for step in range(4, 21)]
    assert rates == sorted(rates, reverse=True)


def test_cosine_is_a_cosine() -> None:
    config = make("cosine", warmup=0, min_lr=0.0)
    wanted = [5e-4 * (1 + math.cos(math.pi * step / 20)) for step in range(1, 21)]
    assert [learning_rate(config, step) for step in range(1, 21)] == pytest.approx(wanted)


def test_stopping_early_does_not_bend_the_schedule() -> None:
    short, full = make("cosine", stop_after=5), make("cosine")
    assert [learning_rate(short, step) for step in range(1, 6)] == [learning_rate(full, step) for step in range(1, 6)]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_all_steps_may_be_warmup(schedule: str) -> None:
    config = make(schedule, warmup=20)
    assert learning_rate(config, 20) == pytest.approx(1e-3)
    assert learning_rate(make(schedule, warmup=0, steps=1, min_lr=0.0), 1) >= 0.0
