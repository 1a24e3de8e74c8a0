"""The best layout of a recipe on each of several devices, side by side: `shardwise plan --device h100:8,b200:8`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

from shardwise.base.errors import ConfigError
from shardwise.cli import output
from shardwise.cli.plan_rows import (
    FREED_PARTS,
    RANGE,
    TIGHT,
    accuracy,
    accuracy_text,
    dollars,
    frees_parts,
    has_range,
    plan_facts,
    price_range,
    row,
    time_range,
    time_unit,
)
from shardwise.planner.device_specs import PRICE_RANGE
from shardwise.planner.search import Plan, Search


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


def prices(text: str | None, devices: Sequence[str]) -> dict[str, float | None]:
    """The dollars for an hour of each device that `--price` gives, by the device; None where its file says it.

    Raises:
        ConfigError: these are other numbers than one, or one for each device.
    """
    if text is None:
        return dict.fromkeys(devices)
    least, most = PRICE_RANGE
    given = []
    for part in text.split(","):
        try:
            given.append(float(part))
        except ValueError:
            given.append(math.nan)
    if not all(least <= price <= most for price in given):
        raise ConfigError(f"--price ({text}) must be dollars for a device and an hour, from {least:g} to {most:,g}")
    if len(given) not in (1, len(devices)):
        raise ConfigError(
            f"--price ({text}) must be one number, or one for each of the {len(devices)} devices of --device "
            f"({','.join(devices)})"
        )
    return dict(zip(devices, given * (len(devices) if len(given) == 1 else 1), strict=True))


def compare_devices(arguments: argparse.Namespace, devices: Sequence[str], searched: Callable[[str], Search]) -> int:
    """Print the fastest layout on each of several devices.

    Args:
        devices: names of `--device`.
        searched: function that returns the layouts on a device.
    """
    options = {"--why": arguments.why, "--write": arguments.write, "--plot": arguments.plot}
    given = [option for option, value in options.items() if value is not None]
    if given or arguments.all:
        raise ConfigError(
            f"{(given or ['--all'])[0]} must go with one device: --device ({arguments.device}) has several"
        )
    plans: dict[str, Plan] = {}
    problems: dict[str, str] = {}
    for device in devices:
        try:
            plans[device] = searched(device).plans[0]
        except ConfigError as error:
            problems[device] = str(error)
    if not plans:
        raise ConfigError([f"{device}: {problem}" for device, problem in problems.items()])
    if arguments.json:
        facts = {name: plan_facts(plan) | {"accuracy": accuracy_text(plan)} for name, plan in plans.items()}
        output.json({"devices": facts, "problems": problems})
        return 0
    _show(plans)
    for device, problem in problems.items():
        output.line(f"{device}: {problem}")
    output.line()
    if any(plan.is_tight for plan in plans.values()):
        output.line(TIGHT)
    if any(frees_parts(plan) for plan in plans.values()):
        output.prose(FREED_PARTS)
    for line in accuracy(plans.values()):
        output.line(line)
    if sum(map(has_range, plans.values())) > 1:
        output.prose(
            "Predictions for these devices probably err in the same direction: their order is surer than their times."
        )
    return 0


def _show(plans: dict[str, Plan]) -> None:
    fastest = min(plans.values(), key=lambda plan: plan.seconds)
    unit = time_unit(fastest)
    has_prices = any(plan.dollars is not None for plan in plans.values())
    head = ["devices", "layout", "step", "tokens/s", "MFU", "memory", "free", unit, "device-hours"]
    has_ranges = any(map(has_range, plans.values()))
    if has_ranges:
        head.insert(-1, RANGE)
    if has_prices:
        head += ["dollars", RANGE] if has_ranges else ["dollars"]
    rows = []
    for plan in plans.values():
        *cells, hours = row(plan, unit)
        # Without bubble and communication.
        shown = [str(plan.cluster), *cells[:6], *cells[8:]]
        if has_ranges:
            shown.append(time_range(plan, unit))
        shown.append(hours)
        if has_prices:
            shown.append(dollars(plan))
        if has_prices and has_ranges:
            shown.append(price_range(plan))
        rows.append(shown)
    output.table(rows, head, right=tuple(range(2, len(head))))
