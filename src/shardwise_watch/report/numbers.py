"""The numbers of a report, as values of JSON: the page and the pictures draw these and derive nothing."""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from shardwise.base import redaction, units
from shardwise.base.errors import listing
from shardwise.base.prices import Price
from shardwise.base.yaml_and_json import by_dotted_key
from shardwise.estimates.device_peaks import devices_per_chip
from shardwise.runs.events import number, seconds_of
from shardwise.runs.layout_spans import LayoutSpan, spans_text
from shardwise_watch.curve_points import AXES, axis_places, curve_differences, metric_points
from shardwise_watch.event_text import event_text
from shardwise_watch.lost_time import CAUSES
from shardwise_watch.report.loads import load_maps
from shardwise_watch.run import RunView
from shardwise_watch.run_snapshot import run_row
from shardwise_watch.step_metrics import (
    PARTS,
    REPORT_CURVES,
    STEP_METRICS,
    CurveColumn,
    finite_values,
    ranges_of_equal_counts,
    reduce_to_columns,
)

SCHEMA = 1
_COLUMNS = 120  # columns of a curve: about three pixels of the page's charts each
_MOST_EVENTS = {"checkpoint": 60, "eval": 60, "start": math.inf, "stop": math.inf, "ended": math.inf}
"""Number of events of a kind that are listed, the last ones; starts and ends tell the story of the run."""
_MOST_OTHER_EVENTS = 120
_RANK_FACTS = ("rank", "host", "place", "work_seconds", "relative", "memory_bytes")
_LISTED_EVENTS = (
    "start", "resume", "checkpoint", "warning", "compile", "stop", "ended", "eval", "eval_set", "eval_task",
)  # fmt: skip
_RECORDED = ("tokens", "tokens_per_second", "peak_tokens_per_second", "tokens_per_second_per_device", "mfu")
"""Numbers of the last step that stand at the top of the page."""

_MARKS = re.compile(r"\s*(?:</?s>|<[be]os>|<pad>|<\|\w+\|>|<end_of_turn>|\[(?:SEP|CLS|PAD)\])\s*")
"""Marks of tokenizers for the beginning and the end of a text."""
_FEW_PERCENT = 0.5  # percent of the time below which a loss of it is not written as a number


def report_numbers(run: RunView, price: Price | None = None) -> dict[str, Any]:
    """Collect the numbers of a report on one run, of which all steps were read; `price` replaces that of its keys."""
    series = run.series
    scores = _task_scores(run)
    layouts = run.layouts
    events = _events(run)
    listed = _last_of_each_kind(events)
    is_timed = run.lost.whole > 0
    diverged = {metric.name: _not_finite(run, metric.name) for metric in STEP_METRICS if metric.is_in_every_step}
    report = {
        "schema": SCHEMA,
        **run_row(run),
        "created": _stamp(time.time()),
        "failure": None if run.failure is None else run.failure.lines(run.path),
        "sample": _MARKS.sub("\n", str(run.results.get("sample") or "")).strip(),
        **_cost(run, price),
        "numbers": _headline(run),
        "places": _places(run),
        "curves": {metric.name: curve_columns(series.steps, series.numbers[metric.name]) for metric in REPORT_CURVES},
        "source_curves": {name: curve_columns(series.steps, losses) for name, losses in series.sources.items()},
        "balance_curves": {name: curve_columns(series.steps, losses) for name, losses in series.balance.items()},
        "load_maps": load_maps(run),
        "not_finite": {name: steps for name, steps in diverged.items() if steps is not None},
        "evaluations": _spread(_evaluations(run)),
        "set_curves": _as_curves(_set_losses(run)),
        "task_curves": {metric: _as_curves(tasks) for metric, tasks in scores.items() if "_stderr" not in metric},
        "tasks": _tasks(scores),
        "layouts": [[span.steps_before, span.layout] for span in layouts],
        **_split(run, layouts),
        "split_by_step": _split_by_step(run),
        "memory_bytes": _amounts(run.last.get("memory_bytes")),
        "memory_by_layout": {layout: _amounts(memory) for layout, memory in run.memory_by_layout.items()},
        "communication_bytes": _amounts(run.last.get("communication_bytes")),
        "lost_seconds": {cause: _finite(run.lost.by_cause.get(cause)) or 0.0 for cause in CAUSES},
        "lost_steps": run.lost.steps,
        "seconds": run.lost.whole if is_timed else None,
        "useful_seconds": run.lost.useful if is_timed else None,
        "starts": run.lost.starts,
        "later_starts": [
            [steps_before, "continuation" if is_continuation else "restart"]
            for steps_before, is_continuation in run.lost.later_starts
        ],
        "later_starts_text": run.lost.later_starts_text,
        "ranks": [{name: getattr(view, name) for name in _RANK_FACTS} for view in run.ranks()],
        "events": listed,
        "events_left_out": len(events) - len(listed),
        "timeline": _timeline(run, events),
        "layout": run.start.get("layout") or {},
        "precision": run.start.get("precision") or {},
        "config": redaction.without_secrets(run.config),
        "environment": redaction.without_secrets(run.environment),
    }
    return {**report, "verdict": verdict(report)}


