"""The prediction for a layout as rows of text: in a dry run for other machines, and before a job is submitted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardwise.base import units
from shardwise.config import Config, Layout, tokens_of_run
from shardwise.estimates.memory import RESERVED
from shardwise.estimates.memory_choice import too_large_text
from shardwise.train.summary import PredictedStep
from shardwise_plan.device_specs import Cluster, pipeline_warnings
from shardwise_plan.plan import Plan, predict_layout


def predicted_step(config: Config, layout: Layout, cluster: Cluster) -> PredictedStep:
    """Return the prediction of a dry run for a layout on a cluster, whether or not it fits."""
    plan = predict_layout(config, layout, cluster)
    seconds, facts = (None, None) if plan is None else (plan.time.total, plan_facts(plan))
    rows = predicted_rows(plan) + pipeline_warnings(str(cluster), layout.pipeline)
    device = cluster.device
    problems = []
    if plan is not None and plan.memory.total > device.memory:
        problems.append(too_large_text(plan.memory.total, device.memory, device.name))
    return PredictedStep(str(cluster), rows, seconds, facts, problems)


def predicted_rows(plan: Plan | None) -> list[tuple[str, str]]:
    """The time of a step on a cluster, its parts, and the memory that is left or lacks."""
    if plan is None:
        return [("time", "not known for a model of your own")]
    time = plan.time
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"
    return [
        ("step", f"{units.step_duration(time.total)} predicted, {plan.tokens_per_second:,.0f} tokens/s{mfu}"),
        ("  parts", time.shares()),
        ("  all steps", units.duration(plan.seconds)),
        (
            "  calendar",
            f"{units.duration(plan.calendar.seconds)} with evaluations, checkpoints and failures (goodput "
            f"{plan.calendar.goodput:.1%}), {plan.device_hours:,.0f} device-hours",
        ),
        ("  memory", memory_fit_text(plan)),
    ]


def memory_fit_text(plan: Plan) -> str:
    """Return whether a layout fits on each device of its cluster."""
    state = f"{units.size(plan.headroom)} free{' (tight)' if plan.is_tight else ''}"
    if plan.headroom < 0:
        state = f"does not fit: {units.size(plan.memory.total)} are needed"
    reserve = f"{RESERVED:.0%} of the device's {units.size(plan.cluster.device.memory)}"
    return f"{state} beside a reserve of {reserve} (context, buffers, fragmentation)"


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return the figures of a plan for `--json`."""
    calendar = plan.calendar
    price = plan.cluster.device.price
    return {
        "layout": asdict(plan.choice),
        "data": plan.layout.data,
        "nodes": plan.cluster.nodes,
        "devices": plan.cluster.world,
        "step_seconds": plan.time.total,
        "parts_seconds": dict(plan.time.rows()),
        "steps": plan.config.train.steps,
        "tokens": tokens_of_run(plan.config),
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "memory_bytes": plan.memory.total,
        "headroom_bytes": plan.headroom,
        "may_not_fit": plan.is_tight,
        "days": calendar.seconds / 86_400,
        "goodput": calendar.goodput,
        "checkpoint_minutes": calendar.interval / 60,
        "device_hours": plan.device_hours,
        "cost": plan.cost,
        "currency": None if price is None else price.currency,
        "kilowatt_hours": plan.kilowatt_hours,
    }
