"""What a run's folder tells of a run: its curve, its ranks, its events, and where its time went.

Every number that `ls`, `top`, `monitor` and `report` show is derived here, from the files that `runlog` describes. A
field that an older run did not record is None.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from shardwise.errors import ConfigError
from shardwise.monitor.lines import Growing, events, last
from shardwise.monitor.lost import LostTime, number, seconds_of
from shardwise.runlog import RUNS, RunDirectory, RunLock

State = Literal["starting", "running", "silent", "finished", "stopped", "failed", "killed"]
"""`silent`: it should run, and has written nothing for long. `killed`: it ended, and nothing says why."""

NUMBERS = (
    "loss",
    "lr",
    "grad_norm",
    "param_norm",
    "tokens",
    "samples",
    "tokens_per_second",
    "samples_per_second",
    "tokens_per_second_per_device",
    "peak_tokens_per_second",
    "mfu",
    "step_seconds",
    "peak_memory_bytes",
    "bubble",
    "loss_spike",
)
"""Numbers of a step that the series of a run has; NaN where a step lacks one."""
PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "other")
"""Of a step's time (`split_seconds`), in the order in which they are shown."""
_SILENT_STEPS = 20.0
_SILENT_SECONDS = 60.0
_RANK_END = 1 << 13


@dataclass
class Series:
    """The steps of a run, those that were undone left out: by name one number for each step.

    Attributes:
        steps: their numbers, growing.
        seconds: when each was recorded, since the epoch; NaN where that is unknown.
        numbers: by name of `NUMBERS`.
        parts: by name of `PARTS`, seconds of the step.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    numbers: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in NUMBERS})
    parts: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in PARTS})

    def add(self, event: Mapping[str, Any]) -> None:
        self.undo_after(event["step"] - 1)
        self.steps.append(event["step"])
        self.seconds.append(seconds_of(event))
        for name, values in self.numbers.items():
            values.append(number(event.get(name)))
        split = event.get("split_seconds") or {}
        for name, values in self.parts.items():
            values.append(number(split.get(name)))

    def undo_after(self, step: int) -> None:
        """Forget the steps after `step`: the run went back to it."""
        keep = len(self.steps)
        while keep and self.steps[keep - 1] > step:
            keep -= 1
        if keep < len(self.steps):
            del self.steps[keep:]
            for values in (self.seconds, *self.numbers.values(), *self.parts.values()):
                del values[keep:]


@dataclass(frozen=True)
class RankView:
    """What the last line of a rank's file tells.

    Attributes:
        place: its rank along each axis of the mesh: `pp`, `dp`, `tp`.
        work_seconds: of its own work in the step, without waiting for other ranks.
        relative: `work_seconds` over that of the rank with the least; None where ranks recorded none.
        heard: when it wrote last, in seconds since the epoch.
        is_silent: it has written nothing for long, while others have.
        last: the whole line.
    """

    rank: int
    host: str
    device: str
    place: Mapping[str, int]
    step: int | None
    work_seconds: float | None
    relative: float | None
    memory_bytes: int | None
    utilization: float | None
    heard: float
    last: Mapping[str, Any]
    is_silent: bool = False


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


@dataclass(frozen=True)
class PipelineView:
    """The ranks of one pipeline rank: means over those that recorded a number, seconds of a step."""

    rank: int
    ranks: tuple[int, ...]
    work_seconds: float | None
    forward_seconds: float | None
    backward_seconds: float | None
    bubble: float | None


class Run:
    """A run, as its folder tells it. `refresh` reads what was added since.

    Args:
        whole: read all steps. Otherwise only the last ones are there: that takes little time for a run of any length.

    Attributes:
        config, environment, results: the files of these names; {} where one is not there or damaged.
        series: its steps.
        evaluations, events: in their order; `events` are all others than steps and evaluations.
        last: the last "step" event as it was recorded; {} without one.
        lost: where its time went.
    """

    def __init__(self, path: Path, *, whole: bool) -> None:
        self.path, self.directory = path, RunDirectory(path)
        self.series = Series()
        self.evaluations: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        self.results: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.lost = LostTime()
        self._changed: int | None = None
        self._metrics = Growing(self.directory.metrics) if whole else None
        self._ranks: dict[int, tuple[float, RankView]] = {}
        self._starts: dict[int, dict[str, Any]] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Read what was added; returns whether anything was."""
        self.config, self.environment = _yaml(self.directory.config), _json(self.directory.environment)
        self.results = _json(self.directory.results)
        count = 0
        for event in self._newest() if self._metrics is None else self._metrics.new():
            self._take(event)
            count += 1
        return count > 0

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def state(self) -> State:
        ending = self.events[-1] if self.events and self.events[-1].get("event") == "stop" else None
        reason = "" if ending is None else str(ending.get("reason", ""))
        if reason:
            return "failed" if reason.startswith("failed") else "finished" if reason == "finished" else "stopped"
        if not RunLock.is_held(self.path):
            return "killed" if self.events else "starting"
        heard = self.heard
        if heard is not None and time.time() - heard > max(_SILENT_SECONDS, _SILENT_STEPS * (self.step_seconds or 0.0)):
            return "silent"
        return "running" if self.last.get("time", "") >= self.start.get("time", "~") else "starting"

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
        return max(recorded, int(number(resumed.get("step"), 0.0)))

    @property
    def steps(self) -> int | None:
        """Steps of the whole training."""
        steps = self.config.get("train", {}).get("steps", self.start.get("steps"))
        return steps if isinstance(steps, int) else None

    @property
    def step_seconds(self) -> float | None:
        """The mean of the last 20 recorded steps."""
        recent = [value for value in self.series.numbers["step_seconds"][-20:] if not math.isnan(value)]
        return sum(recent) / len(recent) if recent else None

    @property
    def split_seconds(self) -> dict[str, float]:
        """The mean of the last 20 recorded steps by `PARTS`; {} where none recorded them."""
        parts = self.series.parts.items()
        recent = {name: [value for value in values[-20:] if not math.isnan(value)] for name, values in parts}
        return {name: sum(values) / len(values) for name, values in recent.items() if values}

    @property
    def graphs(self) -> dict[str, float]:
        """Compiled graphs since the last start: `graphs`, `hits`, `misses`, `seconds`; {} where none are known."""
        begun = max((at for at, event in enumerate(self.events) if event.get("event") == "start"), default=0)
        found = [event for event in self.events[begun:] if event.get("event") == "compile"]
        names = ("graphs", "hits", "misses", "seconds") if found else ()
        return {name: sum(number(event.get(name), 0.0) for event in found) for name in names}

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the last step, if it goes on as in its last steps; None of a run that does not run."""
        if self.step_seconds is None or self.steps is None or self.state not in ("running", "starting"):
            return None
        return max(0, self.steps - self.step) * self.step_seconds

    @property
    def heard(self) -> float | None:
        """When the run last wrote to its folder, in seconds since the epoch."""
        times = [path.stat().st_mtime for path in (self.directory.metrics, self.directory.log(0)) if path.exists()]
        return max(times, default=None)

    @property
    def goodput(self) -> float | None:
        """The share of the run's time in which steps were taken that count."""
        return self.lost.goodput

    def restarts(self) -> list[dict[str, Any]]:
        """How each start of a submitted job ended (`restarts.jsonl`)."""
        return last(self.path / "restarts.jsonl", 1 << 20)

    def ranks(self) -> list[RankView]:
        """All ranks that have a file, by the last line of each."""
        for path in sorted((self.path / "ranks").glob("rank-*.jsonl")):
            self._read_rank(int(path.stem[5:]), path)
        views = [view for _, view in self._ranks.values()]
        patience = max(_SILENT_SECONDS, _SILENT_STEPS * (self.step_seconds or 0.0))
        newest = max((view.heard for view in views), default=0.0)
        views = [replace(view, is_silent=True) if newest - view.heard > patience else view for view in views]
        work = [view.work_seconds for view in views if view.work_seconds]
        best = min(work, default=None)
        if best is None:
            return views
        return [_relative(view, best) for view in views]

    def nodes(self, ranks: Sequence[RankView]) -> list[NodeView]:
        """The machines of `ranks`."""
        hosts: dict[str, list[RankView]] = {}
        for view in ranks:
            hosts.setdefault(view.host, []).append(view)
        return [_node(host, views, self._starts) for host, views in hosts.items()]

    def pipeline(self, ranks: Sequence[RankView]) -> list[PipelineView]:
        """The pipeline ranks of `ranks`; [] where these do not tell their place."""
        by_rank: dict[int, list[RankView]] = {}
        for view in ranks:
            if "pp" in view.place:
                by_rank.setdefault(view.place["pp"], []).append(view)
        return [_pipeline_rank(rank, views) for rank, views in sorted(by_rank.items())]

    def _newest(self) -> list[dict[str, Any]]:
        """All events but steps, and the last steps, in their order; None of them where nothing has changed."""
        metrics = self.directory.metrics
        changed = metrics.stat().st_mtime_ns if metrics.exists() else 0
        if changed == self._changed:
            return []
        self._changed = changed
        self.series, self.lost, self.evaluations, self.events = Series(), LostTime(), [], []
        ends, others = last(metrics), events(metrics)
        steps = [event for event in ends if event.get("event") in ("step", "eval")]
        return sorted(others + steps, key=lambda event: event.get("time", ""))

    def _take(self, event: dict[str, Any]) -> None:
        self.lost.add(event)
        kind = event.get("event")
        if kind == "step" and isinstance(event.get("step"), int):
            self.series.add(event)
            self.last = event
        elif kind == "eval":
            self.evaluations.append(event)
        elif kind is not None:
            self.events.append(event)
            if kind == "resume" and isinstance(event.get("step"), int):
                self.series.undo_after(event["step"])
                self.evaluations = [one for one in self.evaluations if one.get("step", 0) <= event["step"]]

    def _read_rank(self, rank: int, path: Path) -> None:
        changed = path.stat().st_mtime
        if rank in self._ranks and self._ranks[rank][0] == changed:
            return
        lines = last(path, _RANK_END)
        starts = [line for line in lines if line.get("event") == "start"]
        if starts or rank not in self._starts:
            self._starts[rank] = starts[-1] if starts else _first_start(path)
        start, steps = self._starts[rank], [line for line in lines if "step" in line]
        self._ranks[rank] = (changed, _rank(rank, start, steps[-1] if steps else {}, changed))


