"""What several ranks, or several events, of a run tell together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.runs.lost_time import number
from shardwise.runs.run import RankView, Run

_RECENT_STEPS = 20
_SILENT_SECONDS, _SILENT_STEPS = 60.0, 20.0


@dataclass(frozen=True)
class PipelineView:
    """The ranks of one pipeline rank: means over those that recorded a number, seconds of a step."""

    rank: int
    ranks: tuple[int, ...]
    work_seconds: float | None
    forward_seconds: float | None
    backward_seconds: float | None
    bubble: float | None


def pipeline(ranks: Sequence[RankView]) -> list[PipelineView]:
    """The pipeline ranks of `ranks`; [] where these do not tell their place."""
    by_rank: dict[int, list[RankView]] = {}
    for view in ranks:
        if "pp" in view.place:
            by_rank.setdefault(view.place["pp"], []).append(view)
    return [_pipeline_rank(rank, views) for rank, views in sorted(by_rank.items())]


def silent(ranks: Sequence[RankView], step_seconds: float | None) -> frozenset[int]:
    """The ranks that have written nothing for long, while others have."""
    patience = max(_SILENT_SECONDS, _SILENT_STEPS * (step_seconds or 0.0))
    newest = max((view.heard for view in ranks), default=0.0)
    return frozenset(view.rank for view in ranks if newest - view.heard > patience)


def split_seconds(run: Run) -> dict[str, float]:
    """The mean of the last 20 recorded steps by `run.PARTS`; {} where none recorded them."""
    parts = run.series.parts.items()
    recent = {name: [value for value in values[-_RECENT_STEPS:] if not math.isnan(value)] for name, values in parts}
    return {name: sum(values) / len(values) for name, values in recent.items() if values}


def graphs(run: Run) -> dict[str, float]:
    """Compiled graphs since the last start: `graphs`, `hits`, `misses`, `seconds`; {} where none are known."""
    begun = max((at for at, event in enumerate(run.events) if event.get("event") == "start"), default=0)
    found = [event for event in run.events[begun:] if event.get("event") == "compile"]
    names = ("graphs", "hits", "misses", "seconds") if found else ()
    return {name: sum(number(event.get(name), 0.0) for event in found) for name in names}


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
