"""Where the time of a run went: the share in which steps were taken that count, and what the rest was lost to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

CAUSES = ("start", "compile", "data", "checkpoint", "load", "restart", "lost steps")
"""What time is lost to, in the order in which it is shown.

start: from the start of the processes to the training, without loading. data: waiting for batches. checkpoint: training
waited until a checkpoint was copied. load: reading a checkpoint. restart: from the last sign of one start of the run to
the next one, unless the first one reached its end. lost steps: steps that were done again, without their waits, which
count as such.
"""
_LAST_SECOND = 1e11
"""In the year 5138: a later time is none, and cannot be shown in every time zone."""
_WAITS = ("data", "checkpoint")
_AT_ITS_END = ("finished", "stop_after")


@dataclass
class _Start:
    """One start of the run: when it began, the steps that were done before, what it lost, and its last step."""

    began: float = math.nan
    steps: int = 0
    compiling: float = 0.0
    last: Mapping[str, Any] = field(default_factory=dict)

    def waited(self, cause: str) -> float:
        """Seconds; `waited_seconds` of a step are sums since the start."""
        return number((self.last.get("waited_seconds") or {}).get(cause), 0.0)

    def seconds_of_a_step(self) -> float:
        """The mean of its steps, without waits and compilation; that of the last one where times are unknown."""
        waits = self.compiling + sum(self.waited(cause) for cause in _WAITS)
        steps = number(self.last.get("step"), 0.0) - self.steps
        mean = (seconds_of(self.last) - self.began - waits) / steps if steps > 0 else math.nan
        return number(self.last.get("step_seconds"), 0.0) if math.isnan(mean) else max(0.0, mean)


@dataclass
class LostTime:
    """Seconds of a run, from its events in their order (`add`).

    Of the steps it needs the last one before each start, and the last one of all.

    Attributes:
        steps: that were done again.
        starts: of the run.
    """

    steps: int = 0
    starts: int = 0
    _lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    _first: float = math.nan
    _last: float = math.nan
    _is_over: bool = False
    _former: _Start = field(default_factory=_Start)
    _start: _Start = field(default_factory=_Start)

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
            loading = number(event.get("load_seconds"), 0.0)
            self._lost["load"] += loading
            self._lost["start"] = max(0.0, self._lost["start"] - loading)
            self._undo_after(int(number(event.get("step"), 0.0)))
        elif kind == "compile":
            self._start.compiling += number(event.get("seconds"), 0.0)
        self._is_over = kind == "stop" and event.get("reason") in _AT_ITS_END
        self._last = _later(self._last, now)

    @property
    def by_cause(self) -> dict[str, float]:
        """Seconds by `CAUSES`."""
        lost = dict(self._lost)
        _count(lost, self._start)
        return lost

    @property
    def whole(self) -> float:
        """Seconds from the first start of the run to its last sign."""
        seconds = self._sign() - self._first
        return 0.0 if math.isnan(seconds) else max(0.0, seconds)

    @property
    def useful(self) -> float:
        """Seconds in which steps were taken that count."""
        return max(0.0, self.whole - sum(self.by_cause.values()))

    @property
    def goodput(self) -> float | None:
        """`useful` over `whole`; None before there is anything."""
        return self.useful / self.whole if self.whole > 0 else None

    def _sign(self) -> float:
        """When the run wrote last."""
        return _later(self._last, seconds_of(self._start.last))

    def _begin(self, event: Mapping[str, Any], now: float) -> None:
        before = number(event.get("seconds_before_training"), 0.0)
        gap = max(0.0, now - before - self._sign())
        if self._is_over:
            self._first += gap  # nothing was lost: nothing was left to do
        elif not math.isnan(gap):
            self._lost["restart"] += gap
        if math.isnan(self._first):
            self._first = now - before
        _count(self._lost, self._start)
        self._lost["start"] += before
        self.starts += 1
        if self._start.last:
            self._former = self._start
        self._start = _Start(now, int(number(event.get("steps_before"), 0.0)))

    def _undo_after(self, step: int) -> None:
        """Count the steps of the start before that come after `step`."""
        former, self._former, self._start.steps = self._former, _Start(), step
        lost = int(number(former.last.get("step"), 0.0)) - max(step, former.steps)
        if lost > 0:
            self.steps += lost
            self._lost["lost steps"] += lost * former.seconds_of_a_step()


def number(value: Any, default: float = math.nan) -> float:
    """A number of a record, where "nan", "inf" and "-inf" are texts; `default` where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return default


def seconds_of(event: Mapping[str, Any]) -> float:
    """When an event was recorded, in seconds since the epoch; NaN where that is unknown."""
    try:
        seconds = datetime.fromisoformat(event["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return math.nan
    return seconds if 0 <= seconds <= _LAST_SECOND else math.nan


def _later(one: float, other: float) -> float:
    return other if math.isnan(one) or other > one else one


def _count(lost: dict[str, float], start: _Start) -> None:
    """Add what a start lost to waits and compilation."""
    lost["compile"] += start.compiling
    for cause in _WAITS:
        lost[cause] += start.waited(cause)
