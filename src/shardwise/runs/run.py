"""What a run's folder tells of a run: its curve, its ranks, its events, and where its time went.

Every number that `ls`, `top`, `monitor` and `report` show is derived here, from the files that `runlog` describes. A
field that an older run did not record is None.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from shardwise.base.errors import ConfigError
from shardwise.base.files import reason_of
from shardwise.base.parsing import read_mapping
from shardwise.base.redaction import without_secrets
from shardwise.base.run_records import count_of, read_record
from shardwise.runs.folder import FORMAT, RUNS, RunDirectory, RunLock, last_that_counts
from shardwise.runs.json_lines import Growing, Series, last, last_of_rank
from shardwise.runs.lost_time import LostTime, number, seconds_of

State = Literal["starting", "running", "silent", "finished", "stopped", "failed", "killed"]
"""`silent`: it should run, and has written nothing for long. `killed`: it ended, and nothing says why."""
STATES: tuple[State, ...] = get_args(State)

_ENDINGS: dict[str, State] = {"finished": "finished", "failed": "failed"}
_SILENT_STEPS, _SILENT_RECORDS = 20, 3
_SILENT_SECONDS, _SILENT_AT_THE_START = 60.0, 600.0
_RECENT_STEPS = 20


@dataclass(frozen=True)
class RankView:
    """What the last line of a rank's file tells.

    Attributes:
        pid: of its process, on its host.
        place: its rank along each axis of the mesh: `pp`, `dp`, `tp`.
        work_seconds: of its own work in the step, without waiting for other ranks.
        relative: `work_seconds` over the least of its pipeline stage; None where ranks recorded none.
        heard: when it wrote last, in seconds since the epoch.
        last: the whole line.
    """

    rank: int
    host: str
    pid: int | None
    device: str
    place: Mapping[str, int]
    step: int | None
    work_seconds: float | None
    relative: float | None
    memory_bytes: int | None
    utilization: float | None
    heard: float
    last: Mapping[str, Any]


@dataclass(frozen=True)
class NodeView:
    """A machine of the run: what the first of its ranks recorded of it."""

    host: str
    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    cpu: float | None
    cores: int | None
    memory_bytes: int | None
    memory_total_bytes: int | None


class Run:
    """A run, as its folder tells it. `refresh` reads what was added since.

    Args:
        whole: read all steps. Otherwise only the last ones are there: that takes little time for a run of any length.

    Attributes:
        id: of the run; None of one that has none.
        config, environment, results: the files of these names; {} where one is not there or damaged.
        problems: of files that cannot be read or are damaged, a sentence each; what they would tell is missing.
        series: its steps.
        evaluations, events: in their order; `events` are all others than steps and evaluations.
        last: the last "step" event as it was recorded; {} without one.
        before_starts: for each start, when the last step before it was recorded, in seconds since the epoch; NaN where
            that is unknown.
        lost: where its time went.
    """

    def __init__(self, path: Path, *, whole: bool) -> None:
        self.path, self.directory = path, RunDirectory(path)
        self._metrics = Growing(self.directory.metrics, whole=whole)
        self._files: dict[Path, tuple[int, dict[str, Any]]] = {}
        self._problems: dict[Path, str] = {}
        self._ranks: dict[int, tuple[float, RankView]] = {}
        self._starts: dict[int, dict[str, Any]] = {}
        self._clear()
        try:
            self._read()
        except OSError as error:
            unread = error.filename or path
            raise ConfigError(f"RUN ({path}) must be readable: {unread} cannot be read: {reason_of(error)}") from None
        identity = self._file(self.directory.identity, read_record)
        self.id: str | None = identity.get("id")
        if (identity.get("format") or 0) > FORMAT:
            raise ConfigError(
                f"RUN ({path}) must have a format that this shardwise reads, a newer one wrote it: update shardwise"
            )

    def refresh(self) -> bool:
        """Read what was added; returns whether anything was. While the files cannot be read, nothing is new."""
        try:
            return self._read()
        except OSError:  # as while a network disk is away for a moment: `heard` tells how old everything is
            return False

    def _clear(self) -> None:
        self.series = Series()
        self.evaluations: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}
        self.before_starts: list[float] = []
        self.lost = LostTime()
        self._recent = 0
        self._trains = False

    def _read(self) -> bool:
        self.config = self._file(self.directory.config, read_mapping)
        self.environment = self._file(self.directory.environment, read_record)
        self.results = self._file(self.directory.results, read_record)
        if is_new := self._metrics.was_replaced():
            self._clear()
        for event in self._metrics.new():
            self._take(event)
            is_new = True
        return is_new

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def problems(self) -> list[str]:
        return list(self._problems.values())

    def section(self, name: str) -> Mapping[str, Any]:
        """The keys of a section of the configuration; {} where it is missing or no section."""
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}

    @property
    def state(self) -> State:
        if self.reason and not self._goes_on():
            return _ENDINGS.get(self.reason.partition(":")[0], "stopped")
        if not self._is_alive():
            return "finished" if self.results else "killed"
        if self._is_silent():
            return "silent"
        return "running" if self._trains else "starting"

    @property
    def reason(self) -> str:
        """Why it ended, as it was recorded; empty where nothing says so."""
        ending = self.events[-1] if self.events else {}
        return str(ending.get("reason", "")) if ending.get("event") == "stop" else ""

    @property
    def start(self) -> dict[str, Any]:
        """The last "start" event; {} without one."""
        return next((event for event in reversed(self.events) if event.get("event") == "start"), {})

    @property
    def step(self) -> int:
        """Steps that are done."""
        resumed: dict[str, Any] = next((event for event in reversed(self.events) if event.get("event") == "resume"), {})
        recorded = self.series.steps[-1] if self.series.steps else 0
        return max(recorded, resumed.get("step") or 0)

    @property
    def steps(self) -> int | None:
        """Steps of the whole training."""
        return count_of(self.section("train").get("steps", self.start.get("steps")))

    @property
    def step_seconds(self) -> float | None:
        """The mean of the last 20 recorded steps since the last start."""
        seconds = self.series.numbers["step_seconds"]
        recent = [
            value for value in seconds[max(self._recent, len(seconds) - _RECENT_STEPS) :] if not math.isnan(value)
        ]
        return sum(recent) / len(recent) if recent else None

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the last step, if it goes on as in its last steps; None of a run that does not run."""
        if self.step_seconds is None or self.steps is None or self.state not in ("running", "starting"):
            return None
        return max(0, self.steps - self.step) * self.step_seconds

    @property
    def heard(self) -> float | None:
        """When the run last wrote to its folder, in seconds since the epoch."""
        times = (_changed(path) for path in (self.directory.metrics, self.directory.log(0)))
        return max((time for time in times if time is not None), default=None)

    @property
    def goodput(self) -> float | None:
        """The share of the run's time in which steps were taken that count."""
        return self.lost.goodput

    def restarts(self) -> list[dict[str, Any]]:
        """How each start of a submitted job ended (`restarts.jsonl`)."""
        try:
            return [without_secrets(line) for line in last(self.path / "restarts.jsonl", 1 << 20)]
        except OSError:
            return []

    def ranks(self) -> list[RankView]:
        """The ranks that have a file, by the last line of each; without those that the last start has no more."""
        for path in (self.path / "ranks").glob("rank-*.jsonl"):
            if path.stem[5:].isdecimal():
                self._read_rank(int(path.stem[5:]), path)
        count = number(self.start.get("ranks"), math.inf)
        views = [view for rank, (_, view) in sorted(self._ranks.items()) if rank < count]
        best: dict[int | None, float] = {}  # by pipeline stage, as stages do unequal work
        for view in views:
            if view.work_seconds:
                stage = view.place.get("pp")
                best[stage] = min(view.work_seconds, best.get(stage, math.inf))
        return [_relative(view, best.get(view.place.get("pp"))) for view in views]

    def nodes(self, ranks: Sequence[RankView]) -> list[NodeView]:
        """The machines of `ranks`."""
        hosts: dict[str, list[RankView]] = {}
        for view in ranks:
            hosts.setdefault(view.host, []).append(view)
        return [_node(host, views, self._starts) for host, views in hosts.items()]

    def _take(self, event: dict[str, Any]) -> None:
        self.lost.add(event)
        kind = event.get("event")
        if kind in ("step", "eval") and event.get("step") is None:
            return
        if kind == "step":
            self.series.add(event)
            self.last, self._trains = event, True
        elif kind == "eval":
            self.evaluations.append(event)
        elif kind is not None:
            self.events.append(without_secrets(event))  # a library's text, or another program's, may hold one
            self._trains = self._trains and kind not in ("start", "stop")
            if kind == "start":
                self._recent = len(self.series.steps)
                self.before_starts.append(seconds_of(self.last))
            if kind == "resume" and (kept := last_that_counts(event)) is not None:
                self.series.undo_after(kept)
                self._recent = min(self._recent, len(self.series.steps))
                self.evaluations = [one for one in self.evaluations if number(one.get("step"), 0.0) <= event["step"]]

    def _goes_on(self) -> bool:
        """Whether the run was started again after its last event, which told its end."""
        holder = RunLock.holder(self.path) or {}
        return seconds_of({"time": holder.get("started")}) > seconds_of(self.events[-1]) and RunLock.is_held(self.path)

    def _is_alive(self) -> bool:
        """Whether its process runs, here or on another host."""
        if RunLock.is_held(self.path):
            return True
        # Some file systems keep locks within a host, so that those of another one are not seen.
        holder = RunLock.holder(self.path)
        return holder is not None and holder["host"] != platform.node() and not self._is_silent()

    def _is_silent(self) -> bool:
        """Whether it has written nothing for long: as it starts, it may compile, or prepare data."""
        every = count_of(self.section("log").get("every")) or 1  # steps to a record
        steps = max(_SILENT_STEPS, _SILENT_RECORDS * every) * (self.step_seconds or 0.0)
        patience = max(_SILENT_SECONDS if self._trains else _SILENT_AT_THE_START, steps)
        return self.heard is not None and time.time() - self.heard > patience

    def _read_rank(self, rank: int, path: Path) -> None:
        changed = _changed(path)
        if changed is None or (rank in self._ranks and self._ranks[rank][0] == changed):
            return
        known = self._starts.get(rank)
        began = seconds_of(self.start) - number(self.start.get("seconds_before_training"), 0.0)
        # A start that is known may be an earlier one: the rank may have moved to another machine since.
        is_known = known is not None and not seconds_of(known) < began
        try:
            start, step = last_of_rank(path, start=not is_known, after=began if self.lost.starts > 1 else None)
        except OSError:
            return
        if start:
            self._starts[rank] = start
        self._ranks[rank] = (changed, _rank(rank, self._starts.setdefault(rank, {}), step, changed))

    def _file(self, path: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """The mapping in a file that is replaced as a whole; {} where it is not there, damaged or cannot be read."""
        known, changed = self._files.get(path, (0, {})), 0
        problem: str | None = None
        try:
            changed = path.stat().st_mtime_ns
            if known[0] != changed:
                known = changed, read(path)
            else:
                problem = self._problems.get(path)
        except FileNotFoundError:
            known = 0, {}
        except OSError as error:
            known, problem = (0, {}), f"{path} cannot be read: {reason_of(error)}"
        except ValueError as error:
            known, problem = (changed, {}), f"{path} is damaged: {error}"
        self._files[path] = known
        self._problems.pop(path, None)
        if problem is not None:
            self._problems[path] = problem
        return known[1]


def open_run(path: Path | None, *, whole: bool) -> Run:
    """The run in a folder; `path` None: the newest of `runs`.

    Raises:
        ConfigError: there is none, it cannot be read, or a newer shardwise wrote it.
    """
    chosen = path or RUNS / "latest"
    if RunDirectory(chosen).holds_run:
        return Run(chosen, whole=whole)
    what = "is not there" if not chosen.exists() else "holds no run" if chosen.is_dir() else "is a file"
    if path is None:
        raise ConfigError(f"RUN must be named where {chosen} {what}: `shardwise ls` lists the runs of {RUNS}/")
    raise ConfigError(f"RUN ({chosen}) must be the folder of a run, it {what}: `shardwise ls` lists those of {RUNS}/")


def folders(root: Path = RUNS) -> list[Path]:
    """The folders of the runs in a folder, in the order of their names; those that cannot be read are among them.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        found = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(f"{error.filename or root} must be readable: {reason_of(error)}") from None
    return [path for path in found if _may_hold_run(path)]


def _may_hold_run(path: Path) -> bool:
    try:
        return RunDirectory(path).holds_run
    except ConfigError:
        return True


@dataclass(frozen=True)
class Unreadable:
    """A run whose folder cannot be read, or which a newer shardwise wrote; `reason` is a sentence."""

    path: Path
    reason: str
    heard: float | None

    @property
    def name(self) -> str:
        return name_of(self.path)


def runs(root: Path = RUNS) -> list[Run | Unreadable]:
    """The runs in a folder, the one that wrote last first.

    Raises:
        ConfigError: the folder cannot be read.
    """
    found: list[Run | Unreadable] = []
    for path in folders(root):
        try:
            found.append(Run(path, whole=False))
        except ConfigError as error:
            found.append(Unreadable(path, str(error), _changed(path / "metrics.jsonl")))
    return sorted(found, key=lambda run: run.heard or 0.0, reverse=True)


def name_of(path: Path) -> str:
    """The name of a run, which its folder has; of a link, that of the folder to which it leads."""
    try:
        return path.resolve().name
    except (OSError, RuntimeError):  # a link in a circle
        return path.name


def _rank(rank: int, start: Mapping[str, Any], line: Mapping[str, Any], heard: float) -> RankView:
    return RankView(
        rank=rank,
        host=start.get("host") or "",
        pid=start.get("pid"),
        device=start.get("device") or "",
        place=start.get("place") or {},
        step=line.get("step"),
        work_seconds=line.get("work_seconds"),
        relative=None,
        memory_bytes=line.get("memory_in_use_bytes", line.get("peak_memory_bytes")),
        utilization=line.get("device_utilization"),
        heard=heard,
        last=line,
    )


def _relative(view: RankView, best: float | None) -> RankView:
    return replace(view, relative=view.work_seconds / best) if view.work_seconds and best else view


def _node(host: str, views: Sequence[RankView], starts: Mapping[int, Mapping[str, Any]]) -> NodeView:
    told = next((view.last for view in views if "host_cpu" in view.last), {})
    start = next((starts[view.rank] for view in views if starts.get(view.rank)), {})
    return NodeView(
        host=host,
        ranks=tuple(view.rank for view in views),
        devices=tuple(view.device for view in views),
        cpu=told.get("host_cpu"),
        cores=start.get("cores"),
        memory_bytes=told.get("host_memory_bytes"),
        memory_total_bytes=start.get("memory_total_bytes"),
    )


def _changed(path: Path) -> float | None:
    """When a file was changed, in seconds since the epoch; None where it is not there, or cannot be seen."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
