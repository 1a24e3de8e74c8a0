"""The lost time of a run by cause, and its goodput: the share of its time in which steps were taken that count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.base import units
from shardwise.runs.events import NEXT_STAGE, number, seconds_of

CAUSES = ("start", "compile", "data", "checkpoint", "load", "restart", "lost steps")
"""Causes of lost time, in the order in which they are shown.

    start       time from the start of the processes to the training, without loading, unless a person stopped the run
    compile     compiling graphs
    data        waiting for batches
    checkpoint  training waited until a checkpoint was copied
    load        reading a checkpoint, likewise unless a person stopped the run before
    restart     time from the last event of one start of the run to the next start, unless the first reached its end or
                a person stopped it
    lost steps  steps that were done again, without their waits, which count as such
"""
_WAITS = ("data", "checkpoint")
_SAVED_ENDS = ("finished", "stop_after", NEXT_STAGE, "stopped by ")
"""Beginnings of the reasons of a "stop" event which a run records after its checkpoint is saved."""
_BY_A_SCHEDULER = ("stopped by SIG", "stopped by signal ")
"""Likewise of those that may come from a scheduler, which takes the machine away: all signals but Ctrl-C."""
_ENDS_AT_ONCE = ("failed: Interrupted: Ctrl-C", "failed: KeyboardInterrupt")
"""Likewise of those of a person who did not wait for the checkpoint."""


@dataclass
class _RunStart:
    """One start of the run."""

    began: float = math.nan  # time of its "start" event, in seconds since the epoch
    steps: int = 0  # steps that were done before
    is_wanted: bool = False  # True if the run had done what it was told before, so that this start follows no failure
    compiling: float = 0.0  # seconds of compiling graphs
    last: Mapping[str, Any] = field(default_factory=dict)  # last "step" event; {} before the first

    def waited(self, cause: str) -> float:
        """Return the seconds of a wait: `waited_seconds` of the last step are sums since the start."""
        return number((self.last.get("waited_seconds") or {}).get(cause), 0.0)

    def seconds_of_a_step(self) -> float:
        """Mean seconds of a step without waits and compilation; seconds of the last step if the times are unknown."""
        waits = self.compiling + sum(self.waited(cause) for cause in _WAITS)
        steps = number(self.last.get("step"), 0.0) - self.steps
        mean = (seconds_of(self.last) - self.began - waits) / steps if steps > 0 else math.nan
        return number(self.last.get("step_seconds"), 0.0) if math.isnan(mean) else max(0.0, mean)


@dataclass
class LostTime:
    """Lost seconds of a run, summed up from its events in their order (`add`).

    Only two kinds of steps matter, so that a reader may skip all others: the last one before each start, and the last
    one of all.
    """

    steps: int = 0  # number of steps that were done again
    starts: int = 0  # number of starts of the run, to which its later stages do not add
    # Each start but the first one, as the steps before it, and True if the run had saved its state and stopped, so that
    # it was continued; False if it had failed or was killed, and was started again.
    later_starts: list[tuple[int, bool]] = field(default_factory=list)
    _lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    _first_time: float = math.nan
    _ranks: float = 0.0
    # Device-seconds of the starts before the last one, and the time of the run up to their end.
    _before: tuple[float, float] = (0.0, 0.0)
    _last_time: float = math.nan
    _is_over: bool = False
    _is_saved: bool = False
    _goes_on: bool = False
    _former: _RunStart = field(default_factory=_RunStart)
    _start: _RunStart = field(default_factory=_RunStart)

    def add(self, event: Mapping[str, Any]) -> None:
        """Count an event of `metrics.jsonl`."""
        kind = event.get("event")
        if kind == "step":
            self._start.last = event
            return
        now = seconds_of(event)
        if kind == "start":
            self._begin(event, now)
        elif kind == "resume":
            loading = 0.0 if self._start.is_wanted else number(event.get("load_seconds"), 0.0)
            self._lost["load"] += loading
            # `seconds_before_training` of the start, which came before this event, contains the loading.
            self._lost["start"] = max(0.0, self._lost["start"] - loading)
            self._undo_after(int(number(event.get("step"), 0.0)))
        elif kind == "compile":
            self._start.compiling += number(event.get("seconds"), 0.0)
        reason = str(event.get("reason"))
        is_deliberate = reason.startswith(_SAVED_ENDS + _ENDS_AT_ONCE) and not reason.startswith(_BY_A_SCHEDULER)
        self._is_over = kind == "stop" and is_deliberate
        self._goes_on = kind == "stop" and reason == NEXT_STAGE
        self._is_saved = kind == "stop" and reason.startswith(_SAVED_ENDS)
        self._last_time = _later(self._last_time, now)

    @property
    def later_starts_text(self) -> str:
        """Say how often the run was started again, such as `2 restarts, 1 continuation`; empty of a single start."""
        continuations = sum(is_continuation for _, is_continuation in self.later_starts)
        counts = {"restart": len(self.later_starts) - continuations, "continuation": continuations}
        return ", ".join(units.counted(count, name) for name, count in counts.items() if count)

    @property
    def by_cause(self) -> dict[str, float]:
        """Lost seconds by `CAUSES`."""
        lost = dict(self._lost)
        _add_waits(lost, self._start)
        return lost

    @property
    def whole(self) -> float:
        """Seconds from the first start of the run to its last event."""
        seconds = self._last_sign() - self._first_time
        return 0.0 if math.isnan(seconds) else max(0.0, seconds)

    @property
    def device_seconds(self) -> float:
        """The time of the run times the ranks that it had then; NaN if a start has not recorded their number."""
        seconds, until = self._before
        return seconds + self._ranks * max(0.0, self.whole - until)

    @property
    def useful(self) -> float:
        """Seconds in which steps were taken that count, with evaluations and the sample at the end."""
        return max(0.0, self.whole - sum(self.by_cause.values()))

    @property
    def goodput(self) -> float | None:
        """Ratio of `useful` to `whole`; None before the first event with a time."""
        return self.useful / self.whole if self.whole > 0 else None

    def _last_sign(self) -> float:
        """Time of the last event, steps included, in seconds since the epoch."""
        return _later(self._last_time, seconds_of(self._start.last))

    def _begin(self, event: Mapping[str, Any], now: float) -> None:
        before = number(event.get("seconds_before_training"), 0.0)
        ranks = number(event.get("ranks"))
        self._before = (self.device_seconds, self.whole)
        gap = max(0.0, now - before - self._last_sign())
        is_wanted = self._is_over and not self._goes_on
        if is_wanted:
            # The start that a person caused is left out of the run's time too, though its devices were in use.
            self._before = (self._before[0] + ranks * before, self._before[1])
            gap += before
            before = 0.0
        if self._is_over:
            # A run that had ended as it was told had nothing to do: the pause is left out of the run's time.
            self._first_time += gap
        elif not math.isnan(gap):
            self._lost["restart"] += gap
        self._ranks = ranks
        if math.isnan(self._first_time):
            self._first_time = now - before
        _add_waits(self._lost, self._start)
        self._lost["start"] += before
        steps_before = int(number(event.get("steps_before"), 0.0))
        if not self._goes_on:
            if self.starts:
                self.later_starts.append((steps_before, self._is_saved))
            self.starts += 1
        # A start without a step undoes none, so the one before it stays the former one.
        if self._start.last:
            self._former = self._start
        self._start = _RunStart(now, steps_before, is_wanted)

    def _undo_after(self, step: int) -> None:
        """Count the steps after `step` that the former start did: they are done again."""
        former = self._former
        # Its steps are counted once, also if the run resumes again.
        self._former = _RunStart()
        self._start.steps = step
        lost = int(number(former.last.get("step"), 0.0)) - max(step, former.steps)
        if lost > 0:
            self.steps += lost
            self._lost["lost steps"] += lost * former.seconds_of_a_step()


def _later(former: float, new: float) -> float:
    """Return the later of two times, of which NaN is unknown."""
    return new if math.isnan(former) or new > former else former


def _add_waits(lost: dict[str, float], start: _RunStart) -> None:
    lost["compile"] += start.compiling
    for cause in _WAITS:
        lost[cause] += start.waited(cause)
