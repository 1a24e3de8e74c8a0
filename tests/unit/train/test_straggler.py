"""What is observed of its ranks, its garbage and its evaluations; their losses: tests/dist/test_evaluation.py."""

import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.data.samples.batch import IGNORE, Batch
from shardwise.train.mean_loss import MicroBatch
from shardwise.train.observers import SteppedCollection
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


def test_the_slowest_rank_of_a_stage_is_named_once_and_spikes_are_standard_deviations() -> None:
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


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_a_cycle_lives_until_the_end_of_its_step() -> None:
    with SteppedCollection() as collection:
        for _ in range(3):
            collection.after_step()
        cycle = weakref.ref(Cycle())
        young = [[] for _ in range(3 * gc.get_threshold()[0])]
        assert cycle() is not None, "the collector ran by itself"
        collection.after_step()
        assert cycle() is None
    del young


@pytest.mark.parametrize(("enabled", "frozen"), [(False, True), pytest.param(True, False, marks=pytest.mark.slow)])
def test_the_collector_is_as_before(enabled: bool, frozen: bool) -> None:
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    try:
        (gc.enable if enabled else gc.disable)()
        (gc.freeze if frozen else gc.unfreeze)()
        had_frozen = gc.get_freeze_count() > 0
        with SteppedCollection() as collection:
            for _ in range(3):
                collection.after_step()
            assert gc.get_freeze_count() > 0
        assert gc.isenabled() == enabled
        # Not their number: other threads of a test process free some.
        assert (gc.get_freeze_count() > 0) == had_frozen
    finally:
        # As tests/conftest.py has it: all later tests would look for garbage among what they have imported.
        (gc.freeze if was_frozen else gc.unfreeze)()
        (gc.enable if was_enabled else gc.disable)()


def tokens(batch: Batch) -> int:
    return int(MicroBatch.on(torch.device("cpu"), batch).tokens())


def test_tokens_of_samples_that_only_fill_up_are_not_counted() -> None:
    """Those of sentence pairs: special tokens alone, which a mask does not tell from others."""
    samples, mask_SB = np.arange(3), np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0]])
    inputs = {"ids_SB": mask_SB, "mask_SB": mask_SB, "next_sentence_B": np.array([0, IGNORE, 1])}
    assert tokens(Batch(inputs, np.array([2, 2]), samples)) == 3 + 2
    causal = Batch({"ids_SB": mask_SB, "targets_SB": mask_SB}, np.array([7]), samples)
    assert tokens(causal) == 7
