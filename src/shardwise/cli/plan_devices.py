"""The best layout of a recipe on each of several devices, side by side: `shardwise plan --device h100:8,b200:8`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from shardwise.base.errors import ConfigError
from shardwise.cli import output
from shardwise.cli.plan_rows import plan_facts, row, time_unit
from shardwise.planner.search import Plan, Search


def compare_devices(arguments: argparse.Namespace, searched: Callable[[str], Search]) -> int:
    """Print the fastest layout on each device that `--device` names.

    Args:
        searched: function that returns the layouts on a device.
    """
    options = {"--why": arguments.why, "--write": arguments.write, "--plot": arguments.plot}
    given = [option for option, value in options.items() if value is not None]
    if given or arguments.all:
        raise ConfigError(
            f"{(given or ['--all'])[0]} must go with one device: --device ({arguments.device}) has several"
        )
    devices = [device for part in arguments.device.split(",") if (device := part.strip())]
    if not devices:
        raise ConfigError(f"--device ({arguments.device}) must name a device, such as h100:8")
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
        output.json({"devices": {name: plan_facts(plan) for name, plan in plans.items()}, "problems": problems})
        return 0
    _show(plans)
    for device, problem in problems.items():
        output.line(f"{device}: {problem}")
    return 0


def _show(plans: dict[str, Plan]) -> None:
    fastest = min(plans.values(), key=lambda plan: plan.seconds)
    unit = time_unit(fastest)
    has_prices = any(plan.dollars is not None for plan in plans.values())
    head = ("devices", "layout", "step", "tokens/s", "MFU", "memory", "free", unit, "device-hours")
    rows = []
    for plan in plans.values():
        cost = () if not has_prices else ("" if plan.dollars is None else f"{plan.dollars:,.0f}",)
        cells = row(plan, unit)
        # Without bubble and communication.
        rows.append((str(plan.cluster), *cells[:6], *cells[8:], *cost))
    output.table(rows, (*head, *(("dollars",) if has_prices else ())), right=tuple(range(2, 10)))
