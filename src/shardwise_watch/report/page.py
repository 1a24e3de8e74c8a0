"""The report as one HTML file, which needs no network, or as PNG files of its curves."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import jinja2
from markupsafe import Markup

from shardwise.base import units
from shardwise.base.errors import ConfigError
from shardwise_watch.report import chart
from shardwise_watch.report.numbers import columns, layout_of, ranks_picture
from shardwise_watch.step_metrics import PARTS, REPORT_CURVES, Curve, StepMetric

# Numbers of the page's colours (page.css), in the order of the parts. Green stands for the steps that count.
_TIME_COLOURS = (4, 1, 2, 0, 5, 7, 3, 6)
_AXIS_COLOURS = (3, 1, 2, 7, 5, 0, 4, 6)
_AXES = {"tp": "TP", "cp": "CP", "dp": "DP", "dp_cp": "DP × CP", "pp": "PP", "world": "all ranks"}
_MOST_TASK_CURVES = 24
"""Curves in a chart of tasks: some groups have dozens of tasks, whose legend would hide the chart."""
_MOST_NOTES = 3
"""Changes of the layout that are named above a chart."""
_MOST_STARTS = 30
"""Starts that have marks in a chart, the last ones."""
_MARKS = {"checkpoint": "checkpoints", "eval": "evaluations", "warning": "warnings", "ended": "ends of jobs"}


def page(reports: Sequence[Mapping[str, Any]], compared: Mapping[str, Any] | None) -> str:
    """Make the page of one run, or of several that are laid over each other.

    Args:
        reports: results of `report_of`.
        compared: result of `comparison` for two runs.
    """
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    # Names and texts come from files that anybody may have written, so all but `Markup` is escaped.
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["pretty"] = lambda value: json.dumps(_counted(value), indent=2, ensure_ascii=False)
    environment.filters["loss"] = lambda value: _number(value, ".8g")
    environment.filters["final"] = lambda value: _number(value, ".5f")
    names = _names(reports)
    return environment.get_template("page.html").render(
        title=" and ".join(str(report["run"]) for report in reports),
        runs=[_run(report, name) for report, name in zip(reports, names, strict=True)],
        opening=Markup(_common_losses(compared, reports) if compared else _loss_chart(reports, names, chart.LARGE)),
        charts=[Markup(drawn) for drawn in _charts(reports, names, is_loss_whole=compared is not None) if drawn],
        compared=compared,
        left=chart.LEFT,
        right=chart.RIGHT,
    )


def _names(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    if len(reports) == 1:
        return [str(reports[0]["run"])]
    return [f"{letter}: {report['run']}" for letter, report in zip(ascii_uppercase, reports, strict=False)]


def _common_losses(compared: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> str:
    """Draw the losses of two runs over the steps that both have; an empty text if there are none."""
    curves = {
        name: Curve(curve["loss"], curve["evaluations"]) for name, curve in zip("AB", compared["curves"], strict=False)
    }
    title = "Training loss over the common steps"
    if any(curve.dots for curve in curves.values()):
        title += ", dots: evaluation"
    notes, marks = _marks(reports)
    return chart.line_chart(title, curves, notes=notes, marks=marks, size=chart.LARGE)


def _marks(reports: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[chart.Mark]]:
    """Return a note for each of the last changes of the layout, and marks for all changes and for each later start."""
    notes: list[str] = []
    marks: list[chart.Mark] = []
    for letter, report in zip(ascii_uppercase, reports, strict=False):
        prefix = f"{letter}, " if len(reports) > 1 else ""
        changes = {}
        for (_, former), (steps_before, layout) in itertools.pairwise(report["layouts"]):
            text = f"{prefix}layout after step {steps_before:,}: {former} → {layout}"
            changes[steps_before] = chart.Mark(steps_before, text, layout)
        starts = {
            steps_before: chart.Mark(steps_before, f"{prefix}{kind} after step {steps_before:,}")
            for steps_before, kind in report["later_starts"][-_MOST_STARTS:]
        }
        notes += [mark.text for mark in changes.values()]
        # A start that changes the layout has one mark.
        marks += (starts | changes).values()
    return notes[-_MOST_NOTES:], marks


def _loss_chart(reports: Sequence[Mapping[str, Any]], names: Sequence[str], size: chart.Size) -> str:
    """Draw the training loss of each run, with its evaluations."""
    return _metric_chart(reports, names, next(metric for metric in REPORT_CURVES if metric.name == "loss"), size)


def _charts(reports: Sequence[Mapping[str, Any]], names: Sequence[str], *, is_loss_whole: bool) -> list[str]:
    """Draw the curves of the runs.

    Args:
        is_loss_whole: True if the loss is drawn here too, as the page opens with a part of it.
    """
    charts = []
    for metric in REPORT_CURVES:
        if metric.name == "loss":
            charts += [_metric_chart(reports, names, metric)] * is_loss_whole
            charts.append(chart.line_chart("Training loss by source", _named_curves(reports, names, "source_curves")))
            charts.append(chart.line_chart("Loss of evaluation sets", _named_curves(reports, names, "set_curves")))
            charts += _task_charts(reports, names)
        else:
            charts.append(_metric_chart(reports, names, metric))
    return charts


def _metric_chart(
    reports: Sequence[Mapping[str, Any]], names: Sequence[str], metric: StepMetric, size: chart.Size = chart.SMALL
) -> str:
    """Draw a metric of each run; the steps at which it is not finite are shaded, and named below the title."""
    curves: dict[str, Curve] = {}
    layout_notes, marks = _marks(reports)
    notes = layout_notes if metric.name == "loss" else []
    is_comparison = len(reports) > 1
    for name, report in zip(names, reports, strict=True):
        label = name[:1] if is_comparison else name
        not_finite = report["not_finite"].get(metric.name)
        dots = report["evaluations"] if metric.name == "loss" else ()
        breaks = None
        if not_finite is not None:
            breaks = (not_finite["first"], not_finite["last"])
            prefix = f"{label}: " if is_comparison else ""
            steps = units.counted(not_finite["steps"], "step")
            notes.append(f"{prefix}not finite at {steps}, first {not_finite['first']:,}")
        curves[label] = Curve(report["curves"][metric.name], dots, breaks)
    has_dots = any(curve.dots for curve in curves.values())
    title = f"{metric.title}, dots: evaluation" if has_dots else metric.title
    return chart.line_chart(
        title, curves, percent=metric.is_share, is_cut=metric.is_cut, notes=notes, marks=marks, size=size
    )


def _named_curves(reports: Sequence[Mapping[str, Any]], names: Sequence[str], key: str) -> dict[str, Curve]:
    """Return the curves that the reports have by names of their own, such as those of sources."""
    curves = {}
    for name, report in zip(names, reports, strict=True):
        for label, rows in report.get(key, {}).items():
            curves[f"{name[:1]}: {label}" if len(reports) > 1 else label] = Curve(rows)
    return curves


def _task_charts(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Draw the scores of tasks, a chart for each metric."""
    scores = [report["task_curves"] for report in reports]
    charts = []
    for metric in dict.fromkeys(metric for by_metric in scores for metric in by_metric):
        curves = _named_curves(scores, names, metric)
        shown = dict(list(curves.items())[:_MOST_TASK_CURVES])
        notes = [f"{len(shown)} of {len(curves)} curves"] if len(shown) < len(curves) else []
        charts.append(chart.line_chart(f"Tasks: {metric}", shown, is_cut=False, notes=notes))
    return charts