def compare_runs(a: RunView, *others: RunView) -> dict[str, Any]:
    """Compare runs with the first one: largest differences of training loss, keys of configuration, losses, curves.

    A difference is relative to the other run; that of the curves is the other run's loss minus A's. Steps at which a
    loss is no finite number are counted by themselves. The curves reach from the first to the last step that all have.
    """
    runs = (a, *others)
    pairs = [_pair(a, b) for b in others]
    steps = sorted(set.intersection(*(set(run.series.steps) for run in runs)))
    losses = {x: [metric_points(run.series, "loss", x) for run in runs] for x in AXES}
    layouts = [spans_text(run.layouts) for run in runs]
    return {
        # Of two runs these are the numbers of their only pair.
        **(pairs[0] if len(pairs) == 1 else {}),
        "pairs": pairs,
        "curves": [_curves_between(run, steps[0], steps[-1]) for run in runs] if steps else [],
        "losses": _compared_losses(runs, steps),
        "config": config_differences(*(run.config for run in runs)),
        # They are shown where all are known, and not all equal.
        "layouts": layouts if all(layouts) and len(set(layouts)) > 1 else None,
        "differences": {
            x: [_as_curve(curve_differences(points, of_a, x)) for points in of_others]
            for x, (of_a, *of_others) in losses.items()
        },
    }


def _places(run: RunView) -> list[list[float | None]]:
    """Return [step, tokens, seconds of training] at the first step and at the end of each column; None if unknown."""
    steps = run.series.steps
    ends = [0, *(stop - 1 for _, stop in ranges_of_equal_counts(len(steps), _COLUMNS))] if steps else []
    places = [axis_places(run.series, x) for x in AXES]
    return [[_finite(of_axis[at]) for of_axis in places] for at in dict.fromkeys(ends)]


def _pair(a: RunView, b: RunView) -> dict[str, Any]:
    losses_of_b = dict(_losses(b))
    common: list[dict[str, Any]] = [
        {"step": step, "a": loss, "b": losses_of_b[step]} for step, loss in _losses(a) if step in losses_of_b
    ]
    comparable = []
    not_finite = []
    for pair in common:
        if math.isfinite(pair["a"]) and math.isfinite(pair["b"]):
            comparable.append({"difference": relative_difference(pair["a"], pair["b"]), **pair})
        else:
            not_finite.append(pair)
    return {
        "steps": len(common),
        "largest": max(comparable, key=lambda pair: pair["difference"], default=None),
        "not_finite": {"steps": len(not_finite), **not_finite[0]} if not_finite else None,
    }


def _losses(run: RunView) -> Iterable[tuple[int, float]]:
    return zip(run.series.steps, run.series.numbers["loss"], strict=True)


