"""Every number of a report, as values of JSON: the page and the pictures draw these and derive nothing.

The ranks of a run as a picture of their layout, and as a table of those that need a look.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

from shardwise.base import units
from shardwise.base.redaction import without_secrets
from shardwise.config.schedules import DEFAULT_SCHEDULE
from shardwise.runs.json_lines import PARTS
from shardwise.runs.lost_time import CAUSES, number, seconds_of
from shardwise.runs.report.chart import attribute
from shardwise.runs.run import RankView, Run
from shardwise.runs.summary import row

SCHEMA = 1
CURVES = ("loss", "lr", "grad_norm", "param_norm", "tokens_per_second", "mfu", "step_seconds", "bubble", "loss_spike")
_ALWAYS_KNOWN = ("loss", "grad_norm")
"""Curves whose value every step records: one that is no finite number tells of a training that diverged."""
_COLUMNS = 120
"""Of a curve."""
_MOST = {"checkpoint": 60, "eval": 60, "start": math.inf, "stop": math.inf, "ended": math.inf}
_MOST_OF_OTHERS = 120
"""Events of a kind that are told: the last ones."""
_TOLD = ("start", "resume", "checkpoint", "warning", "compile", "stop", "ended", "eval")


def report_of(run: Run) -> dict[str, Any]:
    """All that a report tells of one run, read whole."""
    series, happened = run.series, _happened(run)
    told = _last_of_each_kind(happened)
    is_timed = run.lost.whole > 0
    return {
        "schema": SCHEMA,
        **row(run),
        "created": _stamp(time.time()),
        "numbers": _headline(run),
        "curves": {name: columns(series.steps, series.numbers[name]) for name in CURVES},
        "not_finite": {name: found for name in _ALWAYS_KNOWN if (found := _not_finite(run, name))},
        "evaluations": _spread(
            [[event.get("step"), event["loss"]] for event in run.evaluations if _known(event.get("loss"))]
        ),
        "split_seconds": _split(run),
        "split_by_step": _split_by_step(run),
        "memory_bytes": _amounts(run.last.get("memory_bytes")),
        "communication_bytes": _amounts(run.last.get("communication_bytes")),
        "lost_seconds": {cause: _finite(run.lost.by_cause.get(cause)) or 0.0 for cause in CAUSES},
        "lost_steps": run.lost.steps,
        "seconds": run.lost.whole if is_timed else None,
        "useful_seconds": run.lost.useful if is_timed else None,
        "starts": run.lost.starts,
        "ranks": [_rank(view) for view in run.ranks()],
        "events": told,
        "events_left_out": len(happened) - len(told),
        "timeline": _timeline(run, happened),
        "layout": run.start.get("layout") or {},
        "precision": run.start.get("precision") or {},
        "config": without_secrets(run.config),
        "environment": without_secrets(run.environment),
    }


def comparison(a: Run, b: Run) -> dict[str, Any]:
    """How two runs differ: the largest difference of training loss, relative to B, and the keys of configuration.

    Steps at which a loss is no finite number are counted by themselves.
    """
    others = dict(zip(b.series.steps, b.series.numbers["loss"], strict=True))
    both = [
        {"step": step, "a": loss, "b": others[step]}
        for step, loss in zip(a.series.steps, a.series.numbers["loss"], strict=True)
        if step in others
    ]
    finite = [at for at in both if math.isfinite(at["a"]) and math.isfinite(at["b"])]
    odd = [at for at in both if not (math.isfinite(at["a"]) and math.isfinite(at["b"]))]
    found = [{"difference": difference(at["a"], at["b"]), **at} for at in finite]
    mine, theirs = (dict(_flat(without_secrets(run.config))) for run in (a, b))
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    return {
        "steps": len(both),
        "largest": max(found, key=lambda at: at["difference"], default=None),
        "not_finite": {"steps": len(odd), **odd[0]} if odd else None,
        "config": [[key, mine.get(key), theirs.get(key)] for key in keys],
    }


def difference(a: float, b: float) -> float:
    """Of `a` from `b`, relative to `b`."""
    return abs(a - b) / abs(b) if b else math.inf if a else 0.0


def columns(steps: Sequence[int], values: Sequence[float], count: int = _COLUMNS) -> list[list[float]]:
    """The curve in at most that many columns: the last step of each, and its least, mean and largest finite value."""
    found = []
    for begin, end in _cuts(len(steps), count):
        inside = _finite_of(values[begin:end])
        if inside:
            least, largest = min(inside), max(inside)
            mean = min(max(sum(inside) / len(inside), least), largest)  # rounding would put it outside
            found.append([steps[end - 1], least, mean, largest])
    return found


def _cuts(length: int, count: int) -> Iterator[tuple[int, int]]:
    count = min(length, count)
    return ((at * length // count, (at + 1) * length // count) for at in range(count))


def _finite_of(values: Sequence[float]) -> Sequence[float]:
    return values if all(map(math.isfinite, values)) else [value for value in values if math.isfinite(value)]


def _spread(points: Sequence[list[Any]]) -> list[list[Any]]:
    """Of very many points some, evenly, with the last one."""
    every = -(-len(points) // _COLUMNS) or 1
    return [*points[::-1][::every]][::-1]


def _not_finite(run: Run, name: str) -> dict[str, Any] | None:
    """The steps at which a number is not finite; None without one, and where the run never recorded it."""
    steps, values = run.series.steps, run.series.numbers[name]
    found = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    if not found or (len(found) == len(steps) and run.last.get(name) is None):
        return None
    return {"steps": len(found), "first": found[0], "last": found[-1]}


def _headline(run: Run) -> dict[str, Any]:
    """The numbers at the top."""
    losses = _finite_of(run.series.numbers["loss"])
    terms = run.start.get("mfu_terms") or {}
    return {
        "final_loss": _final_loss(run),
        "least_loss": min(losses, default=None),
        "final_eval_loss": _number(run.evaluations[-1].get("loss")) if run.evaluations else None,
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


def _final_loss(run: Run) -> float | None:
    """Of the last step, NaN too; None where no step recorded one."""
    values = run.series.numbers["loss"]
    is_known = bool(values) and (math.isfinite(values[-1]) or run.last.get("loss") is not None)
    return values[-1] if is_known else None


def _split(run: Run) -> dict[str, float]:
    """The mean seconds of each part of a step."""
    means = {}
    for name in PARTS:
        known = [value for value in run.series.parts[name] if math.isfinite(value)]
        if known:
            means[name] = sum(known) / len(known)
    return means


def _split_by_step(run: Run) -> list[list[float]]:
    """The step of each column, and the mean seconds of each of `PARTS` in it; [] where no step recorded them."""
    found = []
    for begin, end in _cuts(len(run.series.steps), _COLUMNS):
        parts = [_finite_of(run.series.parts[name][begin:end]) for name in PARTS]
        if any(parts):
            found.append([run.series.steps[end - 1], *(sum(part) / len(part) if part else 0.0 for part in parts)])
    return found


def _rank(view: RankView) -> dict[str, Any]:
    return {
        "rank": view.rank,
        "host": view.host,
        "place": dict(view.place),
        "work_seconds": view.work_seconds,
        "relative": view.relative,
        "memory_bytes": view.memory_bytes,
    }


def _happened(run: Run) -> list[dict[str, Any]]:
    """All that is told of a run's events, its evaluations and the ends of its job's starts, in the order of time."""
    ends = [{"event": "ended", **line} for line in run.restarts()]
    evaluations = [{**event, "event": "eval"} for event in run.evaluations]
    found = [
        {"kind": event["event"], **_when(event), "text": _text(event)}
        for event in (*run.events, *evaluations, *ends)
        if event.get("event") in _TOLD
    ]
    return sorted(found, key=lambda event: event["at"] or 0.0)


def _last_of_each_kind(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of very many events the last ones of each kind."""
    left: dict[str, float] = {}
    kept = []
    for event in reversed(events):
        kind = event["kind"]
        left[kind] = left.get(kind, _MOST.get(kind, _MOST_OF_OTHERS)) - 1
        if left[kind] >= 0:
            kept.append(event)
    return kept[::-1]


