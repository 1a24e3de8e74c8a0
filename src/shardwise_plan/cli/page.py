"""The page of `shardwise plan --html`: one file to hand around, which needs no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from shardwise import __version__
from shardwise.base import units
from shardwise.pipeline.timeline import Timeline
from shardwise_plan.cli import rows
from shardwise_plan.cli.layout_list import drop_reasons, notes, what_is_trained
from shardwise_plan.cli.nodes import Answer
from shardwise_plan.plan import Plan
from shardwise_plan.proposals import Proposal, proposals, sensitivities
from shardwise_watch import report

_COLOURS = {"forward": 1, "backward": 4, "input": 0, "weight": 5}
"""Numbers of the page's colours (`page.css` of the report)."""
_MOST_ACTIONS = 12_000
"""Largest number of passes that a timeline shows, from the beginning of the step."""
_LEAST_PART = 0.001
"""Share from which on a part is shown."""
_WIDTH = 1000
_ROW = 16
_LEFT = 52


def page(name: str, answer: Answer, listed: Sequence[Plan]) -> str:
    """Return the page as HTML.

    Args:
        name: name of the recipe.
        answer: the layouts that were searched for.
        listed: layouts of the list, in its order.
    """
    folders = [Path(__file__).parent, Path(report.__file__).parent]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    best = listed[0]
    proposed = proposals(listed)
    ranges = rows.range_text(best)
    return environment.get_template("plan_page.html").render(
        title=f"{name} on {best.cluster}",
        subject=what_is_trained(name, best),
        sentences=answer.sentences,
        version=__version__,
        accuracy=" ".join(rows.accuracy([best], f": layout 1 takes {ranges}" if ranges else "")),
        proposals=[_proposal(proposal, listed) for proposal in proposed],
        sensitivity=_sensitivity(proposed),
        timeline=_timeline(best),
        memories=[_memory(proposal) for proposal in proposed],
        names=["devices", "tokens/s", *rows.figure_names(best), "bubble", "communication", "device-hours"],
        rows=[_row(plan) for plan in listed],
        dropped=drop_reasons(answer.result),
        notes=notes(listed),
    )


def _proposal(proposal: Proposal, listed: Sequence[Plan]) -> dict[str, Any]:
    plan = proposal.plan
    tiles = [
        ("devices", f"{plan.cluster.world:,}"),
        ("time on the calendar", rows.duration(plan.calendar.seconds)),
        ("step", units.step_duration(plan.time.total)),
        ("free memory", units.size(plan.headroom)),
        ("goodput", f"{plan.calendar.goodput:.1%}"),
    ]
    if plan.cost is not None:
        tiles.append(("price", rows.cost_text(plan)))
    if plan.kilowatt_hours is not None:
        tiles.append(("energy", f"{plan.kilowatt_hours:,.0f} kWh"))
    return {
        "title": proposal.title.capitalize(),
        "layout": f"{listed.index(plan) + 1}: {plan.text()}",
        "tiles": tiles,
        "reason": f"{proposal.reason[0].upper()}{proposal.reason[1:]}",
    }


def _sensitivity(proposed: Sequence[Proposal]) -> list[tuple[str, list[str]]]:
    """Return a row for what is assumed, and for each change of it, with a cell for each proposal."""
    usual = [proposal.plan.calendar.seconds for proposal in proposed]
    table = [("as assumed", [*map(rows.duration, usual)])]
    for changes in zip(*(sensitivities(proposal.plan) for proposal in proposed), strict=True):
        cells = [
            f"{rows.duration(change.seconds)} ({change.seconds / seconds - 1:+.1%})"
            for change, seconds in zip(changes, usual, strict=True)
        ]
        table.append((changes[0].assumption, cells))
    return table


def _timeline(plan: Plan) -> dict[str, Any]:
    steps = plan.timeline()
    shown = max(1, _MOST_ACTIONS // len(steps.ranks))
    kinds = dict.fromkeys(timed.action.kind for actions in steps.ranks for timed in actions)
    text = f"Passes of the {units.counted(len(steps.ranks), 'pipeline rank')}"
    if any(len(actions) > shown for actions in steps.ranks):
        text += f", the first {shown:,} of each"
    total = plan.time.total
    return {
        "number": 1,
        "kinds": [(kind, _COLOURS[kind]) for kind in kinds],
        "text": f"{text}; then reduction and update. The rows are ranks, and time runs to the right.",
        "drawing": Markup(_drawing(steps, shown)),
        "seconds": units.step_duration(total),
        "total": total,
        "parts": _parts(dict(plan.time.rows()), total, units.step_duration),
    }


def _drawing(steps: Timeline, shown: int) -> str:
    """Return a timeline as SVG, with a path for each kind of pass."""
    ranks = [actions[:shown] for actions in steps.ranks]
    end = max(actions[-1].end for actions in ranks)
    scale = (_WIDTH - _LEFT) / end
    paths: dict[str, list[str]] = {}
    for rank, actions in enumerate(ranks):
        for timed in actions:
            left = _LEFT + scale * timed.start
            width = max(0.1, scale * (timed.end - timed.start) - 0.15)
            paths.setdefault(timed.action.kind, []).append(
                f"M{left:.1f} {rank * _ROW + 1}h{width:.2f}v{_ROW - 2}h-{width:.2f}z"
            )
    height = len(ranks) * _ROW
    labels = "".join(
        f'<text x="{_LEFT - 6}" y="{rank * _ROW + 12}" text-anchor="end">rank {rank}</text>'
        for rank in range(len(ranks))
    )
    drawn = "".join(f'<path class="f{_COLOURS[kind]}" d="{"".join(parts)}"/>' for kind, parts in paths.items())
    times = (
        f'<text x="{_LEFT}" y="{height + 14}">0</text>'
        f'<text x="{_WIDTH}" y="{height + 14}" text-anchor="end">{units.step_duration(end)}</text>'
    )
    return (
        f'<svg class="timeline" viewBox="0 0 {_WIDTH} {height + 20}" role="img" aria-label="timeline of a step">'
        f"{labels}{drawn}{times}</svg>"
    )


def _memory(proposal: Proposal) -> dict[str, Any]:
    plan = proposal.plan
    device = plan.cluster.device.memory
    sizes = {**dict(plan.memory.rows()), "reserve": plan.reserve}
    return {
        "title": proposal.title.capitalize(),
        "total": units.size(plan.memory.total),
        "device": units.size(device),
        "whole": device,
        "parts": _parts(sizes, device, units.size),
    }


def _parts(amounts: Mapping[str, float], total: float, shown: Callable[[float], str]) -> list[dict[str, Any]]:
    """Return the parts of a whole, the largest first, with their names, texts and colours."""
    # A kind has the same colour in each picture.
    colours = {name: number % 8 for number, name in enumerate(amounts)}
    parts = sorted(((amount, name) for name, amount in amounts.items() if amount / total >= _LEAST_PART), reverse=True)
    return [
        {
            "name": name.replace("_", " "),
            "value": amount,
            "text": shown(amount),
            "share": f"{amount / total:.1%}",
            "colour": colours[name],
        }
        for amount, name in parts
    ]


def _row(plan: Plan) -> dict[str, Any]:
    time = plan.time
    cells = (
        f"{plan.cluster.world:,}",
        f"{plan.tokens_per_second:,.0f}",
        *rows.figures(plan),
        f"{time.bubble / time.total:.1%}",
        f"{time.communication / time.total:.1%}",
        f"{plan.device_hours:,.0f}",
    )
    return {"layout": plan.text(), "cells": cells}
