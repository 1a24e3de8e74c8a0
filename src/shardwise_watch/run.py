"""A run as its readers see it: its steps, its ranks, its events and its lost time, read from its folder.

Every number that `ls`, `top`, `monitor` and `report` show is derived here, from the files that `folder.py` describes. A
field that an older run did not record is None.
"""

from __future__ import annotations

import contextlib
import math
import platform
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import psutil

from shardwise.base import files, redaction, yaml_and_json
from shardwise.base.errors import ConfigError
from shardwise.base.local_devices import DeviceProcess, Owners
from shardwise.runs.events import NEXT_STAGE, last_event_line, number, seconds_of
from shardwise.runs.failure_record import failure_of
from shardwise.runs.folder import FORMAT, RUNS, RunDirectory, RunLock, last_kept_step
from shardwise.runs.json_records import read_record
from shardwise.runs.layout_spans import LayoutSpan, layout_spans, short_layout
from shardwise_watch.json_lines import GrowingFile, last_lines
from shardwise_watch.lost_time import LostTime
from shardwise_watch.rank_views import SILENT_SECONDS, SILENT_STEPS, NodeView, RankView, node_views, with_relative_work
from shardwise_watch.step_metrics import StepSeries, finite_values, mean_of_known

State = Literal["starting", "running", "silent", "finished", "stopped", "failed", "killed"]
"""`silent`: the run should go on, and has written nothing for long. `killed`: it ended, and nothing says why."""
STATES: tuple[State, ...] = get_args(State)

_ENDINGS: dict[str, State] = {"finished": "finished", "failed": "failed"}
_SILENT_RECORDS = 3  # records that may fail to come with a large `log.every`, before a run is silent
_SILENT_AT_THE_START = 600.0  # seconds before the first step: a run that starts may compile graphs, or prepare data
_RECENT_STEPS = 20  # recorded steps over which the pace of a run is taken
_RESTARTS_BYTES = 1 << 20  # bytes of restarts.jsonl that are read: thousands of starts
_LAST_SECOND = 1e11  # in the year 5138: a later time is none
_RANK_BYTES = 1 << 15  # bytes of a rank's file that are read: much more than its last twenty lines have
_START_SECONDS = 600.0  # seconds after the run's "start" event within which each rank records its own


class _WholeFile(NamedTuple):
    """A file that is replaced as a whole, as it was read last.

    `changed`: time of its last change, in ns; 0 for one that must be read again. `problem`: sentence on a file that is
    damaged or cannot be read.
    """

    changed: int = 0
    content: Mapping[str, Any] = {}
    problem: str = ""


