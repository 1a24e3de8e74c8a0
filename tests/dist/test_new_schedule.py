"""A schedule that is added by its record, its order and torch's class alone: nothing else needs to know its name."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shardwise.config import Config, load_config
from shardwise.config.pipeline_schedule_specs import SCHEDULES, ScheduleSpec
from shardwise.pipeline import action_order as orders
from shardwise.pipeline.action_order import Action, action_order
from shardwise.pipeline.timeline import StageTimes, timeline
from shardwise_plan.makespan import makespan
from tests.dist.training import make_config, train

NAME = "two_phases"


class TwoPhases:
    """The order of GPipe, written down without its record."""

    def actions(self, p: int, v: int, m: int, r: int) -> tuple[Action, ...]:
        forward = [Action("forward", r, k) for k in range(m)]
        return (*forward, *(Action("backward", r, k) for k in range(m)))


@contextmanager
def added() -> Iterator[None]:
    """Add the schedule, and remove it at the end."""
    from torch.distributed.pipelining import schedules  # here, as it imports torch's compiler, which is slow

    from shardwise.pipeline.schedule import TORCH_SCHEDULES

    spec = ScheduleSpec(NAME, 1, lambda p, m: None if m >= p else f"at least {p}", holds_all_micro_batches=True)
    tables: tuple[tuple[dict[str, Any], Any], ...] = (
        (SCHEDULES, spec),
        (orders.ORDERS, TwoPhases()),
        (TORCH_SCHEDULES, schedules.ScheduleGPipe),
    )
    for table, entry in tables:
        table[NAME] = entry
    try:
        yield
    finally:
        for table, _ in tables:
            del table[NAME]


def with_schedule(config: Config, name: str, degree: int = 2) -> Config:
    """The names in recipes are a fixed list, so the name is set past their check."""
    parallel = config.parallel.model_copy(update={"schedule": name, "pipeline": degree})
    return config.model_copy(update={"parallel": parallel})


def test_its_order_is_simulated() -> None:
    known, new = (with_schedule(load_config("gpt3-tiny"), name, 3).parallel for name in ("gpipe", NAME))
    stages = (StageTimes(1.0, 2.5, 1.0), StageTimes(1.5, 2.0, 1.0), StageTimes(1.0, 2.0, 1.0))
    with added():
        for rank in range(3):
            assert action_order(new, 4, rank) == action_order(known, 4, rank)
        assert timeline(new, 4, stages, 0.1, "none") == timeline(known, 4, stages, 0.1, "none")
        assert makespan(new, 4, stages, 0.1, "none") == pytest.approx(makespan(known, 4, stages, 0.1, "none"))


def trained(config: Config) -> list[float]:
    with added():
        return train(config, steps=2).losses


def test_it_trains_as_the_one_that_it_repeats(ranks: Any) -> None:
    config = make_config(parallel={"pipeline": 2, "schedule": "gpipe"})
    new = ranks(2).run(trained, with_schedule(config, NAME))
    assert new == ranks(2).run(trained, config)
    assert len(new[0]) == 2
