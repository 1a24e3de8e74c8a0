"""The report as one HTML file, which needs no network, or as PNG files of its curves."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from shardwise.base import units
from shardwise.base.mesh_axes import layout_text
from shardwise.base.registered import optional_library
from shardwise.config.pipeline_schedule_specs import DEFAULT_SCHEDULE
from shardwise.runs.layout_spans import short_layout
from shardwise_watch.curve_points import curve_label
from shardwise_watch.report import chart
from shardwise_watch.report.numbers import curve_columns
from shardwise_watch.step_metrics import PARTS, REPORT_CURVES, StepCurve, StepMetric

# Numbers of the page's colours (page.css), in the order of the parts. Green stands for the steps that count.
_TIME_COLOURS = (4, 1, 2, 0, 5, 7, 3, 6)
_AXIS_COLOURS = (3, 1, 2, 7, 5, 0, 4, 6)
_AXES = {"tp": "TP", "cp": "CP", "dp": "DP", "dp_cp": "DP × CP", "pp": "PP", "world": "all ranks"}
_LOSS = REPORT_CURVES[0]
_MOST_TASK_CURVES = 24
"""Curves in a chart of tasks: some groups have dozens of tasks, whose legend would hide the chart."""
_MOST_NOTES = 3
_MOST_STARTS = 30
_MOST_LABELLED = 128  # largest number of ranks in which each has its number in the picture
_MOST_LISTED = 32
_HEAT = (1.1, 1.2, 1.3, 1.4)
"""Limits of a rank's work, relative to the best rank of its stage, from which on it is redder."""
_MARKS = {"checkpoint": "checkpoints", "eval": "evaluations", "warning": "warnings", "ended": "ends of jobs"}


def page_environment(*folders: Path) -> jinja2.Environment:
    """The environment of a page's templates, which lie in these folders and in that of the report."""
    # Names and texts come from files that anybody may have written, so all but `Markup` is escaped.
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def report_page(reports: Sequence[Mapping[str, Any]], compared: Mapping[str, Any] | None) -> str:
    """Make the HTML report of one run, or of several by `compare_runs`, of the results of `report_numbers`."""
    environment = page_environment()
    environment.filters |= {
        "pretty": lambda value: json.dumps(_counted(value), indent=2, ensure_ascii=False),
        "loss": lambda value: _number(value, ".8g"),
        "final": lambda value: _number(value, ".5f"),
        "number": _number,
        "percent": lambda value: _or_dash(value, "{:.1%}".format),
        "count": lambda value: _or_dash(value, units.count),
        "duration": lambda value: _or_dash(value, units.duration),
        "size": lambda value: _or_dash(value, units.size),
        "cost": lambda amount: f"{amount:,.{0 if amount >= 100 else 2}f}" if amount >= 0.1 else f"{amount:.2g}",
        "times": lambda value: _or_dash(value, "{:.2f} ×".format),
        "whole": "{:,}".format,
    }
    names = _names(reports)
    pair = compared if len(reports) == 2 else None
    # The script draws charts over other axes by these.
    places = {_letter(name): report["places"] for name, report in zip(names, reports, strict=True)}
    marks = [[mark.run, mark.place, mark.text] for mark in _marks(reports)[1]]
    return environment.get_template("page.html").render(
        title=" and ".join(str(report["run"]) for report in reports),
        price=(reports[0]["cost"] or {}).get("price"),
        runs=[
            {**_run(report, name), "letter": _letter(name), "look": chart.curve_classes(number)}
            for number, (report, name) in enumerate(zip(reports, names, strict=True))
        ],
        opening=Markup(_common_losses(pair, reports) if pair else _metric_chart(reports, names, _LOSS, chart.LARGE)),
        difference=Markup(_differences(compared)) if compared else "",
        charts=[Markup(drawn) for drawn in _charts(reports, names, is_loss_whole=pair is not None) if drawn],
        places=Markup(chart.json_attribute({"places": places, "marks": marks})),
        compared=compared,
        tasks=_task_rows(reports),
        left=chart.LEFT,
        right=chart.RIGHT,
        top=chart.TOP,
        bottom=chart.BOTTOM,
        duration=units.duration,
        size=units.size,
        counted=units.counted,
        is_odd=lambda value: value is not None and not math.isfinite(value),
        colours={"time": _TIME_COLOURS, "axes": _AXIS_COLOURS},
    )