def open_run(path: Path | None, *, whole: bool) -> Run:
    """The run in a folder; `path` None: the newest of `runs`.

    Raises:
        ConfigError: there is none.
    """
    chosen = path or RUNS / "latest"
    if not RunDirectory(chosen).holds_run:
        if path is None:
            raise ConfigError(f"there is no {chosen}: name the folder of a run")
        what = "is not there" if not chosen.exists() else "holds no run" if chosen.is_dir() else "is a file"
        raise ConfigError(
            f"RUN ({chosen}) must be the folder of a run, it {what}: `shardwise ls` lists those of {RUNS}/"
        )
    return Run(chosen, whole=whole)


def runs(root: Path = RUNS) -> list[Run]:
    """The runs in a folder, the one that wrote last first."""
    folders = [path for path in root.glob("*") if not path.is_symlink() and RunDirectory(path).holds_run]
    found = [Run(path, whole=False) for path in folders]
    return sorted(found, key=lambda run: run.heard or 0.0, reverse=True)


def _rank(rank: int, start: Mapping[str, Any], line: Mapping[str, Any], heard: float) -> RankView:
    work, used = line.get("work_seconds"), line.get("memory_in_use_bytes", line.get("peak_memory_bytes"))
    return RankView(
        rank=rank,
        host=str(start.get("host", "")),
        device=str(start.get("device", "")),
        place=start.get("place") or {},
        step=line.get("step"),
        work_seconds=work if isinstance(work, float | int) else None,
        relative=None,
        memory_bytes=used if isinstance(used, int) else None,
        utilization=line.get("device_utilization"),
        heard=heard,
        last=line,
    )


def _relative(view: RankView, best: float) -> RankView:
    return replace(view, relative=view.work_seconds / best) if view.work_seconds else view


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


def _pipeline_rank(rank: int, views: Sequence[RankView]) -> PipelineView:
    stages = [view.last["stage_seconds"] for view in views if view.last.get("stage_seconds")]
    return PipelineView(
        rank=rank,
        ranks=tuple(view.rank for view in views),
        work_seconds=_mean(view.work_seconds for view in views),
        forward_seconds=_mean(sum(stage["forward"] for stage in each) for each in stages),
        backward_seconds=_mean(sum(stage["backward"] for stage in each) for each in stages),
        bubble=_mean(view.last.get("bubble") for view in views),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _first_start(path: Path) -> dict[str, Any]:
    """The first line of a rank's file, where it is that of a start."""
    try:
        with path.open("rb") as file:
            line = json.loads(file.readline(1 << 12))
    except (OSError, ValueError):
        return {}
    return line if isinstance(line, dict) and line.get("event") == "start" else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _yaml(path: Path) -> dict[str, Any]:
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}
