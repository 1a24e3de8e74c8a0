"""The summary of a run: the JSON of `ls` and `monitor`.

Names of fields are stable within `SCHEMA`.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwise_watch.rank_views import NodeView, RankView
from shardwise_watch.run import RunView, UnreadableRun
from shardwise_watch.step_metrics import STEP_METRIC_NAMES

SCHEMA = 1
"""Version of the JSON. It grows when a field is renamed, removed or changes its meaning, not when one is added."""
_ROW_FIELDS = (
    "run", "path", "state", "reason", "step", "steps", "loss", "tokens_per_second", "mfu", "eta_seconds", "goodput",
    "heard", "parent",
)  # fmt: skip
_RANK_FIELDS = (
    "rank", "host", "pid", "device", "place", "step", "step_seconds", "work_seconds", "relative", "memory_bytes",
    "utilization",
)  # fmt: skip


def run_row(run: RunView | UnreadableRun) -> dict[str, Any]:
    """Summarize a run for a line of `ls`. The row of an unreadable run has the same fields, most of them None."""
    if isinstance(run, UnreadableRun):
        return {
            **dict.fromkeys(_ROW_FIELDS),
            "run": run.name,
            "path": str(run.path.absolute()),
            "state": "unreadable",
            "reason": run.reason,
            "heard": _stamp(run.heard),
        }
    return {
        "run": run.name,
        "path": str(run.path.resolve()),
        "state": run.state,
        "reason": run.reason or None,
        "step": run.step,
        "steps": run.steps,
        "loss": run.last.get("loss"),
        "tokens_per_second": run.last.get("tokens_per_second"),
        "mfu": run.last.get("mfu"),
        "eta_seconds": run.eta_seconds,
        "goodput": run.goodput,
        "heard": _stamp(run.heard),
        "parent": _parent(run),
    }


def _parent(run: RunView) -> dict[str, Any] | None:
    if not run.branch:
        return None
    path = run.branch.get("parent")
    return {
        "run": Path(path).name if isinstance(path, str) else None,
        "path": path,
        "step": run.branch.get("step"),
        "changes": run.branch.get("changes"),
    }


def run_snapshot(run: RunView) -> dict[str, Any]:
    """Describe a run at this moment, as `monitor` prints it."""
    last = run.last
    lost = run.lost
    ranks = run.ranks()
    evaluation = run.evaluations[-1] if run.evaluations else None
    warnings = [event for event in run.events if event.get("event") == "warning"]
    return {
        "schema": SCHEMA,
        "time": _stamp(time.time()),
        "id": run.id,
        **run_row(run),
        "train": {name: last.get(name) for name in STEP_METRIC_NAMES},
        "split_seconds": last.get("split_seconds"),
        "communication_bytes": last.get("communication_bytes"),
        "memory_bytes": last.get("memory_bytes"),
        "straggler": last.get("straggler"),
        "eval": evaluation and {name: evaluation.get(name) for name in ("step", "loss", "perplexity")},
        "failure": run.failure and {**asdict(run.failure), "text": "\n".join(run.failure.lines(run.path))},
        "starts": lost.starts,
        "lost_steps": lost.steps,
        "lost_seconds": lost.by_cause,
        "seconds": lost.whole,
        "warnings": len(warnings),
        "last_warning": warnings[-1].get("text") if warnings else None,
        "ranks": [_rank(view) for view in ranks],
        "nodes": [_node(view) for view in run.nodes(ranks)],
    }


def _rank(view: RankView) -> dict[str, Any]:
    fields = {name: getattr(view, name) for name in _RANK_FIELDS}
    return {**fields, "place": dict(view.place), "heard": _stamp(view.heard)}


def _node(view: NodeView) -> dict[str, Any]:
    facts = asdict(view)
    del facts["devices"]
    return {**facts, "ranks": len(view.ranks)}


def _stamp(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