def _names(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    if len(reports) == 1:
        return [str(reports[0]["run"])]
    return [f"{curve_label(number)}: {report['run']}" for number, report in enumerate(reports)]


def _letter(name: str) -> str:
    return name.partition(":")[0]


def _differences(compared: Mapping[str, Any]) -> str:
    by_axis = {
        x: {
            "A": StepCurve([]),
            **{curve_label(number): StepCurve(columns) for number, columns in enumerate(of_runs, 1)},
        }
        for x, of_runs in compared["differences"].items()
    }
    title = "Training loss of B minus A" if len(compared["pairs"]) == 1 else "Training loss minus that of A"
    x = next((x for x, curves in by_axis.items() if any(curve.known for curve in curves.values())), "step")
    size = chart.BELOW if len(compared["pairs"]) == 1 else chart.SMALL
    return chart.line_chart(title, by_axis[x], by_axis=by_axis, axis=x, size=size)


def _common_losses(compared: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> str:
    curves = {
        name: StepCurve(curve["loss"], curve["evaluations"])
        for name, curve in zip("AB", compared["curves"], strict=False)
    }
    title = "Training loss over the common steps"
    if any(curve.dots for curve in curves.values()):
        title += ", dots: evaluation"
    notes, marks = _marks(reports)
    return chart.line_chart(title, curves, notes=notes, marks=marks, size=chart.LARGE)


def _marks(reports: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[chart.ChartMark]]:
    """Return a note for each of the last changes of the layout, and marks for all changes and for each later start."""
    notes: list[str] = []
    marks: list[chart.ChartMark] = []
    for number, report in enumerate(reports):
        run = curve_label(number)
        prefix = f"{run}, " if len(reports) > 1 else ""
        changes = {}
        for (_, former), (steps_before, layout) in itertools.pairwise(report["layouts"]):
            text = f"{prefix}layout after step {steps_before:,}: {former} → {layout}"
            changes[steps_before] = chart.ChartMark(steps_before, text, layout, run)
        starts = {
            steps_before: chart.ChartMark(steps_before, f"{prefix}{kind} after step {steps_before:,}", run=run)
            for steps_before, kind in report["later_starts"][-_MOST_STARTS:]
        }
        notes += [mark.text for mark in changes.values()]
        # A start that changes the layout has one mark.
        marks += (starts | changes).values()
    return notes[-_MOST_NOTES:], marks


def _charts(reports: Sequence[Mapping[str, Any]], names: Sequence[str], *, is_loss_whole: bool) -> list[str]:
    return [
        *([_metric_chart(reports, names, _LOSS)] if is_loss_whole else []),
        chart.line_chart("Training loss by source", _named_curves(reports, names, "source_curves")),
        chart.line_chart("Balance losses", _named_curves(reports, names, "balance_curves")),
        chart.line_chart("Loss of evaluation sets", _named_curves(reports, names, "set_curves")),
        *_task_charts(reports, names),
        *(_metric_chart(reports, names, metric) for metric in REPORT_CURVES if metric is not _LOSS),
    ]


def _metric_chart(
    reports: Sequence[Mapping[str, Any]], names: Sequence[str], metric: StepMetric, size: chart.ChartSize = chart.SMALL
) -> str:
    curves: dict[str, StepCurve] = {}
    layout_notes, marks = _marks(reports)
    notes = layout_notes if metric is _LOSS else [metric.note] if metric.note else []
    for name, report in zip(names, reports, strict=True):
        shown, prefix = (_letter(name), f"{_letter(name)}: ") if len(reports) > 1 else (name, "")
        breaks = None
        if not_finite := report["not_finite"].get(metric.name):
            breaks = (not_finite["first"], not_finite["last"])
            steps = units.counted(not_finite["steps"], "step")
            notes.append(f"{prefix}not finite at {steps}, first {not_finite['first']:,}")
        dots = report["evaluations"] if metric is _LOSS else ()
        curves[shown] = StepCurve(report["curves"][metric.name], dots, breaks)
    has_dots = any(curve.dots for curve in curves.values())
    title = f"{metric.title}, dots: evaluation" if has_dots else metric.title
    return chart.line_chart(
        title, curves, percent=metric.is_share, is_cut=metric.is_cut, notes=notes, marks=marks, size=size
    )


def _named_curves(reports: Sequence[Mapping[str, Any]], names: Sequence[str], key: str) -> dict[str, StepCurve]:
    curves = {}
    for name, report in zip(names, reports, strict=True):
        for curve_name, rows in report.get(key, {}).items():
            curves[f"{_letter(name)}: {curve_name}" if len(reports) > 1 else curve_name] = StepCurve(rows)
    return curves


def _task_charts(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    scores = [report["task_curves"] for report in reports]
    charts = []
    for metric in dict.fromkeys(metric for by_metric in scores for metric in by_metric):
        curves = _named_curves(scores, names, metric)
        shown = dict(list(curves.items())[:_MOST_TASK_CURVES])
        notes = [f"{len(shown)} of {len(curves)} curves"] if len(shown) < len(curves) else []
        charts.append(chart.line_chart(f"Tasks: {metric}", shown, is_cut=False, notes=notes))
    return charts


def _task_rows(reports: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, list[Mapping[str, Any] | None]]]:
    of_runs = [{(row["task"], row["metric"]): row for row in report["tasks"]} for report in reports]
    keys = dict.fromkeys(key for rows in of_runs for key in rows)
    return [(*key, [rows.get(key) for rows in of_runs]) for key in keys]


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
    useful = report["useful_seconds"]
    lost = {} if useful is None else {"steps that count": useful, **report["lost_seconds"]}
    sent = {_AXES.get(axis, axis): amount for axis, amount in report["communication_bytes"].items() if amount}
    return {
        "name": name,
        "report": report,
        "split_by_step": Markup(
            chart.stacked_chart("A step on rank 0, over time", PARTS, report["split_by_step"], _marks([report])[1])
        ),
        "lost": lost,
        "load_maps": [
            Markup(chart.load_map(**shown, size=size))
            for shown, size in zip(report["load_maps"].values(), (chart.LARGE, chart.SMALL), strict=False)
        ],
        "memory_by_rank": Markup(_memory_by_rank(report["ranks"])),
        "sent": sent,
        "layout": _layout(report),
        "ranks": _ranks(report["ranks"]),
        "timeline": _timeline(report["timeline"]),
    }


def _timeline(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Add to the timeline of a report the ticks of its axis, and rows of marks: [kind, name, places in percent]."""
    if facts is None or facts["seconds"] <= 0:
        return None
    rows = []
    for kind, name in _MARKS.items():
        # Thousands of checkpoints would fall on the same pixels: each place is drawn once.
        places = dict.fromkeys(f"{100 * seconds / facts['seconds']:.1f}" for seconds in facts["marks"].get(kind, []))
        if places:
            rows.append((kind, name, [*places]))
    return {**facts, "ticks": chart.time_ticks(facts["seconds"]), "rows": rows}


def _layout(report: Mapping[str, Any]) -> str:
    layout = report["layout"]
    parallel = report["config"].get("parallel")
    if not short_layout(layout):
        return ""
    words = [layout_text(layout, sequence=bool(layout.get("sequence")))]
    if layout.get("zero"):
        words.append(f"ZeRO-{layout['zero']}")
    if layout["pipeline"] > 1 and isinstance(parallel, Mapping):
        virtual = parallel.get("virtual_stages")
        stages = f" with {virtual} stages on each rank" if isinstance(virtual, int) and virtual > 1 else ""
        words.append(f"schedule {parallel.get('schedule', DEFAULT_SCHEDULE)}{stages}")
    return ", ".join(words)


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arrange the ranks by pipeline rank and by place in data and context parallelism, for the template.

    The facts of the ranks are in `data` in the order of their cells, as [rank, number of its host, work, GiB, place
    along each axis …].
    """

    def group_of(rank: Mapping[str, Any]) -> tuple[int, int, int]:
        place = rank["place"]
        return place.get("pp", 0), place.get("dp", 0), place.get("cp", 0)

    ordered = sorted(ranks, key=group_of)
    stages: dict[int, list[list[Mapping[str, Any]]]] = {}
    for (stage, _, _), group in itertools.groupby(ordered, group_of):
        stages.setdefault(stage, []).append(list(group))
    hosts = sorted({rank["host"] for rank in ranks})
    number_of = {host: number for number, host in enumerate(hosts)}
    axes = list(dict.fromkeys(axis for rank in ranks for axis in rank["place"]))
    facts = []
    for rank in ordered:
        work = None if rank["relative"] is None else round(rank["relative"], 2)
        used = None if rank["memory_bytes"] is None else round(rank["memory_bytes"] / 2**30, 2)
        places = (rank["place"].get(axis) for axis in axes)
        facts.append([rank["rank"], number_of[rank["host"]], work, used, *places])
    return {
        "count": len(ranks),
        "hosts": len(hosts),
        "is_wide": len(ranks) <= _MOST_LABELLED,
        "heat": _HEAT,
        "data": Markup(chart.json_attribute({"hosts": hosts, "axes": axes, "ranks": facts})),
        "stages": stages,
        "worst": sorted(ranks, key=lambda rank: -(rank["relative"] or 0.0))[:_MOST_LISTED],
    }


def _memory_by_rank(ranks: Sequence[Mapping[str, Any]]) -> str:
    used = {rank["rank"]: rank["memory_bytes"] for rank in ranks if rank["memory_bytes"] is not None}
    if not used:
        return ""
    least = min(used, key=used.__getitem__)
    most = max(used, key=used.__getitem__)
    # The power of 1,024 that is the unit of the largest number of the axis; there are five units.
    power = max(0, min(4, int(math.log(max(1, 1.25 * used[most]), 1024))))
    suffix = (" B", " KiB", " MiB", " GiB", " TiB")[power]
    note = f"from {units.size(used[least])} on rank {least:,} to {units.size(used[most])} on rank {most:,}"
    rows = curve_columns([*used], [amount / 1024**power for amount in used.values()])
    return chart.bar_chart("Memory in use by rank", rows, "rank", suffix, note)


def _number(value: float | None, form: str = ".4f") -> str:
    if value is None:
        return "–"
    return "NaN" if math.isnan(value) else format(value, form)


def _or_dash(value: float | None, shown: Callable[[float], str]) -> str:
    return "–" if value is None else shown(value)


def draw_pictures(reports: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw each curve of a report that has a value into `folder`; returns the files; ConfigError: no matplotlib."""
    figures = optional_library("matplotlib.figure", "--png needs", "plot")
    colours = optional_library("matplotlib.colors", "--png needs", "plot")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    _, marks = _marks(reports)
    for metric in REPORT_CURVES:
        name = metric.name
        named = zip(_names(reports), reports, strict=True)
        curves = {run: report["curves"][name] for run, report in named if report["curves"][name]}
        if not curves:
            continue
        figure = figures.Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for run, rows in curves.items():
            steps, least, mean, largest = zip(*rows, strict=True)
            (line,) = axes.plot(steps, mean, label=run, lw=1.2, marker="." if len(rows) == 1 else "")
            axes.fill_between(steps, least, largest, color=line.get_color(), alpha=0.2, lw=0)
        first, last = axes.dataLim.intervalx
        # A line outside of the curves would widen the axis.
        for mark in (mark for mark in marks if first <= mark.place <= last):
            axes.axvline(mark.place, color="grey", lw=0.8)
            if mark.label:
                axes.text(mark.place, 0.99, f" {mark.label}", transform=axes.get_xaxis_transform(), va="top", size=7)
        axes.set_xlabel("step")
        axes.set_ylabel(metric.title)
        axes.grid(alpha=0.25)
        if len(curves) > 1:
            axes.legend()
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=150)
    for number, report in enumerate(reports):
        for name, shown in report["load_maps"].items():
            figure = figures.Figure(figsize=(7, 4), layout="constrained")
            axes = figure.subplots()
            rows = {block: [load for _, load in cells] for block, cells in shown["rows"].items()}
            extent = (*chart.load_map_ends(shown["rows"]), len(rows) - 0.5, -0.5)
            norm = colours.TwoSlopeNorm(1, 0, 4)
            image = axes.imshow([*rows.values()], "coolwarm", norm, aspect="auto", extent=extent)
            axes.set(xlabel=shown["axis"], ylabel="block", title=shown["title"])
            axes.set_yticks(range(0, len(rows), len(rows) // 10 + 1), [*rows][:: len(rows) // 10 + 1])
            figure.colorbar(image, extend="max")
            files.append(folder / f"{name}{f'-{number + 1}' if number else ''}.png")
            figure.savefig(files[-1], dpi=150)
    return files
