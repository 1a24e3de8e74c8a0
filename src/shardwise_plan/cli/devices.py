"""The best layout of a recipe on each of several devices, side by side: `shardwise plan --device h100:8,b200:8`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from shardwise.base.errors import ConfigError, listing
from shardwise.base.prices import Price
from shardwise.cli import output
from shardwise_plan.cli import wording
from shardwise_plan.cli.nodes import SearchedNodes, growing_batch_text
from shardwise_plan.plan import Plan
from shardwise_plan.prediction_text import plan_facts
from shardwise_plan.proposals import objective_value, recommended_plan


def parse_devices(text: str) -> list[str]:
    """The devices that `plan --device` names, separated by commas; ConfigError: it names none, or one twice."""
    devices = [device for part in text.split(",") if (device := part.strip())]
    if not devices or len(set(devices)) < len(devices):
        raise ConfigError(f"--device ({text}) must name a device, such as h100:8, or several, each device once")
    return devices


def parse_plan_prices(text: str | None, devices: Sequence[str]) -> dict[str, Price | None]:
    """Parse `shardwise plan --price`: the price for an hour of each device, by the device; None where its file says it.

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


def compare_devices(
    arguments: argparse.Namespace, devices: Sequence[str], answered: Callable[[str], SearchedNodes]
) -> None:
    """Print the fastest layout on each of several devices; `answered` gives the layouts on a device."""
    plans: dict[str, Plan] = {}
    problems: dict[str, str] = {}
    unused: dict[str, str] = {}
    for device in devices:
        try:
            chosen = answered(device)
        except ConfigError as error:
            problems[device] = str(error)
            continue
        plans[device] = recommended_plan(chosen.result.plans)
        output.progress(f"{device}: {wording.duration(plans[device].calendar.seconds)} with {plans[device].text()}")
        if remark := chosen.remarks["unused"]:
            unused[device] = remark
    if not plans:
        raise ConfigError([f"{device}: {problem}" for device, problem in problems.items()])
    currencies = sorted({price.currency for plan in plans.values() if (price := plan.cluster.device.price)})
    if len(currencies) > 1:
        raise ConfigError(f"--price ({listing(currencies)}) must have one currency for all devices")
    if arguments.objective is not None:
        objective = arguments.objective
        plans = dict(sorted(plans.items(), key=lambda pair: objective_value(pair[1], objective)))
    steps = growing_batch_text([*plans.values()])
    if arguments.json:
        facts = {name: plan_facts(plan) | {"accuracy": wording.accuracy_text(plan)} for name, plan in plans.items()}
        output.json({"devices": facts, "problems": problems, "steps": steps, "unused": unused})
        return
    if steps:
        wording.print_prose(steps)
        output.line()
    _show([*plans.values()])
    for device, text in (problems | unused).items():
        wording.print_prose(f"{device}: {text}", "  ")
    output.line()
    for plan in plans.values():
        if sentence := wording.price_text(plan):
            wording.print_prose(f"{plan.cluster.device.name}: {sentence}")
    best = plans.values()
    for sentence in (
        *wording.plan_warnings(best),
        *wording.pipeline_sentences(best),
        *wording.accuracy_sentences(best),
    ):
        wording.print_prose(sentence)
    if sum(map(wording.has_published_error, plans.values())) > 1:
        wording.print_prose(
            "Predictions for these devices probably err in the same direction: their order is surer than their times."
        )


def _show(plans: Sequence[Plan]) -> None:
    head = wording.plan_columns(max(plans, key=lambda plan: plan.cost is not None))
    table = []
    for plan in plans:
        cells = wording.plan_cells(plan)
        ranges = wording.time_range_text(plan)
        further = f"{plan.text()}; {wording.hours_text(plan)}"
        if ranges:
            further += f"; {ranges}, {wording.published_error_text(plan)}"
        table.append((str(plan.cluster), [*cells, *[""] * (len(head) - len(cells))], further))
    wording.print_blocks(head, table, "devices", 2)
