"""The contents of the screen at one moment, read from the folders of runs in a thread of its own."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardwise.base import errors, files, redaction
from shardwise.runs.events import number
from shardwise.runs.failure_record import FailureRecord
from shardwise_watch.cli.ls import run_cells
from shardwise_watch.json_lines import last_raw_lines
from shardwise_watch.lost_time import LostTime
from shardwise_watch.rank_views import NodeView, PipelineView, RankView, pipeline_views, silent_ranks
from shardwise_watch.run import RunView, State, open_run, run_folders
from shardwise_watch.step_metrics import SCREEN_CURVES, StepCurve, ranges_of_equal_widths, reduce_to_columns

Span = Literal["whole", "tenth", "hundredth"]
"""Part of the run that a curve shows, counted from its end."""
SPANS: tuple[Span, ...] = ("whole", "tenth", "hundredth")
_PART: dict[Span, int] = {"whole": 1, "tenth": 10, "hundredth": 100}
_LOG_BYTES = 1 << 15  # bytes of a log that are read, from its end
_RUN_FACTS = (
    "path", "name", "state", "restart", "reason", "failure", "heard", "step", "steps", "step_seconds",
    "eta_seconds", "last", "start", "config",
)  # fmt: skip
UNEXPECTED = (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError)
"""Errors that values of other types in the files of a run lead to: another program may have written them."""


class ShownRuns(NamedTuple):
    """Folders of the run that the screen shows (None: the first) and of the one behind, and whether runs are listed."""

    run: Path | None = None
    behind: Path | None = None
    is_listing: bool = False


@dataclass(frozen=True)
class Frame:
    """A run on the screen at the moment `now` (seconds since the epoch), with the facts of `RunView`."""

    path: Path
    name: str
    now: float
    state: State = "starting"
    restart: str = ""
    reason: str = ""
    failure: FailureRecord | None = None
    heard: float | None = None
    step: int = 0
    steps: int | None = None
    step_seconds: float | None = None
    eta_seconds: float | None = None
    last: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)  # last "eval" event; {} without one
    start: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    split: Mapping[str, float] = field(default_factory=dict)
    graphs: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, StepCurve] = field(default_factory=dict)  # curves by the names of `SCREEN_CURVES`
    # Curves of the run that is shown behind, over the same steps.
    behind: Mapping[str, StepCurve] = field(default_factory=dict)
    behind_path: Path | None = None  # folder of the run behind; None without one
    log: Sequence[str] = ()  # last lines of rank 0's log
    # Folder of each run to choose from, the time at which it last wrote, and its cells of `shardwise ls`.
    runs: Sequence[tuple[Path, float, Sequence[str]]] = ()
    ranks: Sequence[RankView] = ()
    nodes: Sequence[NodeView] = ()
    pipeline: Sequence[PipelineView] = ()
    silent: frozenset[int] = frozenset()  # ranks that have written nothing for long
    events: Sequence[Mapping[str, Any]] = ()  # recorded events, with an event "ended" for each line of `restarts.jsonl`
    lost: LostTime = field(default_factory=LostTime)
    has_history: bool = True  # True if all steps were read; otherwise the curves show the last ones
    problem: str = ""  # sentence that says why the frame is old; empty for a fresh one

    @property
    def failure_lines(self) -> list[str]:
        """Lines that say why the run failed; [] if it did not, or has been started since."""
        return self.failure.lines(self.path) if self.failure is not None and self.state == "failed" else []

    @property
    def slowest(self) -> RankView | None:
        """Rank with the most work of its own; None if ranks recorded none."""
        known = [view for view in self.ranks if view.relative is not None]
        return max(known, key=lambda view: view.relative or 0.0, default=None)


class FrameReader:
    """Reader of frames of runs, of which one is shown at a time.

    Attributes:
        paths: folders of the runs, first the one to show first. Runs beside that can be chosen too.
    """

    def __init__(self, *paths: Path | None) -> None:
        opened = [_RunReader(path) for path in paths]
        self.paths = [reader.path for reader in opened]
        self._readers = dict(zip(self.paths, opened, strict=True))

    def read(
        self, columns: int = 0, span: Span = "whole", still: bool = False, choice: ShownRuns | None = None
    ) -> Frame:
        """Read a run, with curves of that many columns; if it cannot be read, return the last frame with a `problem`.

        Args:
            still: True to read nothing, and only cut the curves of the last frame anew.
        """
        run, behind, is_listing = choice or ShownRuns()
        path = run or self.paths[0]
        frame = self._readers[path].read(columns, span, still)
        # The first frame comes at once, without what takes long.
        if behind is not None and behind != path and frame.has_history and frame.curves:
            curves = self._readers[behind].curves_behind(columns, frame.curves["loss"].span, still)
            frame = replace(frame, behind=curves, behind_path=behind)
        return replace(frame, runs=self._rows(still)) if is_listing else frame

    def _rows(self, still: bool) -> list[tuple[Path, float, Sequence[str]]]:
        rows = []
        for path in dict.fromkeys([*self.paths, *run_folders(self.paths[0].parent)]):
            # One that cannot be read is left out.
            with contextlib.suppress(errors.ConfigError):
                self._readers[path] = self._readers.get(path) or _RunReader(path)
                run = self._readers[path].refreshed(still)
                rows.append((path, run.heard or 0.0, run_cells(run)))
        return sorted(rows, key=lambda row: row[1], reverse=True)


class _RunReader:
    """Reader of frames of one run.

    The first frame comes from the ends of the run's files, so that the screen is there at once; the later ones have the
    curves of all steps.
    """

    def __init__(self, path: Path | None) -> None:
        self._run = open_run(path, all_steps=False)
        self.path = self._run.path.resolve()
        self._has_history = False
        self._frame: Frame | None = None

    def read(self, columns: int, span: Span, still: bool) -> Frame:
        """Read the run, as `FrameReader.read` says."""
        if still and self._frame is not None and self._has_history:
            return replace(self._frame, curves=_curves(self._run, columns, span))
        if self._frame is not None and not self._has_history:
            self._read_history()
        try:
            if not self._run.directory.holds_run:
                return self._old(f"the run's folder {self._run.path} is gone")
            self._run.refresh()
            frame = make_frame(self._run, columns, span, has_history=self._has_history)
            lines = last_raw_lines(self._run.directory.log(0), _LOG_BYTES)
            self._frame = replace(frame, log=[line.decode(errors="replace") for line in lines])
        except OSError as error:
            return self._old(f"{self._run.path} cannot be read: {files.reason_of(error)}")
        except UNEXPECTED as error:
            return self._old(f"{self._run.path} has a file that is not as expected ({type(error).__name__}: {error})")
        return self._frame

    def curves_behind(self, columns: int, span: tuple[int, int], still: bool) -> dict[str, StepCurve]:
        """Read the curves of the run over a span of another run's steps."""
        if not self._has_history:
            self._read_history()
        return _curves(self.refreshed(still), columns, span)

    def refreshed(self, still: bool) -> RunView:
        if not still:
            self._run.refresh()
        return self._run

    def _read_history(self) -> None:
        # An error is shown by `read`, which meets the same one.
        with contextlib.suppress(errors.ShardwiseError, OSError, *UNEXPECTED):
            self._run = open_run(self._run.path, all_steps=True)
            self._has_history = True

    def _old(self, problem: str) -> Frame:
        old = self._frame or Frame(self._run.path, self._run.name, time.time())
        return replace(old, now=time.time(), problem=redaction.redacted(problem))


