"""What a calibration measures when its time is short, by a clock that only steps of trainings move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.distributed.mesh import Group
from shardwise_plan import calibration_measure
from shardwise_plan.calibration_fit import Probe

MANY = 24  # steps of each miniature where there is time


class Miniature:
    """A trainer whose steps take `seconds` of the clock."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds, self.steps = clock, seconds, 0

    def step(self) -> Any:
        self.clock[0] += self.seconds
        self.steps += 1
        return SimpleNamespace(seconds=self.seconds)


def measured(until: float, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[int], list[str], float]:
    """Seconds of a step of each of two miniatures, how many they did, what is told, and when it ended."""
    clock = [0.0]
    miniatures = {"fast": Miniature(clock, 0.1), "slow": Miniature(clock, 0.9)}
    monkeypatch.setattr(calibration_measure, "time", SimpleNamespace(time=lambda: clock[0]))
    monkeypatch.setattr(calibration_measure, "trainer", lambda probe: miniatures[probe.recipe])
    budget = calibration_measure.Budget(Group(), until)
    found = calibration_measure._steps([Probe("fast", ()), Probe("slow", ())], Group(), budget)
    return found, [one.steps for one in miniatures.values()], budget.fewer, clock[0]


def test_with_time_all_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found, steps, fewer, _ = measured(60, monkeypatch)
    assert found == [0.1, 0.9]
    assert steps == [2 + MANY, 2 + MANY]
    assert not fewer


def test_with_little_time_every_miniature_does_a_few_steps_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    found, steps, fewer, end = measured(11, monkeypatch)
    assert found == [0.1, 0.9]
    assert steps == [2 + 8, 2 + 8], "of 9 seconds after the warm-up, 2 in each of 4 rounds"
    assert fewer == ["miniature trainings at least 8 steps each in place of 24"]
    assert end <= 11


def test_without_time_each_miniature_does_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found, steps, fewer, end = measured(1, monkeypatch)
    assert found == [0.1, 0.9]
    assert steps == [2 + 1, 2 + 1]
    assert fewer == ["miniature trainings at least 1 step each in place of 24"]
    assert end == pytest.approx(3)