def _counted(value: Any) -> Any:
    """Shorten a record: equal texts that follow each other, such as the names of a thousand devices, stand once."""
    if isinstance(value, dict):
        return {key: _counted(inner) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    shortened = []
    for entry, group in itertools.groupby(value):
        count = len(list(group))
        shortened.append(f"{entry} ({count:,} times)" if count > 1 and isinstance(entry, str) else entry)
    return shortened


def _run(report: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Collect the texts and pictures that the template shows of one run."""
    split = report["split_seconds"]
    useful = report["useful_seconds"]
    lost = {} if useful is None else {"steps that count": useful, **report["lost_seconds"]}
    sent = {_AXES.get(axis, axis): amount for axis, amount in report["communication_bytes"].items() if amount}
    timeline = report["timeline"]
    return {
        "name": name,
        "report": report,
        "tiles": _tiles(report),
        "reason": "" if report["failure"] or report["reason"] == report["state"] else str(report["reason"] or ""),
        "split": Markup(chart.bar(split, _durations(split))),
        "split_title": _split_title(report),
        "split_by_step": Markup(
            chart.stacked_chart("A step on rank 0, over time", PARTS, report["split_by_step"], _marks([report])[1])
        ),
        "goodput": _or_dash(report["goodput"], "{:.1%}".format),
        "lost": Markup(chart.bar(lost, _durations(lost), _TIME_COLOURS)),
        "memories": [(title, Markup(chart.bar(memory, _sizes(memory)))) for title, memory in _memories(report)],
        "memory_by_rank": Markup(_memory_by_rank(report["ranks"])),
        "sent": Markup(chart.bar(sent, _sizes(sent), _AXIS_COLOURS)),
        "layout": layout_of(report),
        "ranks": ranks_picture(report["ranks"]),
        "events": report["events"][::-1],
        "timeline": Markup("" if timeline is None else chart.timeline(timeline, _MARKS)),
    }


def _memories(report: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the memory of rank 0 by kind, with a title; of a run with several layouts that of each."""
    by_layout = report["memory_by_layout"]
    if len(by_layout) < 2:
        return [("Memory of rank 0", report["memory_bytes"])]
    return [(f"Memory of rank 0 at {layout}", memory) for layout, memory in by_layout.items()]


def _split_title(report: Mapping[str, Any]) -> str:
    """Say which steps the mean is of, if the run took steps at several layouts."""
    if len(report["layouts"]) < 2 or report["split_steps"] is None:
        return "A step on rank 0, mean"
    first, last = report["split_steps"]
    return f"A step on rank 0, mean of steps {first:,} to {last:,} at {report['split_layout']}"


def _durations(parts: Mapping[str, float]) -> dict[str, str]:
    return {name: units.duration(seconds) for name, seconds in parts.items()}


def _sizes(parts: Mapping[str, float]) -> dict[str, str]:
    return {name: units.size(amount) for name, amount in parts.items()}


def _memory_by_rank(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Draw the memory of every rank as bars, in the unit of the largest."""
    known = [(rank["rank"], rank["memory_bytes"]) for rank in ranks if rank["memory_bytes"] is not None]
    most = max(known, key=lambda pair: pair[1], default=None)
    if most is None:
        return ""
    least = min(known, key=lambda pair: pair[1])
    # The power of 1,024 that is the unit of the largest; there are five units.
    power = max(0, min(4, int(math.log(max(1, most[1]), 1024))))
    suffix = (" B", " KiB", " MiB", " GiB", " TiB")[power]
    note = f"from {units.size(least[1])} on rank {least[0]:,} to {units.size(most[1])} on rank {most[0]:,}"
    rows = columns([rank for rank, _ in known], [amount / 1024**power for _, amount in known])
    return chart.bar_chart("Memory in use by rank", rows, "rank", suffix, note)


def _tiles(report: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the numbers at the top: name, value, note, and style, which is "bad" for a value that tells of a fault."""
    numbers = report["numbers"]
    total = "" if report["steps"] is None else f"of {report['steps']:,}"
    final = numbers["final_loss"]
    evaluated = numbers["final_eval_loss"]
    not_finite = report["not_finite"].get("loss")
    loss_notes = []
    if evaluated is not None:
        loss_notes.append(f"evaluation {_number(evaluated)}")
    if not_finite is not None:
        loss_notes.append(f"first not finite at step {not_finite['first']:,}")
    is_loss_bad = _is_not_finite(final) or _is_not_finite(evaluated)
    peak = _or_dash(numbers["peak_tokens_per_second"], units.count)
    tiles = [
        ("state", str(report["state"]), "", "bad" if report["state"] in ("failed", "killed") else ""),
        ("steps", f"{report['step']:,}", total, ""),
        ("loss", _number(final), ", ".join(loss_notes), "bad" if is_loss_bad else ""),
        (
            "tokens/s",
            _or_dash(numbers["tokens_per_second"], units.count),
            f"mean of the last 10 steps, at most {peak}",
            "",
        ),
        ("MFU", _or_dash(numbers["mfu"], "{:.1%}".format), _mfu_note(numbers), ""),
        ("a step", _or_dash(numbers["step_seconds"], units.duration), "mean of the last 20", ""),
        ("time", _or_dash(report["seconds"], units.duration), units.counted(report["starts"], "start"), ""),
        ("goodput", _or_dash(numbers["goodput"], "{:.1%}".format), "time in steps that count", ""),
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


def _is_not_finite(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def _number(value: float | None, form: str = ".4f") -> str:
    if value is None:
        return "–"
    return "NaN" if math.isnan(value) else format(value, form)


def _or_dash(value: float | None, shown: Callable[[float], str]) -> str:
    return "–" if value is None else shown(value)


def draw(reports: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw each curve that has a value into `folder`; returns the files.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError("--png needs matplotlib, which is not installed: pip install 'shardwise[plot]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    _, marks = _marks(reports)
    for metric in REPORT_CURVES:
        name = metric.name
        curves = {str(report["run"]): report["curves"][name] for report in reports if report["curves"][name]}
        if not curves:
            continue
        figure = figures.Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for label, rows in curves.items():
            steps, least, mean, largest = zip(*rows, strict=True)
            (line,) = axes.plot(steps, mean, label=label, lw=1.2, marker="." if len(rows) == 1 else "")
            axes.fill_between(steps, least, largest, color=line.get_color(), alpha=0.2, lw=0)
        first, last = axes.dataLim.intervalx
        # A line outside of the curves would widen the axis.
        for mark in (mark for mark in marks if first <= mark.place <= last):
            axes.axvline(mark.place, color="grey", lw=0.8)
            if mark.label:
                axes.text(mark.place, 0.99, f" {mark.label}", transform=axes.get_xaxis_transform(), va="top", size=7)
        axes.set_xlabel("step")
        axes.set_ylabel(metric.axis_label)
        axes.grid(alpha=0.25)
        if len(curves) > 1:
            axes.legend()
        file = folder / f"{name}.png"
        figure.savefig(file, dpi=150)
        files.append(file)
    return files
