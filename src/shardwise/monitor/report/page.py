"""The report as one HTML file, which needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from shardwise import units
from shardwise.monitor.report.chart import bar, line_chart, short, timeline

_TITLES = {
    "loss": "Training loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "param_norm": "Parameter norm",
    "tokens_per_second": "Tokens per second",
    "mfu": "MFU",
    "step_seconds": "Seconds of a step",
    "bubble": "Pipeline bubble",
}
_PERCENT = ("mfu", "bubble")
_MOST_LABELLED = 128
"""Ranks up to which each has its number in the picture of the layout."""


def page(reports: Sequence[Mapping[str, Any]], compared: Mapping[str, Any] | None) -> str:
    """The page of one run, or of two that are laid over each other.

    Args:
        reports: by `report_of`.
        compared: by `comparison`, of two runs.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["pretty"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
    template = environment.from_string((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    names = _names(reports)
    return template.render(
        title=" and ".join(str(report["run"]) for report in reports),
        runs=[_run(report, name) for report, name in zip(reports, names, strict=True)],
        charts=[Markup(chart) for chart in _charts(reports, names) if chart],
        compared=compared,
        short=short,
    )


def _names(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    if len(reports) == 1:
        return [str(reports[0]["run"])]
    return [f"{letter}: {report['run']}" for letter, report in zip("AB", reports, strict=True)]


def _charts(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    charts = []
    for key, title in _TITLES.items():
        curves = {name: report["curves"][key] for name, report in zip(names, reports, strict=True)}
        dots = reports[0]["evaluations"] if key == "loss" else ()
        charts.append(
            line_chart(f"{title}{', dots: evaluation' if dots else ''}", curves, dots=dots, percent=key in _PERCENT)
        )
    return charts


def _run(report: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What the template shows of one run."""
    split = {part: seconds for part, seconds in report["split_seconds"].items() if seconds > 0}
    lost = {"steps that count": report["useful_seconds"], **report["lost_seconds"]}
    memory = report["memory_bytes"]
    return {
        "name": name,
        "report": report,
        "tiles": _tiles(report),
        "split": Markup(bar(split, {part: units.duration(seconds) for part, seconds in split.items()})),
        "lost": Markup(bar(lost, {part: units.duration(seconds) for part, seconds in lost.items()})),
        "memory": Markup(bar(memory, {kind: units.size(amount) for kind, amount in memory.items()})),
        "sent": {axis: units.size(amount) for axis, amount in report["communication_bytes"].items() if amount},
        "stages": _stages(report["ranks"]),
        "hosts": sorted({rank["host"] for rank in report["ranks"]}),
        "events": report["events"][::-1],
        "timeline": Markup(timeline(_rows(report))),
    }


def _rows(report: Mapping[str, Any]) -> dict[str, list[tuple[float, float, str]]]:
    """The timeline of a run: when it trained, and when something happened, in seconds since its first event."""
    timed = [(event["at"], event) for event in report["events"] if event["at"] is not None]
    if not timed:
        return {}
    first = timed[0][0]
    begins = [at - first for at, event in timed if event["kind"] == "start"]
    rows: dict[str, list[tuple[float, float, str]]] = {"training": []}
    for number, begin in enumerate(begins):
        until = begins[number + 1] if number + 1 < len(begins) else math.inf
        end = max((at - first for at, _ in timed if begin <= at - first < until), default=begin)
        rows["training"].append((begin, end, f"start {number + 1}: {units.duration(end - begin)}"))
    for name, kind in (("checkpoints", "checkpoint"), ("evaluations", "eval"), ("warnings", "warning")):
        spans = [(at - first, at - first, _told(event)) for at, event in timed if event["kind"] == kind]
        if spans:
            rows[name] = spans
    return rows


def _told(event: Mapping[str, Any]) -> str:
    step = "" if event["step"] is None else f"step {event['step']:,}: "
    return f"{step}{event['text']}"


def _tiles(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The numbers at the top: name, value, and a note."""
    numbers = report["numbers"]
    total = "" if report["steps"] is None else f"of {report['steps']:,}"
    evaluated = numbers["final_eval_loss"]
    tiles = [
        ("state", str(report["state"]), str(report["reason"] or "").removeprefix(str(report["state"]))),
        ("steps", f"{report['step']:,}", total),
        ("loss", _decimals(numbers["final_loss"]), "" if evaluated is None else f"evaluation {_decimals(evaluated)}"),
        ("tokens/s", _count(numbers["tokens_per_second"]), f"at most {_count(numbers['peak_tokens_per_second'])}"),
        ("MFU", "–" if numbers["mfu"] is None else f"{numbers['mfu']:.1%}", _mfu_note(numbers)),
        ("a step", "–" if numbers["step_seconds"] is None else units.duration(numbers["step_seconds"]), "last 20"),
        ("time", units.duration(report["seconds"]), units.counted(report["starts"], "start")),
        ("goodput", "–" if numbers["goodput"] is None else f"{numbers['goodput']:.1%}", "time in steps that count"),
    ]
    if numbers["parameters"]:
        tiles.insert(0, ("parameters", units.count(numbers["parameters"]), str(numbers["device"] or "")))
    return tiles


def _mfu_note(numbers: Mapping[str, Any]) -> str:
    peak = numbers["peak_flops_per_device"]
    if peak is None:
        return "the device's peak is not known"
    return f"of {peak / 1e12:,.1f} TFLOP/s, {numbers['mfu_attention']} attention"


def _stages(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The ranks by pipeline stage and by place in data parallelism, each as a cell with its score."""
    labelled = len(ranks) <= _MOST_LABELLED
    stages: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for rank in ranks:
        place, relative = rank["place"], rank["relative"]
        score = "" if relative is None else f", {relative:.2f} × the work of the best"
        used = "" if rank["memory_bytes"] is None else f", {units.size(rank['memory_bytes'])}"
        where = ", ".join(f"{axis} {at}" for axis, at in place.items())
        cell = {
            "text": str(rank["rank"]) if labelled else "",
            "title": f"rank {rank['rank']} on {rank['host'] or 'an unknown host'}: {where}{score}{used}",
            "heat": 0 if relative is None else min(4, max(0, round(8 * (relative - 1)))),
        }
        stages.setdefault(place.get("pp", 0), {}).setdefault(place.get("dp", 0), []).append(cell)
    return [
        {"stage": stage, "groups": [{"data": data, "cells": cells} for data, cells in sorted(groups.items())]}
        for stage, groups in sorted(stages.items())
    ]


def _decimals(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _count(value: float | None) -> str:
    return "–" if value is None else units.count(value)