def config_differences(*configs: Mapping[str, Any]) -> list[list[Any]]:
    """Return [key, its value in each] of each key by which the reported runs differ, without secrets."""
    flat = [by_dotted_key(redaction.without_secrets(config)) for config in configs]
    rows = [[key, *(keys.get(key) for keys in flat)] for key in dict.fromkeys(key for keys in flat for key in keys)]
    return [row for row in rows if any(value != row[1] for value in row[2:])]


def _curves_between(run: RunView, first: int, last: int) -> dict[str, Any]:
    return {
        "loss": _as_curve({step: loss for step, loss in _losses(run) if first <= step <= last}),
        "evaluations": _spread([point for point in _evaluations(run) if first <= point[0] <= last]),
    }


def _compared_losses(runs: Sequence[RunView], common: Sequence[int]) -> list[list[Any]]:
    """Return [name, loss of each run] of the last common step, of the last steps and of the last evaluations."""
    losses = [dict(_losses(run)) for run in runs]
    rows = [
        [f"loss at step {step:,}, the last in common", *(run_losses[step] for run_losses in losses)]
        for step in common[-1:]
    ]
    if len({run.step for run in runs}) > 1:
        steps = listing(f"{run.step:,}" for run in runs)
        rows.append([f"final loss (step {steps})", *map(_final_loss, runs)])
    evaluated = [_evaluations(run) for run in runs]
    if any(evaluated):
        rows.append(["last evaluation", *(points[-1][1] if points else None for points in evaluated)])
    return rows


def _evaluations(run: RunView) -> list[list[Any]]:
    """Return [step, loss] of each evaluation."""
    return [[event.get("step"), event["loss"]] for event in run.evaluations if _known(event.get("loss"))]


def relative_difference(a: float, b: float) -> float:
    """Return the difference of a run's number `a` from `b`, relative to `b`."""
    if b:
        return abs(a - b) / abs(b)
    return math.inf if a else 0.0


def curve_columns(steps: Sequence[float], values: Sequence[float], count: int = _COLUMNS) -> list[CurveColumn]:
    """Reduce a report's curve to at most `count` columns of equally many values, without columns of no finite one."""
    all_columns = reduce_to_columns(steps, values, ranges_of_equal_counts(len(steps), count))
    return [column for column in all_columns if column is not None]


_Points = dict[str, dict[int, float]]  # value at each step of each name; of a step that was done again, the last one


def _set_losses(run: RunView) -> _Points:
    losses: _Points = {}
    for event in run.set_evaluations:
        if _known(event.get("loss")):
            losses.setdefault(str(event.get("set")), {})[event["step"]] = event["loss"]
    return losses


def _task_scores(run: RunView) -> dict[str, _Points]:
    """Return the scores of each task by metric, and their standard errors by `METRIC_stderr`."""
    scores: dict[str, _Points] = {}
    for event in run.task_evaluations:
        for key, value in _amounts(event.get("metrics")).items():
            # The part after the comma names a filter of answers.
            metric, _, answers = key.partition(",")
            name = metric if answers in ("", "none") else f"{metric} ({answers})"
            scores.setdefault(name, {}).setdefault(str(event.get("task")), {})[event["step"]] = value
    return scores


def _tasks(scores: Mapping[str, _Points]) -> list[dict[str, Any]]:
    rows = []
    for metric, tasks in scores.items():
        errors = scores.get("_stderr (".join(metric.split(" (")) if " (" in metric else f"{metric}_stderr", {})
        for task, points in tasks.items() if "_stderr" not in metric else ():
            (first_step, first), *_, (step, score) = [*points.items()] * 2
            row = {"task": task, "metric": metric, "step": step, "score": score}
            rows.append({**row, "stderr": errors.get(task, {}).get(step), "first_step": first_step, "first": first})
    return sorted(rows, key=lambda row: str(row["task"]))


