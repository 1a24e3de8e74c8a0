"""Events of a run in words, for the screen and the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shardwise.base import units
from shardwise.runs.events import number
from shardwise.runs.layout_spans import short_layout


def event_text(event: Mapping[str, Any]) -> str:
    """Say what an event tells beside its kind and its step."""

    def told(key: str, form: str, shown: Callable[[float], object] = units.duration) -> str:
        value = event.get(key)
        return form.format(shown(value)) if isinstance(value, int | float) and math.isfinite(value) else ""

    layout, metrics = (value if isinstance(value, Mapping) else {} for value in map(event.get, ("layout", "metrics")))
    match event.get("event"):
        case "warning" | "stop" as kind:
            return str(event.get("text" if kind == "warning" else "reason", ""))
        case "start":
            parts = [short_layout(layout), told("seconds_before_training", "training began after {:.1f} s", float)]
        case "checkpoint":
            parts = [told("bytes", "{}", units.size), told("blocked_seconds", "training waited {}")]
        case "compile":
            graphs = f"{event.get('graphs', 0)} graphs: {event.get('hits', 0)} from the cache"
            parts = [graphs, told("seconds", f"{event.get('misses', 0)} compiled in {{}}")]
        case "resume":
            changes = event.get("changes")
            changed = [f"changed: {'; '.join(map(str, changes))}"] if changes and isinstance(changes, list) else []
            parts = [told("load_seconds", "loaded in {:.2f} s", float), *changed]
        case "eval" | "eval_set" as kind:
            name = "evaluation" if kind == "eval" else f"{event.get('set')}:"
            return f"{name} loss {number(event.get('loss')):.4f}"
        case "eval_task":
            parts = [
                f"{key.removesuffix(',none')} {number(metrics[key]):.4f}" for key in metrics if "_stderr" not in key
            ]
            return f"{event.get('task')}: {', '.join(parts)}"
        case "ended":
            job = [f"job {event['job']}"] if event.get("job") else []
            parts = [*job, str(event.get("how", "")), str(event.get("text") or "").partition("\n")[0]]
        case _:
            parts = [f"{name} {value}" for name, value in event.items() if name not in ("event", "time")]
    return ", ".join(filter(None, parts))