class RunView:
    """A run, as its folder shows it. `refresh` reads the lines that were added since.

    Args:
        all_steps: True to read all steps. Otherwise only the last ones are there, which takes little time for any run.

    Attributes:
        id: id of the run; None if it has none.
        config, environment, results, branch: contents of the files of these names; {} for one that is missing or
            damaged.
        failure: failure with which the run ended, as its launcher recorded it; None without one.
        series: steps of the run.
        evaluations: "eval" events in their order.
        set_evaluations, task_evaluations: "eval_set" and "eval_task" events in their order, which `events` has too.
        events: all events but steps and evaluations, in their order.
        last: last "step" event as it was recorded; {} without one.
        before_starts: time at which the last step before each start was recorded, in seconds since the epoch; NaN if
            it is unknown.
        memory_by_layout: memory of rank 0 in the last step at each layout, by kind, in the order of the layouts.
        lost: lost time of the run.
    """

    def __init__(self, path: Path, *, all_steps: bool) -> None:
        self.path = path
        self.directory = RunDirectory(path)
        self._metrics = GrowingFile(self.directory.metrics, all_steps=all_steps)
        self._files: dict[Path, _WholeFile] = {}
        # Modification time of each rank's file, and the view that was made of it.
        self._ranks: dict[int, tuple[float, RankView]] = {}
        self._starts: dict[int, dict[str, Any]] = {}
        self._clear()
        try:
            self._read()
        except OSError as error:
            unread = error.filename or path
            raise ConfigError(
                f"RUN ({path}) must be readable: {unread} cannot be read: {files.reason_of(error)}"
            ) from None
        identity = self._file(self.directory.identity, read_record)
        self.id: str | None = identity.get("id")
        if (identity.get("format") or 0) > FORMAT:
            raise ConfigError(
                f"RUN ({path}) must have a format that this shardwise reads, a newer one wrote it: update shardwise"
            )

    def refresh(self) -> bool:
        """Read the added lines; returns True if there were any. While the files cannot be read, nothing is new."""
        try:
            return self._read()
        except OSError:
            # A network disk may be away for a moment: `heard` tells how old everything is.
            return False

    def _clear(self) -> None:
        self.series = StepSeries()
        self.evaluations: list[dict[str, Any]] = []
        self.set_evaluations: list[dict[str, Any]] = []
        self.task_evaluations: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}
        self.before_starts: list[float] = []
        self.memory_by_layout: dict[str, Mapping[str, Any]] = {}
        self._layout = ""
        self.lost = LostTime()
        # Position in `series` of the first step since the last start.
        self._first_recent = 0
        self._trains = False

    def _read(self) -> bool:
        self.config = self._file(self.directory.config, yaml_and_json.read_mapping)
        self.environment = self._file(self.directory.environment, read_record)
        self.results = self._file(self.directory.results, read_record)
        self.branch = self._file(self.directory.branch, read_record)
        failure = self._file(self.directory.failure, read_record)
        is_new = self._metrics.was_replaced()
        if is_new:
            self._clear()
        for event in self._metrics.new():
            self._take(event)
            is_new = True
        self.failure = failure_of(failure, self.start)
        return is_new

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def problems(self) -> list[str]:
        """A sentence for each file that is damaged or cannot be read; its facts are missing."""
        return [file.problem for file in self._files.values() if file.problem]

    def section(self, name: str) -> Mapping[str, Any]:
        """Return the keys of a section of the configuration; {} if it is missing or no section."""
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}

    @property
    def state(self) -> State:
        # The recorded end comes first: the process that recorded it may hold the lock for a moment longer.
        if self.reason and not (self._is_again() and RunLock.is_held(self.path)):
            return _ENDINGS.get(self.reason.partition(":")[0], "stopped")
        if not self._is_alive():
            return "finished" if self.results else "killed"
        if self._is_again():
            return "starting"
        if self._is_silent():
            return "silent"
        return "running" if self._trains else "starting"

    @property
    def restart(self) -> str:
        """Words for a later start that is under way, such as `restarting (start 2)`; empty in another state."""
        number = self.lost.starts + (bool(self.reason) or self._is_again())
        return f"restarting (start {number})" if number > 1 and self.state == "starting" else ""

    @property
    def reason(self) -> str:
        """Recorded reason of the end; empty for a run that goes on, also with its next stage."""
        # Rank 0 records what it met itself, which may follow from the failure of another rank, or nothing.
        if self.failure is not None:
            return f"failed: {self.failure.cause}"
        last_event = self.events[-1] if self.events else {}
        reason = str(last_event.get("reason", "")) if last_event.get("event") == "stop" else ""
        return "" if reason == NEXT_STAGE else reason

    @property
    def start(self) -> dict[str, Any]:
        """Last "start" event; {} without one."""
        return self._last_event("start")

    @property
    def layouts(self) -> list[LayoutSpan]:
        """Layouts of the steps that count, in their order; [] if a start has not recorded its layout."""
        return layout_spans(self.events)

    @property
    def step(self) -> int:
        """Number of steps that are done."""
        recorded = self.series.steps[-1] if self.series.steps else 0
        # A run that has just resumed has no step of its own, and is at that of the checkpoint.
        return max(recorded, self._last_event("resume").get("step") or 0)

    @property
    def steps(self) -> int | None:
        """Number of steps of the whole training."""
        return yaml_and_json.count_of(self.section("train").get("steps", self.start.get("steps")))

    @property
    def step_seconds(self) -> float | None:
        """Mean of `recent_step_seconds`."""
        return mean_of_known(self.recent_step_seconds)

    @property
    def recent_step_seconds(self) -> Sequence[float]:
        """Seconds of the last 20 recorded steps since the last start."""
        seconds = self.series.numbers["step_seconds"]
        # Steps of an earlier start may be of other devices, or of another layout.
        begin = max(self._first_recent, len(seconds) - _RECENT_STEPS)
        return finite_values(seconds[begin:])

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the last step, if it goes on as in its last steps; None of a run that does not run."""
        if self.step_seconds is None or self.steps is None or self.state not in ("running", "starting"):
            return None
        return max(0, self.steps - self.step) * self.step_seconds

    @property
    def heard(self) -> float | None:
        """Time at which the run last wrote to its folder, in seconds since the epoch."""
        times = (_modification_time(path) for path in (self.directory.metrics, self.directory.log(0)))
        return max((seconds for seconds in times if seconds is not None), default=None)

    @property
    def goodput(self) -> float | None:
        return self.lost.goodput

    def ends(self) -> list[dict[str, Any]]:
        """Return an "ended" event for each start of a submitted job that is over (`restarts.jsonl`)."""
        try:
            lines = [*last_lines(self.path / "restarts.jsonl", _RESTARTS_BYTES)]
        except OSError:
            return []
        ends = []
        for line in reversed(lines):
            seconds = number(line.get("began")) + number(line.get("seconds"))
            is_timed = 0 <= seconds <= _LAST_SECOND
            time = {"time": datetime.fromtimestamp(seconds, UTC).isoformat()} if is_timed else {}
            ends.append({"event": "ended", **time, **redaction.without_secrets(line)})
        return ends

    def all_events(self) -> list[dict[str, Any]]:
        """Return the events and the ends of the job's starts, in the order of time."""
        events = [*self.events]
        if ends := self.ends():
            events = sorted([*events, *ends], key=lambda event: str(event.get("time", "")))
        return events

    def ranks(self) -> list[RankView]:
        """Return a view of each rank that has a file."""
        for path in (self.path / "ranks").glob("rank-*.jsonl"):
            rank = path.stem.removeprefix("rank-")
            if rank.isdecimal():
                self._read_rank(int(rank), path)
        # A run may go on with fewer ranks than before; the files of the others stay.
        count = number(self.start.get("ranks"), math.inf)
        return with_relative_work([view for rank, (_, view) in sorted(self._ranks.items()) if rank < count])

    def nodes(self, ranks: Sequence[RankView]) -> list[NodeView]:
        """Return the machines of `ranks`."""
        return node_views(ranks, self._starts)

    def split_seconds(self) -> dict[str, float]:
        """Return the mean of the last 20 recorded steps by `PARTS`; {} if none recorded them."""
        return self.series.mean_parts(-_RECENT_STEPS)

    def graphs(self) -> dict[str, float]:
        """Sum up the compiled graphs since the last start: `graphs`, `hits`, `misses`, `seconds`; {} without any."""
        begin = max((index for index, event in enumerate(self.events) if event.get("event") == "start"), default=0)
        compilations = [event for event in self.events[begin:] if event.get("event") == "compile"]
        if not compilations:
            return {}
        names = ("graphs", "hits", "misses", "seconds")
        return {name: sum(number(event.get(name), 0.0) for event in compilations) for name in names}

    def _last_event(self, kind: str) -> dict[str, Any]:
        return next((event for event in reversed(self.events) if event.get("event") == kind), {})

    def _take(self, event: dict[str, Any]) -> None:
        self.lost.add(event)
        kind = event.get("event")
        if kind in ("step", "eval", "eval_set", "eval_task") and event.get("step") is None:
            return
        if kind == "step":
            self.series.add(event)
            self.last = event
            self._trains = True
            if isinstance(event.get("memory_bytes"), dict):
                self.memory_by_layout[self._layout] = event["memory_bytes"]
        elif kind == "eval":
            self.evaluations.append(event)
        elif kind is not None:
            # The text of a library, or of another program, may hold a secret.
            event = redaction.without_secrets(event)
            self.events.append(event)
            if kind == "eval_set":
                self.set_evaluations.append(event)
            if kind == "eval_task":
                self.task_evaluations.append(event)
            self._trains = self._trains and kind not in ("start", "stop")
            if kind == "start":
                self._first_recent = len(self.series.steps)
                self.before_starts.append(seconds_of(self.last))
                self.series.began = seconds_of(event)
                layout = event.get("layout")
                self._layout = short_layout(layout) if isinstance(layout, dict) else ""
            if kind == "resume":
                self._undo(event)

    def _undo(self, resume: dict[str, Any]) -> None:
        """Forget the steps and evaluations that come after the checkpoint of a "resume" event."""
        kept = last_kept_step(resume)
        if kept is None:
            return
        self.series.undo_after(kept)
        self._first_recent = min(self._first_recent, len(self.series.steps))
        for evaluations in (self.evaluations, self.set_evaluations, self.task_evaluations):
            evaluations[:] = [event for event in evaluations if number(event.get("step"), 0.0) <= kept]

    def _is_again(self) -> bool:
        """True if the run is started again after all that it has recorded, while its lock is held.

        A process takes the lock long before its ranks record their "start" event. The supervisor of a job keeps it: it
        has recorded how its last start ended, and records a failure of the run where it does not start it again.
        """
        recorded = self.last if self._trains else (self.events or [{}])[-1]
        last = seconds_of(recorded if self.failure is None else asdict(self.failure))
        is_new = seconds_of({"time": (RunLock.holder(self.path) or {}).get("started")}) > last
        if not is_new and self.failure is None and (not self.reason or self.reason.startswith("failed")):
            is_new = seconds_of((self.ends() or [{}])[-1]) >= last
        return is_new

    def _is_alive(self) -> bool:
        if RunLock.is_held(self.path):
            return True
        # Some file systems keep locks within a host: those of another host are not seen, and its writing must do.
        holder = RunLock.holder(self.path)
        return holder is not None and holder["host"] != platform.node() and not self._is_silent()

    def _is_silent(self) -> bool:
        steps_of_a_record = yaml_and_json.count_of(self.section("log").get("every")) or 1
        steps = max(SILENT_STEPS, _SILENT_RECORDS * steps_of_a_record)
        least_seconds = SILENT_SECONDS if self._trains else _SILENT_AT_THE_START
        patience = max(least_seconds, steps * (self.step_seconds or 0.0))
        return self.heard is not None and time.time() - self.heard > patience

    def _read_rank(self, rank: int, path: Path) -> None:
        changed = _modification_time(path)
        if changed is None or (rank in self._ranks and self._ranks[rank][0] == changed):
            return
        began = seconds_of(self.start) - number(self.start.get("seconds_before_training"), 0.0)
        start = self._starts.get(rank)
        # A start that is known may be an earlier one: the rank may have moved to another machine since.
        if start is None or seconds_of(start) < began:
            # The files are in the order of time, and may have gigabytes: most of the later lines need not be searched.
            until = seconds_of(self.start) + _START_SECONDS
            start = last_event_line(path, "start", until=until) or last_event_line(path, "start") or start or {}
            if start:
                self._starts[rank] = start
        steps: list[dict[str, Any]] = []
        try:
            for line in last_lines(path, _RANK_BYTES):
                if "step" in line:
                    steps.append(line)
                # The steps of one process alone are compared.
                if len(steps) == _RECENT_STEPS or (steps and line.get("event") == "start"):
                    break
        except OSError:
            return
        self._ranks[rank] = (changed, RankView.from_lines(rank, start, steps, changed))

    def _file(self, path: Path, read: Callable[[Path], dict[str, Any]]) -> Mapping[str, Any]:
        """Return the mapping in a file that is replaced as a whole; {} if it is missing, damaged or unreadable.

        A file is read again only after it has changed; a damaged one is told of until then.
        """
        known = self._files.get(path, _WholeFile())
        changed = 0
        try:
            changed = path.stat().st_mtime_ns
            if known.changed != changed:
                known = _WholeFile(changed, read(path))
        except FileNotFoundError:
            known = _WholeFile()
        except OSError as error:
            known = _WholeFile(problem=f"{path} cannot be read: {files.reason_of(error)}")
        except ValueError as error:
            known = _WholeFile(changed, problem=f"{path} is damaged: {error}")
        self._files[path] = known
        return known.content


