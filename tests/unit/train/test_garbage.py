"""Garbage is collected between steps alone, and the collector is afterwards as it was."""

import gc
import weakref

import pytest

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
