"""The answer of `shardwise plan` in 80 columns: proposals and why, the list, what was dropped, what is assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.base import units
from shardwise.cli import output
from shardwise.config import tokens_of_run
from shardwise.estimates.memory import offloaded_bytes
from shardwise.estimates.unequal_loads import unequal_load_rows
from shardwise.models.parameter_counts import active_parameter_count, parameter_count
from shardwise_plan.cli import wording
from shardwise_plan.cli.nodes import SearchedNodes
from shardwise_plan.plan import Plan
from shardwise_plan.prediction_text import plan_facts
from shardwise_plan.proposals import proposals, recommended_plan, sensitivities
from shardwise_plan.search import Search


def print_layouts(name: str, answer: SearchedNodes, listed: Sequence[Plan]) -> None:
    """Print the layouts of `shardwise plan`; `name` is that of the recipe."""
    result = answer.result
    best = recommended_plan(listed)
    for sentence in (training_text(name, best), *answer.sentences):
        wording.print_prose(sentence)
    output.line()
    for proposal in proposals(listed):
        plan = proposal.plan
        number = listed.index(plan) + 1
        on = units.counted(plan.cluster.world, "device")
        price = f", {wording.cost_text(plan)}" if plan.cost is not None else ""
        time = wording.duration(plan.calendar.seconds)
        doubt = " (may not fit)" if plan.is_tight else ""
        wording.print_prose(f"{proposal.title.capitalize()}{doubt}: layout {number} on {on}, {time}{price}", "  ")
        output.line(f"  {plan.text().partition(', ')[0]}")
        wording.print_prose(f"  Why: {proposal.reason}.", "  ")
    output.line()
    wording.print_blocks(wording.plan_columns(best), _rows(listed), "layouts", 4)
    output.line()
    last = result.plans.index(listed[-1]) + 1
    slower = len(result.plans) - last
    if left_out := last - len(listed):
        wording.print_prose(
            f"Left out: {units.counted(left_out, 'layout')} at most 4% slower than a listed layout with the same "
            f"degrees and ZeRO; only schedule, micro-batch, recompute or SP differ"
            f"{f'; and {slower:,} slower than the last one' if slower else ''}. --all lists the "
            f"{len(result.plans)} fastest with them."
        )
    if reasons := drop_reasons(result):
        output.line(f"Of {result.valid + sum(result.refused.values()):,} layouts, these were dropped:")
        for count, reason in reasons:
            wording.print_prose(f"  {count:>9,}  {reason}", " " * 13)
    output.line()
    ranges = wording.time_range_text(best)
    place = listed.index(best) + 1
    consequence = (
        f": layout {place} takes {ranges}, {wording.published_error_text(best)} of its prediction" if ranges else ""
    )
    for sentence in (*assumption_sentences(listed), *wording.accuracy_sentences([best], consequence)):
        wording.print_prose(sentence)


def training_text(name: str, plan: Plan) -> str:
    """Return a sentence on the planned model, devices and tokens."""
    tokens = units.count(tokens_of_run(plan.config))
    model = plan.config.model
    count, active = parameter_count(model) or 0, active_parameter_count(model) or 0
    shown = f"{units.count(count)} parameters{f' ({units.count(active)} active)' if active < count else ''}"
    return f"{name}, {shown}, on {plan.cluster}: {tokens} tokens in {plan.config.train.steps:,} steps"


def _rows(listed: Sequence[Plan]) -> list[tuple[str, Sequence[str], str]]:
    has_several = len({plan.cluster.nodes for plan in listed}) > 1
    cells: list[tuple[str, Sequence[str], str]] = []
    for number, plan in enumerate(listed, 1):
        degrees, _, details = plan.text().partition(", ")
        nodes = f", {units.counted(plan.cluster.nodes, 'node')}, {wording.hours_text(plan)}" if has_several else ""
        cells.append((f"{number:>2}  {degrees}", wording.plan_cells(plan), f"{details}{nodes}"))
    return cells


def drop_reasons(result: Search) -> list[tuple[int, str]]:
    """Return how many layouts of a search were not listed, by the reason, the most first."""
    reasons = [(number, f"do not fit: {reason}") for reason, number in result.too_large.items()]
    reasons += [(number, f"break a rule of {key}") for key, number in result.refused.items()]
    if result.slower:
        reasons.append((result.slower, "are slower than those that are listed"))
    if result.equal:
        reasons.append((result.equal, "equal a listed layout: their recompute changes neither time nor memory"))
    return sorted(reasons, reverse=True)


def assumption_sentences(listed: Sequence[Plan]) -> list[str]:
    """Return what the list of layouts assumes, and what its words mean."""
    best = recommended_plan(listed)
    layout = f"layout {listed.index(best) + 1}"
    changed = [
        f"{wording.duration(case.seconds)} if {case.assumption}"
        for case in sensitivities(best)[:-1]
        if case.seconds > best.calendar.seconds
    ]
    sentences = [
        f"A step of {layout}: {best.time.shares()}",
        f"{layout.capitalize()} takes {', '.join(changed)}.",
        f"Network: {wording.network_text(best)}, of one device in one direction.",
        f'"time" = on the calendar, with {wording.calendar_text(best)}.',
    ]
    if price := wording.price_text(best):
        sentences.append(price)
    if best.kilowatt_hours is not None:
        sentences.append(
            f"Energy of {layout}: {best.kilowatt_hours:,.0f} kWh, at {best.cluster.device.watts:,.0f} W for each "
            "device, without hosts, network and cooling."
        )
    loads = unequal_load_rows(best.config, best.layout, best.cluster.device.is_accelerator)
    sentences += [f"{name.capitalize()} of {layout}: {text}." for name, text in loads]
    sentences += [*wording.plan_warnings(listed), *wording.pipeline_sentences([best])]
    if any(plan.config.compile.enabled for plan in listed):
        sentences.append('"step" = with compiled blocks (compile.enabled) where the layout can be compiled')
    sentences += [
        '"MFU" = model FLOPs, without recompute and masked attention, over the peak',
        '"free" = device memory - run - 6% reserve (context, buffers, fragmentation)',
    ]
    if on_host := offloaded_bytes(best.config, best.layout, best.cluster.device.is_accelerator):
        sentences.append(
            f"{layout.capitalize()} needs {units.size(on_host)} of the host's memory for each rank, which is not "
            "checked."
        )
    return sentences


def answer_facts(answer: SearchedNodes, listed: Sequence[Plan]) -> dict[str, Any]:
    """Return the layouts of `shardwise plan` for `--json`."""
    result = answer.result
    proposed = [
        {
            "names": list(proposal.names),
            "layout": listed.index(proposal.plan) + 1,
            "may_not_fit": proposal.plan.is_tight,
            "reason": proposal.reason,
            "sensitivity_seconds": {case.assumption: case.seconds for case in sensitivities(proposal.plan)},
        }
        for proposal in proposals(listed)
    ]
    return {
        "valid": result.valid,
        "dropped": dict(result.too_large),
        "refused": dict(result.refused),
        "slower": result.slower,
        "equal": result.equal,
        **answer.remarks,
        "recommended": listed.index(recommended_plan(listed)) + 1,
        "proposals": proposed,
        "plans": [*map(plan_facts, listed)],
        "accuracy": wording.accuracy_text(listed[0]),
    }
