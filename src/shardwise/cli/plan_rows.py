"""The figures of a plan, as cells of a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from shardwise.base import units
from shardwise.base.errors import listing
from shardwise.base.terminal import wrapped
from shardwise.planner.search import Plan

DAY = 86_400
_LEAST_DAYS = 10
"""Days from which on the time of a training is shown in days."""
TIGHT = "(tight): less than 10% of the device's memory is free."
FREED_PARTS = "ZeRO-2 and ZeRO-3: published runs with them took about 15% longer than predicted."
_LEAST_WHOLE_DOLLARS = 100
"""Dollars from which on cents are not shown."""
_ACCURACY_COLUMNS = 80
_ACCURACY_PAGE = "docs/planner.md#how-far-off-it-is"
_PUBLISHED_ERROR = 0.17
"""Size of the error, relative to the measured step, that nine in ten published runs do not exceed: see the page."""
LEAST_RATIO = 1 / (1 + _PUBLISHED_ERROR)
MOST_RATIO = 1 / (1 - _PUBLISHED_ERROR)
"""Ratio of the measured to the predicted time at the two ends of this error."""
RANGE = f"{LEAST_RATIO - 1:+.0%} to {MOST_RATIO - 1:+.0%}"
_PUBLISHED_ACCURACY = (
    f"nine in ten published steps on A100 to GB300 and Trainium1 were predicted within {_PUBLISHED_ERROR:.0%}"
)
_FITTED_ACCURACY = "constants are those of the file; `shardwise plan RUN` compares a run with them"


def time_unit(best: Plan) -> str:
    """Return the unit of the training's time: days would hide how short trainings differ."""
    return "days" if best.seconds >= _LEAST_DAYS * DAY else "hours"


def training_time(plan: Plan, unit: str) -> str:
    return f"{plan.seconds / (DAY if unit == 'days' else 3600):,.1f}"


def free_memory(plan: Plan) -> str:
    return f"{'(tight) ' if plan.is_tight else ''}{units.size(plan.headroom)}"


def dollars(plan: Plan) -> str:
    """The price of the training as a cell; empty if that of the device is unknown."""
    if plan.dollars is None:
        return ""
    return f"{plan.dollars:,.0f}" if plan.dollars >= _LEAST_WHOLE_DOLLARS else f"{plan.dollars:,.2f}"


def costs_legend(best: Plan, unit: str) -> str:
    columns = [unit, "device-hours", *([] if best.dollars is None else ["dollars"])]
    names = ", ".join(f'"{column}"' for column in columns)
    return f"{names} = all steps, without evaluations, checkpoints and restarts"


def frees_parts(plan: Plan) -> bool:
    """Whether a rank frees the gradients or the weights of others."""
    return plan.choice.zero >= 2 and plan.layout.replicas > 1


def has_range(plan: Plan) -> bool:
    """Whether the accuracy of a plan is that of published runs."""
    return _PUBLISHED_ACCURACY in accuracy_text(plan)


def time_range(plan: Plan, unit: str) -> str:
    """Return the times of a training if its prediction errs as those of published runs; empty if these do not count."""
    if not has_range(plan):
        return ""
    time = plan.seconds / (DAY if unit == "days" else 3600)
    return f"{time * LEAST_RATIO:,.1f} to {time * MOST_RATIO:,.1f}"


def price_range(plan: Plan) -> str:
    """Return the prices for these times; empty if the price of the device is unknown."""
    if plan.dollars is None or not has_range(plan):
        return ""
    return f"{plan.dollars * LEAST_RATIO:,.0f} to {plan.dollars * MOST_RATIO:,.0f}"


def range_text(plan: Plan) -> str:
    """Return times and prices of a training with the error of published runs; empty if these do not count."""
    unit = time_unit(plan)
    times = time_range(plan, unit)
    prices = price_range(plan)
    return f"{times} {unit}{f' and {prices} dollars' if prices else ''}" if times else ""


def accuracy_text(plan: Plan) -> str:
    """How far predictions for a plan's device are off."""
    device = plan.cluster.device
    if not device.accuracy:
        return _FITTED_ACCURACY if device.constants else _PUBLISHED_ACCURACY
    if plan.cluster.world == 1:
        return device.accuracy
    # The sentence of a file is on one device.
    return f"{device.accuracy}; {_PUBLISHED_ACCURACY}"


def accuracy(plans: Iterable[Plan], consequence: str = "") -> list[str]:
    """Lines of 80 columns on how far predictions for the devices can be trusted, and the page that says more.

    Args:
        consequence: what the accuracy means for the plans.
    """
    names: dict[str, list[str]] = {}
    for plan in plans:
        names.setdefault(accuracy_text(plan), []).append(plan.cluster.device.name)
    sentences = [f"Accuracy: {text}" for text in names]
    if len(names) > 1:
        sentences = [f"Accuracy for {listing(devices)}: {text}" for text, devices in names.items()]
    sentences[-1] += f"{consequence} ({_ACCURACY_PAGE})"
    return [line for sentence in sentences for line in wrapped(sentence, _ACCURACY_COLUMNS)]


def row(plan: Plan, unit: str) -> tuple[str, ...]:
    time = plan.time
    mfu = plan.mfu
    return (
        plan.text(),
        units.step_duration(time.total),
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
