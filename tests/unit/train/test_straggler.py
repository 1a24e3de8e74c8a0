"""Scores of slow ranks and of loss spikes, with ranks that are played one after the other."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.train.rank_file import WarningOnce
from shardwise.train.step_meters import STRAGGLER_STEPS, _Stragglers
from shardwise.train.step_record import SMOOTHED_STEPS, Progress, Straggler


def mesh_of(rank: int, world: int, tensor: int = 1, pipeline: int = 1) -> Any:
    """The place of a rank."""
    inner = world // pipeline
    return SimpleNamespace(
        tp=SimpleNamespace(size=tensor),
        stage=SimpleNamespace(size=inner),
        pp=SimpleNamespace(size=pipeline, rank=rank // inner),
        world=SimpleNamespace(size=world, rank=rank),
    )


def played(work: list[float], *layout: int, steps: int = STRAGGLER_STEPS + 3) -> Straggler | None:
    """What every rank finds when rank r's own work takes `work[r]` in each step."""
    ranks = [_Stragglers(mesh_of(rank, len(work), *layout)) for rank in range(len(work))]
    found: list[Straggler | None] = []
    for _ in range(steps):
        reduced = [max(numbers) for numbers in zip(*(rank.numbers() for rank in ranks), strict=True)]
        found = [rank.take(reduced) for rank in ranks]
        for rank, seconds in zip(ranks, work, strict=True):
            rank.add(seconds)
    assert all(one == found[0] for one in found), "all ranks name the same one"
    return found[0]


def test_the_slowest_rank_of_a_stage_is_named_with_its_scores() -> None:
    assert played([0.1, 0.1, 0.25, 0.1]) == Straggler(2, pytest.approx(2.5), 1.0)
    for equal in (played([0.1, 0.1, 0.1, 0.1]), played([0.25, 0.25], 2)):
        assert equal.relative == 1.0, "of ranks that are equally slow none is the slow one"
    assert played([0.1, 0.9], steps=STRAGGLER_STEPS) is None, "there is no window of steps yet"
    found = played([0.1, 0.1, 0.4, 0.44], 2, 2)
    assert (found.rank, found.relative) == (3, pytest.approx(1.1))
    rank = _Stragglers(mesh_of(1, 2, 1, 2))
    for seconds in [0.1] * STRAGGLER_STEPS + [0.3] * STRAGGLER_STEPS:
        rank.add(seconds)
    assert rank.slowdown == pytest.approx(3.0)
    longest, shortest, *_ = rank.numbers()
    assert (longest, shortest) == (pytest.approx(3.0), pytest.approx(-3.0))
    assert rank.take([3.0, -1.0, 0.0, 0.0, 0.0]) is None
    assert rank.numbers()[2:] == [2.0, pytest.approx(3.0), pytest.approx(3.0)], "it says that it was this one"


def test_occurrences_are_told_once_and_spikes_are_standard_deviations() -> None:
    slow = WarningOnce(1.5, 1.25)
    told = [slow.begins(score, who) for score, who in [(1.4, 3), (1.6, 3), (1.7, 3), (1.3, 3), (1.6, 3), (1.6, 5)]]
    assert told == [False, True, False, False, False, True]
    assert not slow.begins(1.0, 5)
    assert slow.begins(1.6, 5), "it had ended"
    assert not slow.begins(None)

    def spike(loss: float, before: list[float]) -> float | None:
        progress = Progress()
        progress.losses.extend(before)
        return progress.advance(loss, 8, 16)

    before = [3.0, 3.2] * (SMOOTHED_STEPS // 2)
    assert spike(4.1, before) == pytest.approx(10.0)
    assert spike(3.1, before) == pytest.approx(0.0)
    assert spike(4.1, before[1:]) is None, "too few steps before"
    assert spike(3.0 + 3e-3, [3.0] * SMOOTHED_STEPS) == pytest.approx(1.0), "equal losses have a least deviation"
    assert math.isfinite(spike(1.0, [0.0] * SMOOTHED_STEPS) or 0.0)
