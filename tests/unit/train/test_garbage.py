"""Garbage is collected between steps alone, and the collector is afterwards as it was."""

import gc
import weakref

import pytest

from shardwise.train import observers
from shardwise.train.observers import SteppedCollection


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


def test_a_cycle_that_outlives_its_step_is_collected_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "_FULL_EVERY", 6)
    with SteppedCollection() as collection:
        cycle = Cycle()
        reference = weakref.ref(cycle)
        gc.collect(1)
        gc.collect(1)
        del cycle
        collection._steps = 4
        collection.after_step()
        assert reference() is not None, "all objects were searched"
        collection.after_step()
        assert reference() is None


@pytest.mark.parametrize(
    ("enabled", "frozen"),
    [(False, True), pytest.param(True, False, marks=pytest.mark.slow)],
)
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
