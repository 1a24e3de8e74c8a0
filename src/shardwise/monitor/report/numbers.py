"""Every number of a report, as values of JSON: the page and the pictures draw these and derive nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardwise.monitor.lost import CAUSES, seconds_of
from shardwise.monitor.run import RankView, Run
from shardwise.monitor.series import PARTS
from shardwise.monitor.summary import row
from shardwise.redaction import without_secrets

SCHEMA = 1
CURVES = ("loss", "lr", "grad_norm", "param_norm", "tokens_per_second", "mfu", "step_seconds", "bubble", "loss_spike")
_POINTS = 300
"""Columns of a curve; each shows its smallest and its largest value, so that spikes stay visible."""
_MOST_EVENTS = 300
_TOLD = {
    "start": "start",
    "resume": "resume",
    "checkpoint": "checkpoint",
    "warning": "warning",
    "compile": "compile",
    "stop": "stop",
}


def report_of(run: Run) -> dict[str, Any]:
    """All that a report tells of one run, read whole."""
    ranks = run.ranks()
    return {
        "schema": SCHEMA,
        **row(run),
        "created": _stamp(time.time()),
        "numbers": _headline(run),
        "curves": {name: thinned(run.series.steps, run.series.numbers[name]) for name in CURVES},
        "evaluations": [
            [event.get("step"), event.get("loss")] for event in run.evaluations if _known(event.get("loss"))
        ],
        "split_seconds": _split(run),
        "memory_bytes": _amounts(run.last.get("memory_bytes")),
        "communication_bytes": _amounts(run.last.get("communication_bytes")),
        "lost_seconds": {cause: _finite(run.lost.by_cause.get(cause)) or 0.0 for cause in CAUSES},
        "lost_steps": run.lost.steps,
        "seconds": _finite(run.lost.whole) or 0.0,
        "useful_seconds": _finite(run.lost.useful) or 0.0,
        "starts": run.lost.starts,
        "ranks": [_rank(view) for view in ranks],
        "events": _events(run),
        "layout": run.start.get("layout") or {},
        "precision": run.start.get("precision") or {},
        "config": without_secrets(run.config),
        "environment": without_secrets(run.environment),
    }


def comparison(a: Run, b: Run) -> dict[str, Any]:
    """How two runs differ: the largest difference of training loss, relative to B, and the keys of configuration."""
    others = dict(zip(b.series.steps, b.series.numbers["loss"], strict=True))
    both = [(step, loss, others[step]) for step, loss in _points(a) if step in others]
    largest: dict[str, Any] | None = None
    for step, loss, other in both:
        found = difference(loss, other)
        if not math.isnan(found) and (largest is None or found > largest["difference"]):
            largest = {"difference": found, "step": step, "a": loss, "b": other}
    mine, theirs = (dict(_flat(without_secrets(run.config))) for run in (a, b))
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    return {
        "steps": len(both),
        "largest": largest,
        "config": [[key, mine.get(key), theirs.get(key)] for key in keys],
    }


def difference(a: float, b: float) -> float:
    """Of `a` from `b`, relative to `b`."""
    return abs(a - b) / abs(b) if b else math.inf if a else 0.0


def thinned(steps: Sequence[int], values: Sequence[float], columns: int = _POINTS) -> list[list[float]]:
    """The curve as at most two points a column, its smallest and its largest value; [[step, value], …] without NaN."""
    known = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if len(known) <= 2 * columns:
        return [[step, value] for step, value in known]
    found: list[tuple[int, float]] = []
    for column in range(columns):
        part = known[column * len(known) // columns : (column + 1) * len(known) // columns]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        found += sorted(ends)
    return [[step, value] for step, value in [known[0], *found[1:-1], known[-1]]]


def _headline(run: Run) -> dict[str, Any]:
    """The numbers at the top."""
    losses = [value for value in run.series.numbers["loss"] if math.isfinite(value)]
    terms = run.start.get("mfu_terms") or {}
    return {
        "final_loss": losses[-1] if losses else None,
        "least_loss": min(losses, default=None),
        "final_eval_loss": _finite(run.evaluations[-1].get("loss")) if run.evaluations else None,
        "tokens": _finite(run.last.get("tokens")),
        "tokens_per_second": _finite(run.last.get("tokens_per_second")),
        "peak_tokens_per_second": _finite(run.last.get("peak_tokens_per_second")),
        "tokens_per_second_per_device": _finite(run.last.get("tokens_per_second_per_device")),
        "step_seconds": _finite(run.step_seconds),
        "mfu": _finite(run.last.get("mfu")),
        "mfu_attention": terms.get("attention"),
        "peak_flops_per_device": _finite(terms.get("peak_flops_per_device")),
        "parameters": _finite(run.start.get("parameters")),
        "device": run.start.get("device"),
        "world": run.start.get("ranks"),
        "goodput": _finite(run.goodput),
        "warnings": sum(event.get("event") == "warning" for event in run.events),
    }


def _split(run: Run) -> dict[str, float]:
    """The mean seconds of each part of a step."""
    means = {}
    for name in PARTS:
        known = [value for value in run.series.parts[name] if math.isfinite(value)]
        if known:
            means[name] = sum(known) / len(known)
    return means


def _rank(view: RankView) -> dict[str, Any]:
    return {
        "rank": view.rank,
        "host": view.host,
        "place": dict(view.place),
        "work_seconds": view.work_seconds,
        "relative": view.relative,
        "memory_bytes": view.memory_bytes,
    }


def _events(run: Run) -> list[dict[str, Any]]:
    """What happened, in the order of time; of very many the last ones, and all starts and stops."""
    told = [event for event in run.events if event.get("event") in _TOLD]
    kept = {id(event) for event in told[-_MOST_EVENTS:]}
    found = [
        {"kind": event["event"], **_when(event), "text": _text(event)}
        for event in told
        if id(event) in kept or event["event"] in ("start", "stop")
    ]
    for event in run.evaluations[-_MOST_EVENTS:]:
        text = f"evaluation loss {event['loss']:.4f}" if _known(event.get("loss")) else "evaluation"
        found.append({"kind": "eval", **_when(event), "text": text})
    return sorted(found, key=lambda event: event["at"] or 0.0)


def _when(event: Mapping[str, Any]) -> dict[str, Any]:
    """When an event was recorded, as text and in seconds since the epoch, and after which step."""
    at = seconds_of(event)
    told, step = event.get("time"), event.get("step")
    return {
        "time": told if isinstance(told, str) else None,
        "at": None if math.isnan(at) else at,
        "step": step if isinstance(step, int) else None,
    }


def _text(event: Mapping[str, Any]) -> str:
    kind = event["event"]
    if kind == "warning":
        return str(event.get("text", ""))
    if kind == "stop":
        return str(event.get("reason", ""))
    if kind == "checkpoint":
        return f"training waited {_finite(event.get('blocked_seconds')) or 0.0:.2f} s"
    if kind == "compile":
        return f"{event.get('graphs')} graphs, {event.get('hits')} from the cache"
    if kind == "resume":
        return f"loaded in {_finite(event.get('load_seconds')) or 0.0:.2f} s"
    return f"after {_finite(event.get('seconds_before_training')) or 0.0:.1f} s"


def _points(run: Run) -> Iterable[tuple[int, float]]:
    return zip(run.series.steps, run.series.numbers["loss"], strict=True)


def _flat(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """The keys of nested mappings with dots between."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{path}.{key}" if path else str(key))


def _finite(value: Any) -> Any:
    """The value where it is a finite number, as it was recorded; else None."""
    return value if _known(value) else None


def _amounts(value: Any) -> dict[str, Any]:
    """The finite numbers of a mapping of the record."""
    return {str(name): amount for name, amount in value.items() if _known(amount)} if isinstance(value, Mapping) else {}


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