def make_frame(run: RunView, columns: int = 0, span: Span = "whole", *, has_history: bool = False) -> Frame:
    """Make the frame of a run for the screen, as it is now."""
    ranks = run.ranks()
    return Frame(
        now=time.time(),
        **{name: getattr(run, name) for name in _RUN_FACTS},
        evaluation=run.evaluations[-1] if run.evaluations else {},
        split=run.split_seconds(),
        graphs=run.graphs(),
        curves=_curves(run, columns, span),
        ranks=ranks,
        nodes=run.nodes(ranks),
        pipeline=pipeline_views(ranks),
        silent=silent_ranks(ranks, run.step_seconds),
        events=run.all_events(),
        # A copy: the run goes on counting in another thread.
        lost=copy.deepcopy(run.lost),
        has_history=has_history,
    )


def _curves(run: RunView, columns: int, span: Span | tuple[int, int]) -> dict[str, StepCurve]:
    """Cut each metric into `columns`, over a part of the run or the steps of a span; the loss has dots: evaluations."""
    series = run.series
    if not columns or not series.steps:
        return dict.fromkeys(SCREEN_CURVES, StepCurve(())) if columns else {}
    if isinstance(span, str):
        last = series.steps[-1]
        span = max(series.steps[0], last - (last - series.steps[0]) // _PART[span]), last
    first, last = span
    ranges = ranges_of_equal_widths(series.steps, span, columns)
    dots = [
        (event["step"], number(event.get("loss")))
        for event in run.evaluations
        if isinstance(event["step"], int) and first <= event["step"] <= last
    ]
    return {
        name: StepCurve(
            reduce_to_columns(series.steps, series.numbers[name], ranges), dots if name == "loss" else (), span=span
        )
        for name in SCREEN_CURVES
    }