def open_run(path: Path | None, *, all_steps: bool) -> RunView:
    """Open the run in a folder to watch it; without a `path` the newest one of `runs`.

    ConfigError: the folder holds no run, it cannot be read, or a newer shardwise wrote it.
    """
    chosen = path or RUNS / "latest"
    if RunDirectory(chosen).holds_run:
        return RunView(chosen, all_steps=all_steps)
    problem = "is not there"
    if chosen.exists():
        problem = "holds no run" if chosen.is_dir() else "is a file"
    if path is not None and (waiting := unsubmitted_job(chosen)):
        raise ConfigError(waiting)
    if path is None:
        raise ConfigError(f"no run found: {chosen} {problem}; start a run, or name its folder")
    raise ConfigError(
        f"RUN ({chosen}) must be the folder of a run, it {problem}: `shardwise ls` lists those of {RUNS}/"
    )


def unsubmitted_job(folder: Path) -> str | None:
    """Return how to submit the job whose files alone were written into a folder; None if it holds no such files."""
    script = folder / "job.sh"
    try:
        is_written = script.is_file() and (folder / "recipe.yaml").is_file()
        if not is_written or (folder / "jobs.jsonl").exists() or RunDirectory(folder).holds_run:
            return None
    except (ConfigError, OSError):  # another user's folder
        return None
    return f"{folder} holds a job that was not submitted: submit it by `sbatch {shlex.quote(str(script))}`"


