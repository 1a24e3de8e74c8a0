"""The ranks of a run as a picture of their layout, and as a table of those that need a look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from shardwise import units
from shardwise.monitor.report.chart import attribute

_MOST_LABELLED = 128
"""Ranks up to which each has its number in the picture."""
_MOST_LISTED = 32
HEAT = (1.1, 1.2, 1.3, 1.4)
"""A rank's work over that of the best rank of its stage, from which on it is redder."""


def layout_of(report: Mapping[str, Any]) -> str:
    """The degrees of parallelism; empty where the run did not record them."""
    layout, parallel = report["layout"], report["config"].get("parallel")
    degrees = {"TP": "tensor", "PP": "pipeline", "DP": "data"}
    if not all(isinstance(layout.get(key), int) for key in degrees.values()):
        return ""
    sequence = {"TP": " with sequence parallelism" if layout.get("sequence") else ""}
    parts = [f"{name} {layout[key]}{sequence.get(name, '')}" for name, key in degrees.items()]
    told = [" × ".join(parts)]
    if layout.get("zero"):
        told.append(f"ZeRO-{layout['zero']}")
    if layout["pipeline"] > 1 and isinstance(parallel, Mapping):
        virtual = parallel.get("virtual_stages")
        stages = f" with {virtual} stages on each rank" if isinstance(virtual, int) and virtual > 1 else ""
        told.append(f"schedule {parallel.get('schedule', '1f1b')}{stages}")
    return ", ".join(told)


def ranks_picture(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The ranks by pipeline rank and by place in data parallelism, for the template.

    Each is a cell; what is known of it is in `data` in the order of the cells, as [rank, number of its host, work, GiB,
    its place along each axis].
    """
    stages: dict[int, dict[int, list[Mapping[str, Any]]]] = {}
    for rank in ranks:
        place = rank["place"]
        stages.setdefault(place.get("pp", 0), {}).setdefault(place.get("dp", 0), []).append(rank)
    ordered = [rank for _, groups in sorted(stages.items()) for _, group in sorted(groups.items()) for rank in group]
    hosts = sorted({rank["host"] for rank in ranks})
    number_of = {host: number for number, host in enumerate(hosts)}
    axes = list(dict.fromkeys(axis for rank in ranks for axis in rank["place"]))
    data = {"hosts": hosts, "axes": axes, "ranks": [_facts(rank, number_of, axes) for rank in ordered]}
    worst = sorted(ranks, key=lambda rank: -(rank["relative"] or 0.0))[:_MOST_LISTED]
    is_wide = len(ranks) <= _MOST_LABELLED
    return {
        "count": len(ranks),
        "hosts": len(hosts),
        "is_wide": is_wide,
        "heat": HEAT,
        "data": Markup(attribute(data)),
        "stages": [
            (stage, [Markup("".join(_cell(rank, is_wide) for rank in group)) for _, group in sorted(groups.items())])
            for stage, groups in sorted(stages.items())
        ],
        "rows": [_row(rank) for rank in worst],
    }


def _cell(rank: Mapping[str, Any], is_wide: bool) -> str:
    heat = 0 if rank["relative"] is None else sum(rank["relative"] >= limit for limit in HEAT)
    style = f' class="h{heat}"' if heat else ""
    return f"<i{style}>{rank['rank'] if is_wide else ''}</i>"


def _facts(rank: Mapping[str, Any], number_of: Mapping[str, int], axes: Sequence[str]) -> list[Any]:
    work = None if rank["relative"] is None else round(rank["relative"], 2)
    used = None if rank["memory_bytes"] is None else round(rank["memory_bytes"] / 2**30, 2)
    return [rank["rank"], number_of[rank["host"]], work, used, *(rank["place"].get(axis) for axis in axes)]


def _row(rank: Mapping[str, Any]) -> list[str]:
    work = "–" if rank["relative"] is None else f"{rank['relative']:.2f} ×"
    used = "–" if rank["memory_bytes"] is None else units.size(rank["memory_bytes"])
    return [str(rank["rank"]), rank["host"] or "–", _place(rank), work, used]


def _place(rank: Mapping[str, Any]) -> str:
    return " ".join(f"{axis} {at}" for axis, at in rank["place"].items())
