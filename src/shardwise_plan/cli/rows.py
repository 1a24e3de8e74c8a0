"""The figures of a plan, as cells of a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from shardwise.base import units
from shardwise.base.errors import listing
from shardwise.base.terminal import wrapped
from shardwise.config import tokens_of_run
from shardwise_plan.goodput import best_interval
from shardwise_plan.plan import Plan

DAY = 86_400
_LEAST_DAYS = 10
"""Days from which on the time of a training is shown in days."""
TIGHT = '"!": less than 10% of the device\'s memory is free.'
FREED_PARTS = "ZeRO-2 and ZeRO-3: published runs with them took about 10% longer than predicted."
_LEAST_WHOLE_COST = 100
"""Price from which on hundredths are not shown."""
COLUMNS = 80
"""Columns that a plan is printed in."""
_ACCURACY_PAGE = "docs/planner.md#how-far-off-it-is"
_PUBLISHED_ERROR = 0.14
"""Size of the error, relative to the measured step, that nine in ten published runs do not exceed: see the page."""
LEAST_RATIO = 1 / (1 + _PUBLISHED_ERROR)
MOST_RATIO = 1 / (1 - _PUBLISHED_ERROR)
"""Ratio of the measured to the predicted time at the two ends of this error."""
RANGE = f"{LEAST_RATIO - 1:+.0%} to {MOST_RATIO - 1:+.0%}"
_PUBLISHED_ACCURACY = (
    f"nine in ten published steps on A100 to GB300 and Trainium1 were predicted within {_PUBLISHED_ERROR:.0%}"
)
_NOT_COMPARED = "no published run on this device was compared; `shardwise plan RUN` compares one of yours"


def time_unit(best: Plan) -> str:
    """Return the unit of the training's time: days would hide how short trainings differ."""
    return "days" if best.calendar.seconds >= _LEAST_DAYS * DAY else "hours"


def in_unit(seconds: float, unit: str) -> float:
    """Return seconds in days or hours."""
    return seconds / (DAY if unit == "days" else 3600)


def time_text(seconds: float, unit: str) -> str:
    return f"{in_unit(seconds, unit):,.1f}" if math.isfinite(seconds) else "never"


def length_text(seconds: float, unit: str) -> str:
    """Return a time with its unit."""
    return f"{time_text(seconds, unit)} {unit}" if math.isfinite(seconds) else "forever"


def training_time(plan: Plan, unit: str) -> str:
    return time_text(plan.calendar.seconds, unit)


def changed_time(plan: Plan, seconds: float, unit: str) -> str:
    """Return another time of a plan, and how much longer than its own it is."""
    text = time_text(seconds, unit)
    return f"{text} ({seconds / plan.calendar.seconds - 1:+.1%})" if math.isfinite(seconds) else text


def hours_text(plan: Plan) -> str:
    return f"{plan.device_hours:,.0f} device-hours"


def free_memory(plan: Plan) -> str:
    return f"{'!' if plan.is_tight else ''}{units.size(plan.headroom)}"


def cost(plan: Plan) -> str:
    """The price of the training as a cell; empty if that of the device is unknown."""
    if plan.cost is None:
        return ""
    return f"{plan.cost:,.0f}" if plan.cost >= _LEAST_WHOLE_COST else f"{plan.cost:,.2f}"


def currency(plan: Plan) -> str:
    price = plan.cluster.device.price
    return "" if price is None else price.currency


def cost_text(plan: Plan) -> str:
    """The price of the training with its currency; empty if that of the device is unknown."""
    return f"{cost(plan)} {currency(plan)}".strip()


def price_text(plan: Plan) -> str:
    """Return what the price is for; empty if it is unknown."""
    machines, price = plan.cluster, plan.cluster.device.price
    if price is None:
        return ""
    number = units.counted(machines.priced_units, price.unit)
    return (
        f"Price: {price.amount:,.10g} {price.currency} an hour for a {price.unit}, {machines.price_per_hour:,.10g} "
        f"{price.currency} an hour for {number}. A node has {units.counted(machines.per_node, 'device')}."
    )


def network_text(plan: Plan) -> str:
    """The links that a prediction assumes, of one device in one direction."""
    device = plan.cluster.device
    inside = f"{device.node.bandwidth / 1e9:g} GB/s inside a node ({device.node.topology})"
    if device.network is None or plan.cluster.nodes == 1:
        return inside
    between = f"{device.network.bandwidth / 1e9:g} GB/s between nodes ({device.network.topology})"
    return f"{between} and {inside}"


