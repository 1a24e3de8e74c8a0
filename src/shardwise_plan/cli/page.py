"""The page of `shardwise plan --html`: one file to hand around, which needs no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from shardwise import __version__
from shardwise.base import units
from shardwise.base.terminal import wrap_words
from shardwise.pipeline.timeline import Timeline
from shardwise_plan.cli import wording
from shardwise_plan.cli.layout_list import assumption_sentences, drop_reasons, training_text
from shardwise_plan.cli.nodes import SearchedNodes
from shardwise_plan.plan import TIGHT, Plan
from shardwise_plan.proposals import Proposal, proposals, sensitivities
from shardwise_watch.report import chart
from shardwise_watch.report.page import page_environment

_COLOURS = {"forward": 1, "backward": 4, "input": 0, "weight": 5}
_MOST_ACTIONS = 12_000  # largest number of passes that a timeline shows, from the beginning of the step
_LEAST_PART = 0.001  # share from which on a part is shown
_LARGEST_DOT = 8.5  # radius of the dot of the dearest layout, in pixels
_CHART_COLUMNS = 60  # characters of a line below a chart
_MOST_TIMES = 5  # numbers of nodes are drawn that take less than so many times the time of the answer
_GIB = 2**30
_UNITS = ((86_400.0, " d"), (3600.0, " h"), (60.0, " min"), (1.0, " s"))
_WIDTH = 1000
_ROW = 16
_LEFT = 52


def plan_page(
    name: str, answer: SearchedNodes, listed: Sequence[Plan], chosen: Plan, commands: Mapping[str, Sequence[str]]
) -> str:
    """Return the page of `shardwise plan --html`; `commands`: title → those that write its recipe and train it."""
    proposed = proposals(listed)
    return (
        page_environment(Path(__file__).parent)
        .get_template("plan_page.html")
        .render(
            title=f"{name} on {chosen.cluster}",
            subject=training_text(name, chosen).partition(", ")[2].replace(f" on {chosen.cluster}:", ""),
            sentences=answer.sentences,
            version=__version__,
            accuracy=" ".join(
                wording.accuracy_sentences([chosen], source="docs/planner.md, section How far off it is")
            ),
            layout=f"Layout {listed.index(chosen) + 1}: {chosen.text()}",
            doubt=f"It leaves {units.size(chosen.headroom)} of memory and may not fit." if chosen.is_tight else "",
            tiles=_tiles(chosen),
            commands=commands,
            size=chart.SMALL,
            left=chart.LEFT,
            chosen=next((_proposal(proposal, listed) for proposal in proposed if proposal.plan is chosen), None),
            charts=_charts(answer, listed, proposed, chosen),
            proposals=[_proposal(proposal, listed) for proposal in proposed],
            sensitivity=_sensitivity(proposed),
            timeline=_timeline(chosen, listed.index(chosen) + 1),
            memories=[_memory(proposal) for proposal in proposed],
            names=["devices", "tokens/s", *wording.plan_columns(chosen), "bubble", "communication", "device-hours"],
            rows=[_row(plan) for plan in listed],
            dropped=drop_reasons(answer.result),
            notes=assumption_sentences(listed),
        )
    )


def _tiles(plan: Plan) -> list[tuple[str, str, str]]:
    cluster = plan.cluster
    time, _, price = wording.time_range_text(plan).partition(" and ")
    free = f"{plan.headroom / cluster.device.memory:.0%} of {units.size(cluster.device.memory)}"
    tiles = [
        ("time on the calendar", wording.duration(plan.calendar.seconds), time),
        ("price", wording.cost_text(plan), price),
        ("devices", f"{cluster.world:,}", f"{units.counted(cluster.nodes, 'node')} of {cluster.per_node}"),
        ("device-hours", f"{plan.device_hours:,.0f}", f"goodput {plan.calendar.goodput:.1%}"),
        ("free memory", units.size(plan.headroom), free),
        ("step", units.step_duration(plan.time.total), "" if plan.mfu is None else f"MFU {plan.mfu:.1%}"),
    ]
    return [tile for tile in tiles if tile[1]]


def _proposal(proposal: Proposal, listed: Sequence[Plan]) -> dict[str, Any]:
    plan = proposal.plan
    return {
        "title": f"{proposal.title.capitalize()}{' (may not fit)' if plan.is_tight else ''}",
        "layout": f"{listed.index(plan) + 1}: {plan.text()}",
        "tiles": [(name, value) for name, value, _ in _tiles(plan)],
        "reason": f"{proposal.reason[0].upper()}{proposal.reason[1:]}",
    }


def _charts(
    answer: SearchedNodes, listed: Sequence[Plan], proposed: Sequence[Proposal], chosen: Plan
) -> list[dict[str, Any]]:
    plans = answer.result.plans
    longest = max(plan.calendar.seconds for plan in plans)
    unit, suffix = next((unit for unit in _UNITS if longest >= 2 * unit[0]), _UNITS[-1])
    device, price = chosen.cluster.device, chosen.cluster.device.price
    name_of_price = "device-hours" if price is None else f"price in {price.currency}"
    looks = {id(proposal.plan): f"c{number}" for number, proposal in enumerate(proposed)}
    numbers = {id(plan): number for number, plan in enumerate(listed, 1)}

    def dot(plan: Plan, look: str, y: float, label: str, title: str, radius: float = 4) -> dict[str, Any]:
        x = plan.calendar.seconds / unit
        return {"x": x, "y": y, "look": look, "label": label, "lines": _plan_lines(plan, title), "radius": radius}

    # Proposals lie in front, and before them what is listed.
    layouts = [
        dot(
            plan,
            looks.get(id(plan), "rest" if number else "rest pale"),
            plan.memory.total / _GIB,
            str(number),
            f"Layout {number}: " if number else "Not listed: ",
            _LARGEST_DOT * math.sqrt(_price(plan) / max(map(_price, plans))) if number else 3.0,
        )
        for plan in sorted(plans, key=lambda plan: (id(plan) in looks, id(plan) in numbers))
        for number in [numbers.get(id(plan), "")]
    ]
    legend = [
        (looks[id(proposal.plan)], f"{proposal.title}: layout {numbers[id(proposal.plan)]}") for proposal in proposed
    ]
    legend.append(("rest", "others"))
    band: list[float] = []
    if any(plan.is_tight for plan in plans):
        band = [(device.memory * (1 - share) - chosen.reserve) / _GIB for share in (TIGHT, 0)]
        legend.append(("full", "may not fit: less than a tenth of the memory is free"))
    note = f"To the right: time on the calendar. Upward: memory of a device. Area: {name_of_price}. Rings: not listed."
    charts = [_chart("Layouts", layouts, (suffix, " GiB"), band) | {"legend": legend, "note": note}]
    # A search for a budget begins with one node, whose years would leave no room for the answer.
    sizes = [plan for plan in answer.compared if plan.calendar.seconds < _MOST_TIMES * chosen.calendar.seconds]
    if len(sizes) > 1:
        dots = []
        for plan in sizes:
            is_beaten = any(o.calendar.seconds < plan.calendar.seconds and _price(o) < _price(plan) for o in sizes)
            look = "c0" if plan.cluster == chosen.cluster else "rest pale" if is_beaten else "rest"
            nodes = units.counted(plan.cluster.nodes, "node")
            dots.append(dot(plan, look, _price(plan), f"{plan.cluster.nodes:,}", f"{nodes}: "))
        legend = [("c0", f"the answer: {units.counted(chosen.cluster.nodes, 'node')}")]
        note = f"To the right: time on the calendar. Upward: {name_of_price}. Rings: another number is faster for less."
        charts.append(_chart("Numbers of nodes", dots, (suffix, ""), []) | {"legend": legend, "note": note})
    return charts


def _chart(title: str, dots: list[dict[str, Any]], suffixes: tuple[str, str], band: list[float]) -> dict[str, Any]:
    area, axes = chart.chart_axes([dot["x"] for dot in dots], [*(dot["y"] for dot in dots), *band], suffixes)
    placed: list[tuple[float, float, float]] = []
    # Those in front first: one that would cover a number moves to the right.
    for dot in reversed(dots):
        x, y, radius = area.x(dot["x"]), area.y(dot["y"]), dot["radius"]
        while dot["label"] and any(math.hypot(x - u, y - v) < radius + reach for u, v, reach in placed):
            x += 1
        dot["left"] = x
        placed += [(x, y, radius)] if dot["label"] else []
    return {"title": title, "dots": dots, "band": band, "area": area, "axes": Markup(axes)}


def _price(plan: Plan) -> float:
    return plan.device_hours if plan.cost is None else plan.cost


def _plan_lines(plan: Plan, title: str) -> list[str]:
    degrees, _, details = plan.text().partition(", ")
    price = wording.cost_text(plan) or wording.hours_text(plan)
    time = f"{units.counted(plan.cluster.nodes, 'node')}, {wording.duration(plan.calendar.seconds)}, {price}"
    doubt = " (may not fit)" if plan.is_tight else ""
    memory = f"{units.size(plan.memory.total)}, {units.size(plan.headroom)} free{doubt}"
    return [f"{title}{degrees}", *wrap_words(details, _CHART_COLUMNS), time, memory]


def _sensitivity(proposed: Sequence[Proposal]) -> list[tuple[str, list[str]]]:
    usual = [proposal.plan.calendar.seconds for proposal in proposed]
    table = [("as assumed", [*map(wording.duration, usual)])]
    for changes in zip(*(sensitivities(proposal.plan) for proposal in proposed), strict=True):
        cells = [
            f"{wording.duration(change.seconds)} ({change.seconds / seconds - 1:+.1%})"
            for change, seconds in zip(changes, usual, strict=True)
        ]
        table.append((changes[0].assumption, cells))
    return table


def _timeline(plan: Plan, number: int) -> dict[str, Any]:
    steps = plan.timeline()
    shown = max(1, _MOST_ACTIONS // len(steps.ranks))
    kinds = dict.fromkeys(timed.action.kind for actions in steps.ranks for timed in actions)
    text = f"Passes of the {units.counted(len(steps.ranks), 'pipeline rank')}".replace("the 1 ", "one ")
    if any(len(actions) > shown for actions in steps.ranks):
        text += f", the first {shown:,} of each"
    total = plan.time.total
    return {
        "number": number,
        "kinds": [(kind, _COLOURS[kind]) for kind in kinds],
        "text": f"{text}; then reduction and update. The rows are ranks, and time runs to the right.",
        "drawing": Markup(_timeline_svg(steps, shown)),
        "seconds": units.step_duration(total),
        "total": total,
        "parts": _parts(dict(plan.time.rows()), total, units.step_duration),
    }


def _timeline_svg(steps: Timeline, shown: int) -> str:
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
        f'<text class="rank" x="{_LEFT - 6}" y="{rank * _ROW + 12}" text-anchor="end">rank {rank}</text>'
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
        *wording.plan_cells(plan),
        f"{time.bubble / time.total:.1%}",
        f"{time.communication / time.total:.1%}",
        f"{plan.device_hours:,.0f}",
    )
    return {"layout": plan.text(), "cells": cells}