def run_folders(root: Path = RUNS) -> list[Path]:
    """Return the folders of the runs to watch in a folder, in the order of their names; unreadable ones are among them.

    ConfigError: `root` cannot be read.
    """
    try:
        paths = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(f"{error.filename or root} must be readable: {files.reason_of(error)}") from None
    return [path for path in paths if _may_hold_run(path)]


def _may_hold_run(path: Path) -> bool:
    """Return whether a folder is that of a run, or cannot be read and so might be."""
    try:
        return RunDirectory(path).holds_run
    except ConfigError:
        return True


@dataclass(frozen=True)
class UnreadableRun:
    """A run whose folder cannot be read, or which a newer shardwise wrote; `reason` is a sentence."""

    path: Path
    reason: str
    heard: float | None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def problems(self) -> list[str]:
        return [self.reason]


def runs_at(folder: str) -> list[RunView | UnreadableRun]:
    """Read the runs in a folder to list them, the one that wrote last first; of a run's own folder, that run.

    ConfigError: the folder cannot be read, or there is none; the default one may be missing.
    """
    root = Path(folder)
    if root != RUNS and not root.is_dir():
        raise ConfigError(f"DIR ({folder}) must be a folder of runs, or a run's folder: there is no such folder")
    paths = [root] if _may_hold_run(root) else run_folders(root)
    return sorted(map(_run_at, paths), key=lambda run: run.heard or 0.0, reverse=True)


