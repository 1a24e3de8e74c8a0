"""The best layout of a recipe on each of several devices, side by side: `shardwise plan --device h100:8,b200:8`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from shardwise.base.errors import ConfigError, listing
from shardwise.base.terminal import wrapped
from shardwise.cli import output
from shardwise_plan.cli.nodes import Answer
from shardwise_plan.cli.remarks import steps_text
from shardwise_plan.cli.rows import (
    COLUMNS,
    FREED_PARTS,
    RANGE,
    TIGHT,
    accuracy,
    accuracy_text,
    blocks,
    figure_names,
    figures,
    has_range,
    hours_text,
    plan_facts,
    price_text,
    range_text,
    time_unit,
)
from shardwise_plan.device_specs import Price
from shardwise_plan.plan import Plan
from shardwise_plan.proposals import objective_of


def named_devices(text: str) -> list[str]:
    """The devices that `--device` names, separated by commas.

    Raises:
        ConfigError: it names none, or one twice.
    """
    devices = [device for part in text.split(",") if (device := part.strip())]
    if not devices:
        raise ConfigError(f"--device ({text}) must name a device, such as h100:8")
    if len(set(devices)) < len(devices):
        raise ConfigError(f"--device ({text}) must name each device once")
    return devices


def prices(text: str | None, devices: Sequence[str]) -> dict[str, Price | None]:
    """The price for an hour of each device that `--price` gives, by the device; None where its file says it.

    Raises:
        ConfigError: these are other numbers than one, or one for each device, or have no currency.
    """
    if text is None:
        return dict.fromkeys(devices)
    given = [Price.of(part, "--price") for part in text.split(",")]
    if len(given) not in (1, len(devices)):
        raise ConfigError(
            f"--price ({text}) must be one price, or one for each of the {len(devices)} devices of --device "
            f"({','.join(devices)})"
        )
    return dict(zip(devices, given * (len(devices) if len(given) == 1 else 1), strict=True))


def compare_devices(arguments: argparse.Namespace, devices: Sequence[str], answered: Callable[[str], Answer]) -> int:
    """Print the fastest layout on each of several devices.

    Args:
        devices: names of `--device`.
        answered: function that returns the layouts on a device.
    """
    options = {"--why": arguments.why, "--write": arguments.write, "--plot": arguments.plot, "--html": arguments.html}
    given = [option for option, value in options.items() if value is not None]
    if given or arguments.all:
        raise ConfigError(
            f"{(given or ['--all'])[0]} must go with one device: --device ({arguments.device}) has several"
        )
    plans: dict[str, Plan] = {}
    problems: dict[str, str] = {}
    unused: dict[str, str] = {}
    for device in devices:
        try:
            chosen = answered(device)
        except ConfigError as error:
            problems[device] = str(error)
            continue
        plans[device] = chosen.result.plans[0]
        if chosen.unused:
            unused[device] = chosen.unused
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
        facts = {name: plan_facts(plan) | {"accuracy": accuracy_text(plan)} for name, plan in plans.items()}
        output.json({"devices": facts, "problems": problems, "steps": steps or None, "unused": unused})
        return 0
    if steps:
        _prose(steps)
        output.line()
    _show(plans)
    for device, text in (problems | unused).items():
        _prose(f"{device}: {text}", "  ")
    output.line()
    for plan in plans.values():
        if sentence := price_text(plan):
            _prose(f"{plan.cluster.device.name}: {sentence}")
    if any(plan.is_tight for plan in plans.values()):
        _prose(TIGHT)
    if any(plan.frees_parts for plan in plans.values()):
        _prose(FREED_PARTS)
    for line in accuracy(plans.values()):
        output.line(line)
    if sum(map(has_range, plans.values())) > 1:
        _prose(
            "Predictions for these devices probably err in the same direction: their order is surer than their times."
        )
    return 0


def _prose(text: str, indent: str = "") -> None:
    for line in wrapped(text, COLUMNS, indent):
        output.line(line)


def _show(plans: dict[str, Plan]) -> None:
    fastest = min(plans.values(), key=lambda plan: plan.calendar.seconds)
    unit = time_unit(fastest)
    with_price = max(plans.values(), key=lambda plan: plan.cost is not None)
    head = figure_names(with_price, unit)
    rows = []
    for plan in plans.values():
        cells = figures(plan, unit)
        ranges = range_text(plan)
        further = f"{plan.text()}; {hours_text(plan)}{f'; {ranges}, {RANGE}' if ranges else ''}"
        rows.append((str(plan.cluster), [*cells, *[""] * (len(head) - len(cells))], further))
    for line in blocks(head, rows, "devices", 2):
        output.line(line)