def calendar_text(plan: Plan) -> str:
    """Return the assumptions of the time on the calendar: checkpoints and failures."""
    calendar = plan.calendar
    source = "as the recipe says" if calendar.is_given else "the interval that costs least"
    if calendar.write > calendar.interval + calendar.stall:
        source += f"; storing one takes {units.duration(calendar.write)}, for which the next one waits"
    text = f"checkpoints every {units.duration(calendar.interval)} ({source})"
    if not math.isfinite(calendar.between_failures):
        return f"{text}, no failures: goodput {calendar.goodput:.1%}"
    if calendar.is_given:
        least = best_interval(calendar.stall, calendar.write, calendar.between_failures)
        text = f"{text[:-1]}; every {units.duration(least)} costs least)"
    return (
        f"{text}, a failure every {units.duration(calendar.between_failures)}: goodput {calendar.goodput:.1%}. "
        f"Assumed are {plan.cluster.device.reliability.text()}"
    )


def has_range(plan: Plan) -> bool:
    """Return whether the accuracy of a plan is that of published runs."""
    return _PUBLISHED_ACCURACY in accuracy_text(plan)


def price_range(plan: Plan) -> str:
    """Return the prices for these times; empty if the price of the device is unknown."""
    if plan.cost is None or not has_range(plan):
        return ""
    return f"{plan.cost * LEAST_RATIO:,.0f} to {plan.cost * MOST_RATIO:,.0f} {currency(plan)}"


def range_text(plan: Plan) -> str:
    """Return times and prices of a training with the error of published runs; empty if these do not count."""
    if not has_range(plan):
        return ""
    unit = time_unit(plan)
    time = in_unit(plan.calendar.seconds, unit)
    prices = price_range(plan)
    return f"{time * LEAST_RATIO:,.1f} to {time * MOST_RATIO:,.1f} {unit}{f' and {prices}' if prices else ''}"


def accuracy_text(plan: Plan) -> str:
    """Return the errors of predictions for a plan's device."""
    device = plan.cluster.device
    published = _PUBLISHED_ACCURACY if device.compared_runs else _NOT_COMPARED
    if not device.accuracy:
        return published
    if plan.cluster.world == 1:
        return device.accuracy
    # The sentence of a file is on one device.
    return f"{device.accuracy}; {published}"


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
    return [line for sentence in sentences for line in wrapped(sentence, COLUMNS)]


def figures(plan: Plan, unit: str) -> tuple[str, ...]:
    """The cells of a plan, under the head of `figure_names`."""
    mfu = plan.mfu
    cells = (
        units.step_duration(plan.time.total),
        "" if mfu is None else f"{mfu:.1%}",
        free_memory(plan),
        training_time(plan, unit),
    )
    return cells if plan.cost is None else (*cells, cost(plan))


def figure_names(plan: Plan, unit: str) -> tuple[str, ...]:
    names = ("step", "MFU", "free", unit)
    return names if plan.cost is None else (*names, currency(plan))


def blocks(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str], str]], title: str, indent: int) -> list[str]:
    """Lines of 80 columns: a title with figures to its right, and below it what else there is to say.

    Args:
        head: names of the figures.
        rows: title, figures and further text of each block.
        title: name of the titles.
        indent: columns before the further text.
    """
    widths = [max(map(len, column)) for column in zip(head, *(cells for _, cells, _ in rows), strict=True)]
    room = COLUMNS - sum(widths) - 2 * len(widths)

    def line(text: str, cells: Sequence[str]) -> str:
        return f"{text:<{room}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    lines = [line(title, head)]
    for text, cells, further in rows:
        if len(text) > room:
            lines += [text, line("", cells)]
        else:
            lines.append(line(text, cells))
        lines += [f"{' ' * indent}{part}" for part in wrapped(further, COLUMNS - indent)]
    return lines


def plan_facts(plan: Plan) -> dict[str, Any]:
    calendar = plan.calendar
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
        "days": calendar.seconds / DAY,
        "goodput": calendar.goodput,
        "checkpoint_minutes": calendar.interval / 60,
        "device_hours": plan.device_hours,
        "cost": plan.cost,
        "currency": currency(plan) or None,
        "kilowatt_hours": plan.kilowatt_hours,
    }
