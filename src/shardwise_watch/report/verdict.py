"""The sentence with which the report of a run opens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardwise.base import units

_FEW_PERCENT = 0.5
"""Percent of the time below which a loss of it is not written as a number."""


def verdict(report: Mapping[str, Any]) -> str:
    """Say on top of the report how far a run came, how long it took, at which loss it is, and what time was lost.

    Args:
        report: result of `report_numbers`.
    """
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
    evaluation = "" if evaluated is None else f" (evaluation {_number(evaluated)})"
    return f" at loss {_number(final)}{evaluation}"


def _lost_texts(report: Mapping[str, Any]) -> list[str]:
    """Say how often the run was started again, and which share of its time was lost; [] if its time is unknown."""
    if report["seconds"] is None or not report["starts"]:
        return []
    restarts = report["later_starts_text"] or "no restarts"
    percent = 100 * (1 - report["useful_seconds"] / report["seconds"])
    share = f"{percent:.1f}%" if percent >= _FEW_PERCENT else f"less than {_FEW_PERCENT:g}%"
    return [restarts, f"{share} of the time was lost"]


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.4g}"