def _cost(run: RunView, price: Price | None) -> dict[str, Any]:
    hours = _finite(run.lost.device_seconds / 3600)
    text = run.section("log").get("price")
    price = price or (None if text is None else Price.of(str(text), f"log.price of {run.name}"))
    sizes = [len(node.ranks) for node in run.nodes(run.ranks())]
    if price is None or not hours or not sizes:
        return {"device_hours": hours, "cost": None}
    # A chip in use is paid as a whole.
    chips = sum(-(-size // devices_per_chip(str(run.start.get("device")))) for size in sizes)
    paid = {"device": sum(sizes), "chip": chips, "node": len(sizes)}[price.unit]
    cost = {"amount": hours * paid / sum(sizes) * price.amount, "currency": price.currency, "price": str(price)}
    return {"device_hours": hours, "cost": cost}


def _as_curve(points: Mapping[Any, float]) -> list[CurveColumn]:
    return curve_columns([*points], [*points.values()])


def _as_curves(points: _Points) -> dict[str, list[CurveColumn]]:
    return {name: _as_curve(values) for name, values in points.items()}


def _spread(points: Sequence[list[Any]]) -> list[list[Any]]:
    """Choose at most `_COLUMNS` of the points, evenly, with the last one."""
    # Counted from the end, so that the last point is among the chosen ones.
    every = -(-len(points) // _COLUMNS) or 1
    return [*points[::-1][::every]][::-1]


def _not_finite(run: RunView, name: str) -> dict[str, Any] | None:
    """Return the steps at which a number is not finite; None without one, or if the run never recorded the number."""
    steps = run.series.steps
    values = run.series.numbers[name]
    not_finite = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    is_never_recorded = len(not_finite) == len(steps) and run.last.get(name) is None
    if not not_finite or is_never_recorded:
        return None
    return {"steps": len(not_finite), "first": not_finite[0], "last": not_finite[-1]}


def _headline(run: RunView) -> dict[str, Any]:
    losses = finite_values(run.series.numbers["loss"])
    terms = run.start.get("mfu_terms") or {}
    evaluated = run.evaluations[-1].get("loss") if run.evaluations else None
    return {
        "final_loss": _final_loss(run),
        "least_loss": min(losses, default=None),
        "final_eval_loss": None if evaluated is None else number(evaluated),
        **{name: _finite(run.last.get(name)) for name in _RECORDED},
        "step_seconds": _finite(run.step_seconds),
        "step_seconds_steps": len(run.recent_step_seconds),
        "mfu_attention": terms.get("attention"),
        "peak_flops_per_device": _finite(terms.get("peak_flops_per_device")),
        "parameters": _finite(run.start.get("parameters")),
        "device": run.start.get("device"),
        "world": run.start.get("ranks"),
        "goodput": _finite(run.goodput),
        "warnings": sum(event.get("event") == "warning" for event in run.events),
    }


def _final_loss(run: RunView) -> float | None:
    values = run.series.numbers["loss"]
    is_known = bool(values) and (math.isfinite(values[-1]) or run.last.get("loss") is not None)
    return values[-1] if is_known else None


def _split(run: RunView, layouts: Sequence[LayoutSpan]) -> dict[str, Any]:
    """Return the mean seconds of each part of a step, and the steps and the layout that the mean is of.

    Steps of another layout have other parts, so only those of the last layout that took a step count.
    """
    steps = run.series.steps
    last_step = steps[-1] if steps else 0
    span = next((span for span in reversed(layouts) if span.steps_before < last_step), None)
    begin = 0 if span is None else bisect_right(steps, span.steps_before)
    return {
        "split_seconds": run.series.mean_parts(begin),
        "split_steps": [steps[begin], last_step] if steps else None,
        "split_layout": None if span is None else span.layout,
    }


def _split_by_step(run: RunView) -> list[list[float]]:
    """Return [step, mean seconds of each of `PARTS` …] of each column; [] if no step recorded them."""
    rows = []
    for begin, stop in ranges_of_equal_counts(len(run.series.steps), _COLUMNS):
        if means := run.series.mean_parts(begin, stop):
            rows.append([run.series.steps[stop - 1], *(means.get(name, 0.0) for name in PARTS)])
    return rows


def _events(run: RunView) -> list[dict[str, Any]]:
    evaluations = [{**event, "event": "eval"} for event in run.evaluations]
    events = []
    for event in (*run.all_events(), *evaluations):
        if event.get("event") in _LISTED_EVENTS:
            at = _finite(seconds_of(event))
            time = None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
            step = event["step"] if isinstance(event.get("step"), int) else None
            events.append({"kind": event["event"], "time": time, "at": at, "step": step, "text": event_text(event)})
    return sorted(events, key=lambda event: event["at"] or 0.0)


def _last_of_each_kind(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    room: dict[str, float] = {}
    kept = []
    # From the end: of each kind the newest events have room.
    for event in reversed(events):
        kind = event["kind"]
        room[kind] = room.get(kind, _MOST_EVENTS.get(kind, _MOST_OTHER_EVENTS)) - 1
        if room[kind] >= 0:
            kept.append(event)
    return kept[::-1]


def _timeline(run: RunView, events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the spans of training and the times of events, in seconds since the first event; None without a time."""
    timed = [event for event in events if event["at"] is not None]
    if not timed:
        return None
    first = timed[0]["at"]
    training = []
    begins = [seconds_of(event) for event in run.events if event.get("event") == "start"]
    next_begins = [*begins[1:], math.inf]
    last_steps = [*run.before_starts[1:], seconds_of(run.last)]
    # Not strict: there may be no start, while the last step always has a time.
    for begin, next_begin, last_step in zip(begins, next_begins, last_steps, strict=False):
        signs = [event["at"] for event in timed if begin <= event["at"] < next_begin and event["kind"] != "ended"]
        # A start whose event has no time has no sign either.
        if signs:
            # A start that was killed wrote steps after its last event; before its first step `last_step` is older.
            end = max(*signs, begin, last_step if last_step >= begin else begin)
            training.append([begin - first, end - first])
    kinds = ("checkpoint", "eval", "warning", "ended")
    marks = {kind: [event["at"] - first for event in timed if event["kind"] == kind] for kind in kinds}
    last = max([timed[-1]["at"] - first, *(end for _, end in training)])
    return {"first": _stamp(first), "seconds": last, "training": training, "marks": marks}


def _finite(value: Any) -> Any:
    return value if _known(value) else None


def _amounts(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): amount for name, amount in value.items() if _known(amount)}


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def verdict(report: Mapping[str, Any]) -> str:
    """Say on top of the report how far a run came, how long it took, at which loss it is, and what time was lost."""
    done = _steps_text(report)
    seconds = report["seconds"]
    time = "" if seconds is None else f" in {units.duration(seconds)}"
    return "; ".join(filter(None, [f"{done}{time}{_loss_text(report['numbers'])}", *_lost_texts(report)])) + "."


def _steps_text(report: Mapping[str, Any]) -> str:
    step = report["step"]
    state = report["state"]
    total = report["steps"]
    done = f"{step:,} of {total:,} steps" if total and total != step else units.counted(step, "step")
    match state:
        case "finished":
            return f"Finished {done}"
        case "failed" | "stopped" | "killed":
            was = "Was killed" if state == "killed" else state.capitalize()
            return f"{was} after {done}" if step else f"{was} before the first step"
    return f"Is {state}, with {done} done"


def _loss_text(numbers: Mapping[str, Any]) -> str:
    final = numbers["final_loss"]
    if final is None:
        return ""
    evaluated = numbers["final_eval_loss"]
    evaluation = "" if evaluated is None else f" (evaluation {_loss_number(evaluated)})"
    return f" at loss {_loss_number(final)}{evaluation}"


def _lost_texts(report: Mapping[str, Any]) -> list[str]:
    if report["seconds"] is None or not report["starts"]:
        return []
    restarts = report["later_starts_text"] or "no restarts"
    percent = 100 * (1 - report["useful_seconds"] / report["seconds"])
    share = f"{percent:.1f}%" if percent >= _FEW_PERCENT else f"less than {_FEW_PERCENT:g}%"
    return [restarts, f"{share} of the time was lost"]


def _loss_number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.4g}"
