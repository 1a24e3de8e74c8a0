"""The report as one HTML file, which needs no network."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from shardwise.base import units
from shardwise.runs.json_lines import PARTS
from shardwise.runs.report import chart
from shardwise.runs.report.chart import Curve
from shardwise.runs.report.numbers import columns, layout_of, ranks_picture

_TITLES = {
    "loss": "Training loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "param_norm": "Parameter norm",
    "tokens_per_second": "Tokens per second",
    "mfu": "MFU",
    "step_seconds": "Seconds of a step",
    "bubble": "Pipeline bubble",
    "loss_spike": "Loss spike score",
}
_PERCENT = ("mfu", "bubble")
_WHOLE = ("lr", "param_norm", "loss_spike")
"""Curves of which nothing is cut off: their beginning is as telling as the rest."""
_LOST = (4, 1, 2, 0, 5, 7, 3, 6)
"""Colours of the parts of a run's time: green for the steps that count."""
_AXES = {"tp": "TP", "dp": "DP", "pp": "PP", "world": "all ranks"}
_SENT = (3, 1, 2, 7, 5, 0, 4, 6)
_MARKS = {"checkpoint": "checkpoints", "eval": "evaluations", "warning": "warnings", "ended": "ends of jobs"}


def page(reports: Sequence[Mapping[str, Any]], compared: Mapping[str, Any] | None) -> str:
    """The page of one run, or of two that are laid over each other.

    Args:
        reports: by `report_of`.
        compared: by `comparison`, of two runs.
    """
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["pretty"] = lambda value: json.dumps(_counted(value), indent=2, ensure_ascii=False)
    environment.filters["loss"] = lambda value: _number(value, ".8g")
    names = _names(reports)
    return environment.get_template("page.html").render(
        title=" and ".join(str(report["run"]) for report in reports),
        runs=[_run(report, name) for report, name in zip(reports, names, strict=True)],
        charts=[Markup(drawn) for drawn in _charts(reports, names) if drawn],
        compared=compared,
        left=chart.LEFT,
        width=chart.WIDTH - chart.LEFT - chart.RIGHT,
        whole=chart.WIDTH,
    )