def _timeline(run: Run, events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """When the run trained and when something happened, in seconds since its first event; None without any time."""
    timed = [event for event in events if event["at"] is not None]
    if not timed:
        return None
    first, training = timed[0]["at"], []
    begins = [seconds_of(event) for event in run.events if event.get("event") == "start"]
    last_steps = [*run.before_starts[1:], seconds_of(run.last)]
    for begin, until, last_step in zip(begins, [*begins[1:], math.inf], last_steps, strict=False):  # there may be none
        signs = [event["at"] for event in timed if begin <= event["at"] < until and event["kind"] != "ended"]
        if signs:  # none where the start has no time
            training.append([begin - first, max(*signs, begin, last_step if last_step >= begin else begin) - first])
    kinds = ("checkpoint", "eval", "warning", "ended")
    marks = {kind: [event["at"] - first for event in timed if event["kind"] == kind] for kind in kinds}
    last = max([timed[-1]["at"] - first, *(end for _, end in training)])
    return {"first": _stamp(first), "seconds": last, "training": training, "marks": marks}


def _when(event: Mapping[str, Any]) -> dict[str, Any]:
    """When an event was recorded, as text and in seconds since the epoch, and after which step."""
    at, step = seconds_of(event), event.get("step")
    if event.get("event") == "ended":
        at = number(event.get("began")) + number(event.get("seconds"))
    return {
        "time": None if math.isnan(at) else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds"),
        "at": None if math.isnan(at) else at,
        "step": step if isinstance(step, int) else None,
    }


def _text(event: Mapping[str, Any]) -> str:
    match event["event"]:
        case "warning":
            return str(event.get("text", ""))
        case "stop":
            return str(event.get("reason", ""))
        case "checkpoint":
            size = units.size(event["bytes"]) if _known(event.get("bytes")) else ""
            return ", ".join(filter(None, [size, _seconds("training waited {:.2f} s", event.get("blocked_seconds"))]))
        case "compile":
            return f"{event.get('graphs')} graphs, {event.get('hits')} from the cache"
        case "resume":
            return _seconds("loaded in {:.2f} s", event.get("load_seconds"))
        case "eval":
            return f"evaluation loss {number(event.get('loss')):.4f}"
        case "ended":
            told = [f"job {event['job']}" if event.get("job") else "", str(event.get("how", ""))]
            told.append(str(event.get("text") or "").partition("\n")[0])
            return ", ".join(filter(None, told))
    return _seconds("training began after {:.1f} s", event.get("seconds_before_training"))


def _seconds(text: str, value: Any) -> str:
    return text.format(value) if _known(value) else ""


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


def _number(value: Any) -> float | None:
    """A number of the record, which may be NaN; None where there is none."""
    return None if value is None else number(value)


def _amounts(value: Any) -> dict[str, Any]:
    """The finite numbers of a mapping of the record."""
    return {str(name): amount for name, amount in value.items() if _known(amount)} if isinstance(value, Mapping) else {}


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


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
        told.append(f"schedule {parallel.get('schedule', DEFAULT_SCHEDULE)}{stages}")
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
