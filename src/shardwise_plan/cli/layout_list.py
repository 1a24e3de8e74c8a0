"""The answer of `shardwise plan` in 80 columns: proposals and why, the list, what was dropped, what is assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.base import units
from shardwise.base.terminal import wrapped
from shardwise.cli import output
from shardwise.config import tokens_of_run
from shardwise.estimates.memory import offloaded_bytes
from shardwise.models import parameter_counts
from shardwise_plan.cli.nodes import Answer
from shardwise_plan.cli.rows import (
    COLUMNS,
    FREED_PARTS,
    RANGE,
    TIGHT,
    accuracy,
    accuracy_text,
    blocks,
    calendar_text,
    cost_text,
    figure_names,
    figures,
    hours_text,
    length_text,
    network_text,
    plan_facts,
    price_text,
    range_text,
    time_unit,
    training_time,
)
from shardwise_plan.plan import Plan
from shardwise_plan.proposals import Proposal, proposals, sensitivities
from shardwise_plan.search import Search

_LEGEND = (
    '"MFU" = model FLOPs, without recompute and masked attention, over the peak',
    '"free" = device memory - run - 6% reserve (context, buffers, fragmentation)',
)
_COMPILED = '"step" = with compiled blocks (compile.enabled) where the layout can be compiled'


def show(name: str, answer: Answer, listed: Sequence[Plan]) -> None:
    """Print the answer; `name` is that of the recipe."""
    result = answer.result
    best = listed[0]
    unit = time_unit(best)
    for sentence in (what_is_trained(name, best), answer.steps, answer.budget, answer.unused):
        _prose(sentence)
    output.line()
    for proposal in proposals(listed):
        _show_proposal(proposal, listed.index(proposal.plan) + 1, unit)
    output.line()
    for line in blocks(figure_names(best, unit), _rows(listed, unit), "layouts", 4):
        output.line(line)
    output.line()
    left_out = result.plans.index(listed[-1]) + 1 - len(listed)
    if left_out:
        _prose(
            f"Left out: {units.counted(left_out, 'layout')} at most 4% slower than a listed layout with the same "
            f"degrees and ZeRO; only schedule, micro-batch, recompute or SP differ. --all lists the "
            f"{len(result.plans)} fastest with them."
        )
    for line in dropped_lines(result):
        output.line(line)
    output.line()
    for note in notes(listed, unit):
        _prose(note)
    for line in accuracy([best], f": layout 1 takes {ranges}, {RANGE}" if (ranges := range_text(best)) else ""):
        output.line(line)


def what_is_trained(name: str, plan: Plan) -> str:
    """Return a sentence on the model, the devices and the tokens."""
    train = plan.config.train
    tokens = tokens_of_run(plan.config)
    parameters = units.count(parameter_counts.parameter_count(plan.config.model) or 0)
    return f"{name}, {parameters} parameters, on {plan.cluster}: {units.count(tokens)} tokens in {train.steps:,} steps"


def _show_proposal(proposal: Proposal, number: int, unit: str) -> None:
    plan = proposal.plan
    price = f", {cost_text(plan)}" if plan.cost is not None else ""
    on = units.counted(plan.cluster.world, "device")
    _prose(f"{proposal.title.capitalize()}: layout {number} on {on}, {training_time(plan, unit)} {unit}{price}", "  ")
    output.line(f"  {plan.text().partition(', ')[0]}")
    for line in wrapped(f"Why: {proposal.reason}.", COLUMNS - 2):
        output.line(f"  {line}")


def _rows(listed: Sequence[Plan], unit: str) -> list[tuple[str, Sequence[str], str]]:
    has_several = len({plan.cluster.nodes for plan in listed}) > 1
    rows: list[tuple[str, Sequence[str], str]] = []
    for number, plan in enumerate(listed, 1):
        degrees, _, details = plan.text().partition(", ")
        nodes = f", {units.counted(plan.cluster.nodes, 'node')}, {hours_text(plan)}" if has_several else ""
        rows.append((f"{number:>2}  {degrees}", figures(plan, unit), f"{details}{nodes}"))
    return rows


def drop_reasons(result: Search) -> list[tuple[int, str]]:
    """Return how many layouts were not listed, by the reason, the most first."""
    reasons = [(number, f"do not fit: {reason}") for reason, number in result.too_large.items()]
    reasons += [(number, f"break a rule of {key}") for key, number in result.refused.items()]
    if result.slower:
        reasons.append((result.slower, "are slower than those that are listed"))
    return sorted(reasons, reverse=True)


def dropped_lines(result: Search) -> list[str]:
    """Return a table of the layouts that are not listed, by the reason."""
    rows = [(f"{number:,}", reason) for number, reason in drop_reasons(result)]
    width = max((len(number) for number, _ in rows), default=0)
    lines = [f"Of {result.valid + sum(result.refused.values()):,} layouts were dropped:"]
    for number, reason in rows:
        first, *further = wrapped(reason, COLUMNS - width - 4)
        lines.append(f"  {number:>{width}}  {first}")
        lines += [f"{' ' * (width + 4)}{line}" for line in further]
    return lines


def notes(listed: Sequence[Plan], unit: str) -> list[str]:
    """Return what the list assumes, and what its words mean."""
    best = listed[0]
    sentences = [f"A step of layout 1: {best.time.shares()}"]
    changed = [
        f"{length_text(case.seconds, unit)} if {case.assumption}"
        for case in sensitivities(best)[:-1]
        if case.seconds > best.calendar.seconds
    ]
    sentences.append(f"Layout 1 takes {', '.join(changed)}.")
    sentences.append(f"Network: {network_text(best)}, of one device in one direction.")
    sentences.append(f'"{unit}" = on the calendar, with {calendar_text(best)}.')
    if price := price_text(best):
        sentences.append(price)
    if best.kilowatt_hours is not None:
        watts = best.cluster.device.watts
        sentences.append(
            f"Energy of layout 1: {best.kilowatt_hours:,.0f} kWh, at {watts:,.0f} W for each device, without hosts, "
            "network and cooling."
        )
    if any(plan.is_tight for plan in listed):
        sentences.append(TIGHT)
    if any(plan.frees_parts for plan in listed):
        sentences.append(FREED_PARTS)
    if any(plan.config.compile.enabled for plan in listed):
        sentences.append(_COMPILED)
    sentences += _LEGEND
    if on_host := offloaded_bytes(best.config, best.layout, best.cluster.device.is_accelerator):
        sentences.append(
            f"Layout 1 needs {units.size(on_host)} of the host's memory for each rank, which is not checked."
        )
    return sentences


def answer_facts(answer: Answer, listed: Sequence[Plan]) -> dict[str, Any]:
    """Return the answer for `--json`."""
    result = answer.result
    proposed = [
        {
            "names": list(proposal.names),
            "layout": listed.index(proposal.plan) + 1,
            "reason": proposal.reason,
            "sensitivity_seconds": {s.assumption: s.seconds for s in sensitivities(proposal.plan)},
        }
        for proposal in proposals(listed)
    ]
    return {
        "valid": result.valid,
        "dropped": dict(result.too_large),
        "refused": dict(result.refused),
        "slower": result.slower,
        "budget": answer.budget or None,
        "steps": answer.steps or None,
        "unused": answer.unused or None,
        "proposals": proposed,
        "plans": [*map(plan_facts, listed)],
        "accuracy": accuracy_text(listed[0]),
    }


def _prose(text: str, indent: str = "") -> None:
    for line in wrapped(text, COLUMNS, indent):
        output.line(line)