def _names(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    if len(reports) == 1:
        return [str(reports[0]["run"])]
    return [f"{letter}: {report['run']}" for letter, report in zip("AB", reports, strict=True)]


def _charts(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    charts = []
    for key, title in _TITLES.items():
        curves, notes = {}, []
        for name, report in zip(names, reports, strict=True):
            odd = report["not_finite"].get(key)
            breaks = None if odd is None else (odd["first"], odd["last"])
            curves[name[:1] if len(reports) > 1 else name] = Curve(
                report["curves"][key], report["evaluations"] if key == "loss" else (), breaks
            )
            if odd is not None:
                whose = f"{name[:1]}: " if len(reports) > 1 else ""
                notes.append(f"{whose}not finite at {units.counted(odd['steps'], 'step')}, first {odd['first']:,}")
        has_dots = any(curve.dots for curve in curves.values())
        title = f"{title}{', dots: evaluation' if has_dots else ''}"
        charts.append(chart.line_chart(title, curves, percent=key in _PERCENT, is_cut=key not in _WHOLE, notes=notes))
    return charts


def _counted(value: Any) -> Any:
    """A record in which equal texts that follow each other, such as the names of a thousand devices, stand once."""
    if isinstance(value, dict):
        return {key: _counted(inner) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    groups = [(one, len(list(group))) for one, group in itertools.groupby(value)]
    return [f"{one} ({count:,} times)" if count > 1 and isinstance(one, str) else one for one, count in groups]


def _run(report: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What the template shows of one run."""
    split = report["split_seconds"]
    useful = report["useful_seconds"]
    lost = {} if useful is None else {"steps that count": useful, **report["lost_seconds"]}
    memory, sent, told = report["memory_bytes"], report["communication_bytes"], report["timeline"]
    sent = {_AXES.get(axis, axis): amount for axis, amount in sent.items() if amount}
    return {
        "name": name,
        "report": report,
        "tiles": _tiles(report),
        "reason": "" if report["reason"] == report["state"] else str(report["reason"] or ""),
        "split": Markup(chart.bar(split, {part: units.duration(seconds) for part, seconds in split.items()})),
        "split_by_step": Markup(chart.stacked_chart("A step on rank 0, over time", PARTS, report["split_by_step"])),
        "goodput": "–" if report["goodput"] is None else f"{report['goodput']:.1%}",
        "lost": Markup(chart.bar(lost, {part: units.duration(seconds) for part, seconds in lost.items()}, _LOST)),
        "memory": Markup(chart.bar(memory, {kind: units.size(amount) for kind, amount in memory.items()})),
        "memory_by_rank": Markup(_memory_by_rank(report["ranks"])),
        "sent": Markup(chart.bar(sent, {axis: units.size(amount) for axis, amount in sent.items()}, _SENT)),
        "layout": layout_of(report),
        "ranks": ranks_picture(report["ranks"]),
        "events": report["events"][::-1],
        "timeline": Markup("" if told is None else chart.timeline(told, _MARKS)),
    }


def _memory_by_rank(ranks: Sequence[Mapping[str, Any]]) -> str:
    """The memory of every rank as bars, in the unit of the largest."""
    known = [(rank["rank"], rank["memory_bytes"]) for rank in ranks if rank["memory_bytes"] is not None]
    most = max(known, key=lambda pair: pair[1], default=None)
    if most is None:
        return ""
    least = min(known, key=lambda pair: pair[1])
    power = max(0, min(4, int(math.log(max(1, most[1]), 1024))))
    suffix = (" B", " KiB", " MiB", " GiB", " TiB")[power]
    note = f"from {units.size(least[1])} on rank {least[0]:,} to {units.size(most[1])} on rank {most[0]:,}"
    rows = columns([rank for rank, _ in known], [amount / 1024**power for _, amount in known])
    return chart.bar_chart("Memory in use by rank", rows, "rank", suffix, note)


def _tiles(report: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """The numbers at the top: name, value, a note, and the style of a value that tells of a fault."""
    numbers = report["numbers"]
    total = "" if report["steps"] is None else f"of {report['steps']:,}"
    final, evaluated, odd = numbers["final_loss"], numbers["final_eval_loss"], report["not_finite"].get("loss")
    said = [] if evaluated is None else [f"evaluation {_number(evaluated)}"]
    said += [] if odd is None else [f"first not finite at step {odd['first']:,}"]
    tiles = [
        ("state", str(report["state"]), "", "bad" if report["state"] in ("failed", "killed") else ""),
        ("steps", f"{report['step']:,}", total, ""),
        ("loss", _number(final), ", ".join(said), "bad" if _is_odd(final) or _is_odd(evaluated) else ""),
        ("tokens/s", _count(numbers["tokens_per_second"]), f"at most {_count(numbers['peak_tokens_per_second'])}", ""),
        ("MFU", _share(numbers["mfu"]), _mfu_note(numbers), ""),
        ("a step", _seconds(numbers["step_seconds"]), "mean of the last 20", ""),
        ("time", _seconds(report["seconds"]), units.counted(report["starts"], "start"), ""),
        ("goodput", _share(numbers["goodput"]), "time in steps that count", ""),
    ]
    if numbers["parameters"]:
        many = f"{numbers['world']:,} × " if isinstance(numbers["world"], int) and numbers["world"] > 1 else ""
        device = f"{many}{numbers['device']}" if numbers["device"] else ""
        tiles.insert(0, ("parameters", units.count(numbers["parameters"]), device, ""))
    return tiles


def _mfu_note(numbers: Mapping[str, Any]) -> str:
    peak = numbers["peak_flops_per_device"]
    if peak is None:
        return "the device's peak is not known"
    return f"of {peak / 1e12:,.1f} TFLOP/s, {numbers['mfu_attention']} attention"


def _is_odd(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def _number(value: float | None, form: str = ".4f") -> str:
    return "–" if value is None else "NaN" if math.isnan(value) else format(value, form)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else units.duration(value)


def _count(value: float | None) -> str:
    return "–" if value is None else units.count(value)
