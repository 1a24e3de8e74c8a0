"""The picture of `shardwise plan --plot`: time against memory of the best layouts, and the best one's step in time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwise.cost.step import StepTime, timeline_of
from shardwise.errors import ConfigError
from shardwise.planner import Plan

_COLOURS = {"forward": "#4477aa", "backward": "#66ccaa", "input": "#ccbb44", "weight": "#ee8866"}
_MOST_BARS = 20_000


def draw(plans: Sequence[Plan], path: Path) -> None:
    """Write the picture; its name's ending is its format."""
    from shardwise.data.reading.content import optional_library  # costly to import, for a plot alone

    figures = optional_library("matplotlib.figure", "--plot needs", "plot")
    figure = figures.Figure(figsize=(11, 8), layout="constrained")
    above, below = figure.subplots(2, 1)
    for number, plan in enumerate(plans, 1):
        above.scatter(plan.memory.total / 1e9, plan.time.total, color="#4477aa")
        above.annotate(str(number), (plan.memory.total / 1e9, plan.time.total), xytext=(4, 4),
                       textcoords="offset points")  # fmt: skip
    above.set(xlabel="memory of the neediest rank (GB)", ylabel="step (s)", title="the best layouts, by their number")
    best = plans[0]
    rows = timeline_of(best.config, best.layout, best.cluster)
    bars = 0
    for rank, row in enumerate(rows):
        for one in row[: max(1, _MOST_BARS // len(rows))]:
            below.barh(rank, one.end - one.start, left=one.start, color=_COLOURS[one.action.kind], linewidth=0)
            bars += 1
    below.set(xlabel="seconds", ylabel="pipeline rank", title=best.choice.text() + _rest(best.time))
    below.invert_yaxis()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None


def _rest(time: StepTime) -> str:
    return f": {time.total:.3g} s, then reduction and update"
