"""The ranks, nodes and pipeline ranks of a run, as the last lines of the ranks' files show them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.runs.events import number
from shardwise_watch.step_metrics import mean_of_known

SILENT_SECONDS = 60.0
SILENT_STEPS = 20
"""A rank or a run is silent if it has written nothing for the longer of these two: a step may take minutes."""


@dataclass(frozen=True)
class RankView:
    """Facts of a rank, as those who watch a run see them."""

    rank: int
    host: str
    pid: int | None  # process id on its host
    device: str
    place: Mapping[str, int]  # index of the rank along each axis of the mesh: `pp`, `dp`, `tp`
    step: int | None
    # Seconds of the rank's own work in a step, without waiting for other ranks: the median of its last steps, as a
    # single slow step names nobody.
    work_seconds: float | None
    relative: float | None  # ratio of `work_seconds` to the least of its pipeline stage; None if ranks recorded none
    memory_bytes: int | None
    utilization: float | None
    heard: float  # time of its last line, in seconds since the epoch
    last: Mapping[str, Any]  # the last line itself

    @property
    def step_seconds(self) -> float | None:
        return self.last.get("step_seconds")

    @staticmethod
    def from_lines(rank: int, start: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], heard: float) -> RankView:
        """Make the view from the rank's last "start" line and its last steps, the last one first."""
        line = steps[0] if steps else {}
        works = sorted(seconds for step in steps if math.isfinite(seconds := number(step.get("work_seconds"))))
        return RankView(
            rank=rank,
            host=start.get("host") or "",
            pid=start.get("pid"),
            device=start.get("device") or "",
            place=start.get("place") or {},
            step=line.get("step"),
            work_seconds=works[len(works) // 2] if works else None,
            relative=None,
            memory_bytes=line.get("memory_in_use_bytes", line.get("peak_memory_bytes")),
            utilization=line.get("device_utilization"),
            heard=heard,
            last=line,
        )


@dataclass(frozen=True)
class NodeView:
    """Facts of a machine of a watched run, which one of its ranks records for all of them."""

    host: str
    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    cpu: float | None
    cores: int | None
    memory_bytes: int | None
    memory_total_bytes: int | None


@dataclass(frozen=True)
class PipelineView:
    """The ranks of one pipeline rank of a watched run.

    Numbers are means over the ranks that recorded one; seconds are those of a step.
    """

    rank: int
    ranks: tuple[int, ...]
    work_seconds: float | None
    forward_seconds: float | None
    backward_seconds: float | None
    bubble: float | None


def with_relative_work(views: Sequence[RankView]) -> list[RankView]:
    """Compare the recorded work of each rank with the least of its pipeline stage: stages do unequal work."""
    least: dict[int | None, float] = {}
    for view in views:
        if view.work_seconds:
            stage = view.place.get("pp")
            least[stage] = min(view.work_seconds, least.get(stage, math.inf))
    compared = []
    for view in views:
        stage_least = least.get(view.place.get("pp"))
        if view.work_seconds and stage_least:
            view = replace(view, relative=view.work_seconds / stage_least)
        compared.append(view)
    return compared


def node_views(views: Sequence[RankView], starts: Mapping[int, Mapping[str, Any]]) -> list[NodeView]:
    """Group the views of ranks by their machines; `starts`: last "start" line of each rank."""
    hosts: dict[str, list[RankView]] = {}
    for view in views:
        hosts.setdefault(view.host, []).append(view)
    return [_node_view(host, host_views, starts) for host, host_views in hosts.items()]


def _node_view(host: str, views: Sequence[RankView], starts: Mapping[int, Mapping[str, Any]]) -> NodeView:
    recorded = next((view.last for view in views if "host_cpu" in view.last), {})
    start = next((starts[view.rank] for view in views if starts.get(view.rank)), {})
    return NodeView(
        host=host,
        ranks=tuple(view.rank for view in views),
        devices=tuple(view.device for view in views),
        cpu=recorded.get("host_cpu"),
        cores=start.get("cores"),
        memory_bytes=recorded.get("host_memory_bytes"),
        memory_total_bytes=start.get("memory_total_bytes"),
    )


def pipeline_views(ranks: Sequence[RankView]) -> list[PipelineView]:
    """Group the views of ranks by their pipeline rank; [] if they did not record their place."""
    by_rank: dict[int, list[RankView]] = {}
    for view in ranks:
        if "pp" in view.place:
            by_rank.setdefault(view.place["pp"], []).append(view)
    return [_pipeline_view(rank, views) for rank, views in sorted(by_rank.items())]


def _pipeline_view(rank: int, views: Sequence[RankView]) -> PipelineView:
    stage_seconds = [view.last["stage_seconds"] for view in views if view.last.get("stage_seconds")]
    return PipelineView(
        rank=rank,
        ranks=tuple(view.rank for view in views),
        work_seconds=mean_of_known(view.work_seconds for view in views),
        # A rank that holds several stages, as some schedules have them, records each of them.
        forward_seconds=mean_of_known(sum(stage["forward"] for stage in stages) for stages in stage_seconds),
        backward_seconds=mean_of_known(sum(stage["backward"] for stage in stages) for stages in stage_seconds),
        bubble=mean_of_known(view.last.get("bubble") for view in views),
    )


def silent_ranks(ranks: Sequence[RankView], step_seconds: float | None) -> frozenset[int]:
    """Return the watched ranks that have written nothing for long, while others have."""
    patience = max(SILENT_SECONDS, SILENT_STEPS * (step_seconds or 0.0))
    # Not the time of now: where the whole run is silent, no rank stands out.
    newest = max((view.heard for view in ranks), default=0.0)
    return frozenset(view.rank for view in ranks if newest - view.heard > patience)
