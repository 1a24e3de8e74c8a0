"""The best layout of a recipe on each of several devices, side by side: `shardwise plan --device h100:8,b200:8`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from shardwise.base.errors import ConfigError, listing
from shardwise.base.prices import Price
from shardwise.cli import output
from shardwise_plan.cli import rows
from shardwise_plan.cli.nodes import Answer, steps_text
from shardwise_plan.plan import Plan
from shardwise_plan.plan_text import plan_facts
from shardwise_plan.proposals import objective_of, recommended


def named_devices(text: str) -> list[str]:
    """The devices that `--device` names, separated by commas; ConfigError: it names none, or one twice."""
    devices = [device for part in text.split(",") if (device := part.strip())]
    if not devices or len(set(devices)) < len(devices):
        raise ConfigError(f"--device ({text}) must name a device, such as h100:8, or several, each device once")
    return devices


def prices(text: str | None, devices: Sequence[str]) -> dict[str, Price | None]:
    """The price for an hour of each device that `--price` gives, by the device; None where its file says it.

    Raises:
        ConfigError: these are other numbers than one, or one for each device, or have no currency.
    """
    if text is None:
        return dict.fromkeys(devices)
    given = [Price.of(part, "--price") for part in text.split(",")]
    if len(given) == 1:
        return dict.fromkeys(devices, given[0])
    if len(given) != len(devices):
        raise ConfigError(
            f"--price ({text}) must be one price, or one for each of the {len(devices)} devices of --device "
            f"({','.join(devices)})"
        )
    return dict(zip(devices, given, strict=True))


def compare_devices(arguments: argparse.Namespace, devices: Sequence[str], answered: Callable[[str], Answer]) -> None:
    """Print the fastest layout on each of several devices.

    Args:
        devices: names of `--device`.
        answered: function that returns the layouts on a device.
    """
    plans: dict[str, Plan] = {}
    problems: dict[str, str] = {}
    unused: dict[str, str] = {}
    for device in devices:
        try:
            chosen = answered(device)
        except ConfigError as error:
            problems[device] = str(error)
            continue
        plans[device] = recommended(chosen.result.plans)
        output.progress(f"{device}: {rows.duration(plans[device].calendar.seconds)} with {plans[device].text()}")
        if remark := chosen.remarks["unused"]:
            unused[device] = remark
    if not plans:
        raise ConfigError([f"{device}: {problem}" for device, problem in problems.items()])
    currencies = sorted({price.currency for plan in plans.values() if (price := plan.cluster.device.price)})
    if len(currencies) > 1:
        raise ConfigError(f"--price ({listing(currencies)}) must have one currency for all devices")
    if arguments.objective is not None:
        objective = arguments.objective
        plans = dict(sorted(plans.items(), key=lambda pair: objective_of(pair[1], objective)))
    steps = steps_text([*plans.values()])
    if arguments.json:
        facts = {name: plan_facts(plan) | {"accuracy": rows.accuracy_text(plan)} for name, plan in plans.items()}
        output.json({"devices": facts, "problems": problems, "steps": steps, "unused": unused})
        return
    if steps:
        rows.prose(steps)
        output.line()
    _show([*plans.values()])
    for device, text in (problems | unused).items():
        rows.prose(f"{device}: {text}", "  ")
    output.line()
    for plan in plans.values():
        if sentence := rows.price_text(plan):
            rows.prose(f"{plan.cluster.device.name}: {sentence}")
    best = plans.values()
    for sentence in (*rows.warnings(best), *rows.pipelines(best), *rows.accuracy(best)):
        rows.prose(sentence)
    if sum(map(rows.has_range, plans.values())) > 1:
        rows.prose(
            "Predictions for these devices probably err in the same direction: their order is surer than their times."
        )


def _show(plans: Sequence[Plan]) -> None:
    head = rows.figure_names(max(plans, key=lambda plan: plan.cost is not None))
    table = []
    for plan in plans:
        cells = rows.figures(plan)
        ranges = rows.range_text(plan)
        further = f"{plan.text()}; {rows.hours_text(plan)}{f'; {ranges}, {rows.error_text(plan)}' if ranges else ''}"
        table.append((str(plan.cluster), [*cells, *[""] * (len(head) - len(cells))], further))
    rows.blocks(head, table, "devices", 2)
