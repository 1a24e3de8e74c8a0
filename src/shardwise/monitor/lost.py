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
the next one. lost steps: steps that were done again.
"""


@dataclass
class LostTime:
    """Seconds of a run, from its events in their order (`add`). Of the steps it needs the last one before each start.

    Attributes:
        by_cause: by `CAUSES`, of the starts before the last one, and what is known at once of the last.
        steps: that were done again.
        starts: of the run.
    """

    by_cause: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    steps: int = 0
    starts: int = 0
    _first: float | None = None
    _last: float = math.nan
    _step: Mapping[str, Any] = field(default_factory=dict)
    _undone: Mapping[str, Any] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> None:
        """Count an event of `metrics.jsonl`."""
        kind, now = event.get("event"), seconds_of(event)
        if kind == "start":
            self._begin(event, now)
        elif kind == "resume":
            loading = number(event.get("load_seconds"), 0.0)
            self.by_cause["load"] += loading
            self.by_cause["start"] = max(0.0, self.by_cause["start"] - loading)
            self._undo_after(int(number(event.get("step"), 0.0)))
        elif kind == "compile":
            self.by_cause["compile"] += number(event.get("seconds"), 0.0)
        elif kind == "step":
            self._count_waits(event)
            self._step = event
        if not math.isnan(now):
            self._last = now

    @property
    def whole(self) -> float:
        """Seconds from the first start of the run to its last sign."""
        return 0.0 if self._first is None or math.isnan(self._last) else max(0.0, self._last - self._first)

    @property
    def useful(self) -> float:
        """Seconds in which steps were taken that count."""
        return max(0.0, self.whole - sum(self.by_cause.values()))

    @property
    def goodput(self) -> float | None:
        """`useful` over `whole`; None before there is anything."""
        return self.useful / self.whole if self.whole > 0 else None

    def _begin(self, event: Mapping[str, Any], now: float) -> None:
        before = number(event.get("seconds_before_training"), 0.0)
        self.by_cause["start"] += before
        self.starts += 1
        if self._first is None:
            self._first = now - before
        elif not math.isnan(now - self._last):
            self.by_cause["restart"] += max(0.0, now - before - self._last)
        self._undone, self._step = self._step, {}

    def _undo_after(self, step: int) -> None:
        """Count the steps of the start before that come after `step`."""
        lost = int(number(self._undone.get("step"), 0.0)) - step
        if lost > 0:
            self.steps += lost
            self.by_cause["lost steps"] += lost * number(self._undone.get("step_seconds"), 0.0)

    def _count_waits(self, event: Mapping[str, Any]) -> None:
        """`waited_seconds` are sums since the start."""
        waited, before = event.get("waited_seconds") or {}, self._step.get("waited_seconds") or {}
        for cause in ("data", "checkpoint"):
            self.by_cause[cause] += number(waited.get(cause), 0.0) - number(before.get(cause), 0.0)


def number(value: Any, default: float = math.nan) -> float:
    """A number of a record, where "nan", "inf" and "-inf" are texts; `default` where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return default


def seconds_of(event: Mapping[str, Any]) -> float:
    """When an event was recorded, in seconds since the epoch; NaN where that is unknown."""
    try:
        return datetime.fromisoformat(event["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return math.nan
