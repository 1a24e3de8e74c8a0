"""The figures of a plan, as cells of a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardwise.base import units
from shardwise.planner.search import Plan

DAY = 86_400
_LEAST_DAYS = 10
"""Days from which on the time of a training is shown in days."""


def time_unit(best: Plan) -> str:
    """Return the unit of the training's time: days would hide how short trainings differ."""
    return "days" if best.seconds >= _LEAST_DAYS * DAY else "hours"


def training_time(plan: Plan, unit: str) -> str:
    return f"{plan.seconds / (DAY if unit == 'days' else 3600):,.1f}"


def free_memory(plan: Plan) -> str:
    return f"{'(tight) ' if plan.is_tight else ''}{units.size(plan.headroom)}"


def row(plan: Plan, unit: str) -> tuple[str, ...]:
    time = plan.time
    mfu = plan.mfu
    return (
        plan.text(),
        units.duration(time.total),
        f"{plan.tokens_per_second:,.0f}",
        "" if mfu is None else f"{mfu:.1%}",
        units.size(plan.memory.total),
        free_memory(plan),
        f"{time.bubble / time.total:.1%}",
        f"{time.communication / time.total:.1%}",
        training_time(plan, unit),
        f"{plan.device_hours:,.0f}",
    )


def plan_facts(plan: Plan) -> dict[str, Any]:
    return {
        "layout": asdict(plan.choice),
        "data": plan.layout.data,
        "devices": plan.cluster.world,
        "step_seconds": plan.time.total,
        "parts_seconds": dict(plan.time.rows()),
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "memory_bytes": plan.memory.total,
        "headroom_bytes": plan.headroom,
        "days": plan.seconds / DAY,
        "device_hours": plan.device_hours,
        "dollars": plan.dollars,
    }
