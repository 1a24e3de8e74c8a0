"""Where the time of a run went, counted by hand."""

import math
from signal import SIGINT, SIGTERM
from typing import Any

import pytest

from shardwise.launch.stop_requests import signal_name
from shardwise_watch.lost_time import CAUSES, LostTime
from tests.monitor_runs import stamp


def event(kind: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "time": stamp(at), **fields}


def step(number: int, at: float, data: float = 0.0, checkpoint: float = 0.0) -> dict[str, Any]:
    return event("step", at, step=number, step_seconds=2.0, waited_seconds={"data": data, "checkpoint": checkpoint})


FIRST = [
    event("start", 110, seconds_before_training=10.0, steps_before=0),
    event("compile", 114, seconds=4.0),
    step(1, 117, 1.0),
    step(10, 140, 5.0, 1.0),
]
"""From 100 to 140: 10 s of start, 4 of compilation, 5 of data, 1 of a checkpoint; 10 steps of 2 s."""
AGAIN = [
    event("start", 165, seconds_before_training=15.0, steps_before=6),
    event("resume", 165, step=6, load_seconds=5.0),
    step(12, 179, 0.5, 0.5),
]
"""20 s later, 10 s of start and 5 of loading; the steps 7 to 10 again."""
STOP = event("stop", 180, step=12, reason="finished")


def lost(*events: dict[str, Any]) -> LostTime:
    found = LostTime()
    for one in events:
        found.add(one)
    return found


def test_each_cause_is_counted_once() -> None:
    found = lost(*FIRST, *AGAIN, STOP)
    expected = {"start": 20, "compile": 4, "data": 5.5, "checkpoint": 1.5, "load": 5, "restart": 10, "lost steps": 8}
    assert found.by_cause == pytest.approx(expected)
    assert list(found.by_cause) == list(CAUSES)
    assert (found.steps, found.starts, found.whole) == (4, 2, 80)
    assert found.goodput == pytest.approx((80 - 54) / 80)
    fell = [event("start", 190, seconds_before_training=5.0, steps_before=6), event("stop", 191, reason="failed: x")]
    again = [event("start", 200, seconds_before_training=5.0, steps_before=6), event("resume", 200, step=6)]
    assert lost(*FIRST, *fell, *again).steps == 4, "a start that failed before it loaded"
    assert lost(*FIRST, *AGAIN[:2], *again).steps == 4, "a start that failed after it loaded"


def test_the_time_between_a_finished_run_and_its_continuation_is_not_lost() -> None:
    later = [event("start", 100_015, seconds_before_training=15.0, steps_before=12), step(14, 100_019)]
    found = lost(*FIRST, *AGAIN, STOP, *later)
    assert found.by_cause["restart"] == 10
    assert found.whole == 80 + 4, "the start of the continuation is left out like the pause"
    stopped = STOP | {"reason": "stopped by SIGUSR1"}
    assert lost(*FIRST, *AGAIN, stopped, *later).by_cause["restart"] == 10 + 100_000 - 180


@pytest.mark.parametrize(
    ("by", "lost_seconds"),
    [(SIGINT, 0), (SIGTERM, 100_000 - 180), ("`shardwise stop`", 0), ("hooks.callbacks (own.py:Early)", 0)],
)
def test_the_time_after_a_stop_that_a_person_asked_for_is_not_lost(by: int | str, lost_seconds: int) -> None:
    """Nor is that of the start which continues it, with its load."""
    stopped = STOP | {"reason": f"stopped by {signal_name(by) if isinstance(by, int) else by}"}
    began = event("start", 100_015, seconds_before_training=15.0, steps_before=12)
    later = [began, event("resume", 100_015, step=12, load_seconds=3.0), step(14, 100_019)]
    found = lost(*FIRST, *AGAIN, stopped, *later)
    started, loaded = (15 - 3, 3) if lost_seconds else (0, 0)
    assert found.by_cause["restart"] == 10 + lost_seconds
    assert (found.by_cause["start"], found.by_cause["load"]) == (20 + started, 5 + loaded)
    assert found.whole == 80 + 4 + started + loaded + lost_seconds
    # All was saved, whoever asked for it; the first of the later starts followed a death.
    assert found.later_starts == [(6, False), (12, True)]
    assert found.later_starts_text == "1 restart, 1 continuation"


@pytest.mark.parametrize("kind", ["Interrupted: Ctrl-C (SIGINT)", "KeyboardInterrupt: "])
def test_a_person_who_does_not_wait_for_the_checkpoint_loses_steps_alone(kind: str) -> None:
    found = lost(*FIRST, event("stop", 141, step=10, reason=f"failed: {kind}"), *AGAIN, STOP)
    assert found.by_cause["restart"] == 0
    assert (found.steps, found.by_cause["lost steps"]) == (4, 8)
    assert found.later_starts_text == "1 restart"


def test_device_hours_are_those_of_all_starts() -> None:
    """Devices are held while a run is restarted, and not while it is stopped; a start on others counts with these."""
    first, again = ([one | {"ranks": 2} if one["event"] == "start" else one for one in part] for part in (FIRST, AGAIN))
    assert lost(*first, *again, STOP).device_seconds == 2 * 80
    on_four = [one | {"ranks": 4} if one["event"] == "start" else one for one in AGAIN]
    assert lost(*first, *on_four, STOP).device_seconds == 2 * 40 + 4 * 40
    stopped = event("stop", 140, step=10, reason="stopped by Ctrl-C (SIGINT)")
    assert lost(*first, stopped, *on_four, STOP).device_seconds == 2 * 40 + 4 * (15 + 15)
    assert math.isnan(lost(*FIRST).device_seconds)