def _run_at(path: Path) -> RunView | UnreadableRun:
    try:
        return RunView(path, all_steps=False)
    except ConfigError as error:
        return UnreadableRun(path, str(error), _modification_time(path / "metrics.jsonl"))


def branches_of(run: RunView) -> list[RunView]:
    """Read the branches of a watched run whose folders lie beside its own, in the order of their first steps.

    ConfigError: one of them cannot be read.
    """
    branches = []
    for path in run_folders(run.path.resolve().parent):
        with contextlib.suppress(OSError, ValueError):
            if run.id is not None and read_record(RunDirectory(path).branch).get("id") == run.id:
                branches.append(RunView(path, all_steps=True))
    return sorted(branches, key=lambda branch: (branch.branch.get("step") or 0, branch.name))


def _modification_time(path: Path) -> float | None:
    """Return the time of the last change of a file, in seconds since the epoch; None if it cannot be seen."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def live_ranks_by_process(runs: Iterable[RunView]) -> Owners:
    """Return the ranks of the live runs that are watched on this machine, by their processes."""
    host = platform.node()
    ranks: Owners = {}
    for run in runs:
        # The system gives the number of a dead process to another one, so only runs that go on count.
        if run.state in ("starting", "running", "silent"):
            for view in run.ranks():
                if view.host == host and view.pid is not None and psutil.pid_exists(view.pid):
                    ranks[view.pid] = DeviceProcess(view.pid, run.name, view.rank)
    return ranks
