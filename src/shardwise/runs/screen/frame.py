"""What the screen shows at one moment, read from a run's folder in a thread of its own."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardwise.base.errors import ShardwiseError
from shardwise.base.files import reason_of
from shardwise.base.redaction import redacted
from shardwise.runs.json_lines import Series
from shardwise.runs.lost_time import LostTime, number
from shardwise.runs.rank_groups import PipelineView, graphs, pipeline, silent, split_seconds
from shardwise.runs.run import NodeView, RankView, Run, State, open_run

Span = Literal["whole", "tenth", "hundredth"]
"""How much of the run a curve shows, from its end."""
SPANS: tuple[Span, ...] = ("whole", "tenth", "hundredth")
_PART: dict[Span, int] = {"whole": 1, "tenth": 10, "hundredth": 100}
UNEXPECTED = (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError)
"""What values of other types in the files of a run lead to: another program may have written them."""
CURVES = ("loss", "tokens_per_second", "grad_norm")


class Curve(NamedTuple):
    """A number over the steps, in columns that each hold its least and largest value; NaN where a column has none.

    Attributes:
        first, last: steps that the columns span.
        points: (column, value) of the evaluations.
    """

    first: int
    last: int
    lows: Sequence[float]
    highs: Sequence[float]
    points: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class Frame:
    """A run at the moment `now` (seconds since the epoch), as `Run` tells it.

    Attributes:
        curves: by name of `CURVES`.
        silent: ranks that have written nothing for long.
        events: as recorded, with an event "ended" for each line of `restarts.jsonl`.
        has_history: whether all steps were read; otherwise the curves show the last ones.
        problem: why what is shown is old; empty where it is not.
    """

    path: Path
    name: str
    now: float
    state: State = "starting"
    reason: str = ""
    heard: float | None = None
    step: int = 0
    steps: int | None = None
    step_seconds: float | None = None
    eta_seconds: float | None = None
    last: Mapping[str, Any] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    split: Mapping[str, float] = field(default_factory=dict)
    graphs: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    ranks: Sequence[RankView] = ()
    nodes: Sequence[NodeView] = ()
    pipeline: Sequence[PipelineView] = ()
    silent: frozenset[int] = frozenset()
    events: Sequence[Mapping[str, Any]] = ()
    lost: LostTime = field(default_factory=LostTime)
    has_history: bool = True
    problem: str = ""

    @property
    def slowest(self) -> RankView | None:
        """The rank with the longest own work; None where ranks recorded none."""
        known = [view for view in self.ranks if view.relative is not None]
        return max(known, key=lambda view: view.relative or 0.0, default=None)


class Reader:
    """Reads frames of one run: the first from the ends of its files, the later ones with the curve of all steps."""

    def __init__(self, path: Path | None) -> None:
        self._run = open_run(path, whole=False)
        self._path = path
        self._has_history = False
        self._frame: Frame | None = None

    def read(self, columns: int = 0, span: Span = "whole", still: bool = False) -> Frame:
        """The run now, with curves of that many columns; the frame before with a `problem` where it cannot be read.

        Args:
            still: read nothing, and only cut the curves of the frame before anew.
        """
        if still and self._frame is not None:
            return replace(self._frame, curves=_curves(self._run, columns, span))
        if self._frame is not None and not self._has_history:
            self._read_history()
        try:
            if not self._run.directory.holds_run:
                return self._old(f"the run's folder {self._run.path} is gone")
            self._run.refresh()
            self._frame = frame_of(self._run, columns, span, has_history=self._has_history)
        except OSError as error:
            return self._old(f"{self._run.path} cannot be read: {reason_of(error)}")
        except UNEXPECTED as error:
            return self._old(f"{self._run.path} has a file that is not as expected ({type(error).__name__}: {error})")
        return self._frame

    def _read_history(self) -> None:
        # `read` tells why it fails: it meets the same.
        with contextlib.suppress(ShardwiseError, OSError, *UNEXPECTED):
            self._run, self._has_history = open_run(self._run.path, whole=True), True

    def _old(self, problem: str) -> Frame:
        old = self._frame or Frame(self._run.path, self._run.name, time.time())
        return replace(old, now=time.time(), problem=redacted(problem))


def frame_of(run: Run, columns: int = 0, span: Span = "whole", *, has_history: bool = False) -> Frame:
    """What a run tells now."""
    ranks = run.ranks()
    return Frame(
        path=run.path,
        name=run.name,
        now=time.time(),
        state=run.state,
        reason=run.reason,
        heard=run.heard,
        step=run.step,
        steps=run.steps,
        step_seconds=run.step_seconds,
        eta_seconds=run.eta_seconds,
        last=run.last,
        start=run.start,
        config=run.config,
        split=split_seconds(run),
        graphs=graphs(run),
        curves=_curves(run, columns, span),
        ranks=ranks,
        nodes=run.nodes(ranks),
        pipeline=pipeline(ranks),
        silent=silent(ranks, run.step_seconds),
        events=_events(run),
        lost=copy.deepcopy(run.lost),  # the run goes on counting in another thread
        has_history=has_history,
    )


def _curves(run: Run, columns: int, span: Span) -> dict[str, Curve]:
    return {name: curve(run.series, name, columns, span, _points(run, name)) for name in CURVES if columns}


def curve(series: Series, name: str, columns: int, span: Span, points: Sequence[tuple[int, float]] = ()) -> Curve:
    """A number of `series` in that many columns: spikes stay visible however many steps there are.

    Args:
        points: (step, value) of other values to show.
    """
    steps, values = series.steps, series.numbers[name]
    if not steps:
        return Curve(0, 0, (), ())
    first, last = steps[0], steps[-1]
    first = max(first, last - (last - first) // _PART[span])
    width = max(1, last - first + 1) / columns
    lows, highs, begin = [], [], bisect_left(steps, first)
    for column in range(columns):
        end = bisect_left(steps, first + (column + 1) * width, begin) if column + 1 < columns else len(steps)
        inside = values[begin:end]
        if not all(map(math.isfinite, inside)):
            inside = type(inside)("d", filter(math.isfinite, inside))
        lows.append(min(inside, default=math.nan))
        highs.append(max(inside, default=math.nan))
        begin = end
    shown = [(int((step - first) / width), value) for step, value in points if first <= step <= last]
    return Curve(first, last, lows, highs, shown)


def _events(run: Run) -> list[Mapping[str, Any]]:
    """The events of the run and the ends of its job's starts, in their order."""
    ends = [
        {"event": "ended", "time": datetime.fromtimestamp(ended, UTC).isoformat(), **one}
        for one in run.restarts()
        if math.isfinite(ended := number(one.get("began")) + number(one.get("seconds")))
    ]
    return sorted([*run.events, *ends], key=lambda event: str(event.get("time", ""))) if ends else [*run.events]


def _points(run: Run, name: str) -> list[tuple[int, float]]:
    """The evaluations, where `name` is the loss."""
    found = run.evaluations if name == "loss" else []
    return [(one["step"], number(one.get("loss"))) for one in found if isinstance(one.get("step"), int)]
