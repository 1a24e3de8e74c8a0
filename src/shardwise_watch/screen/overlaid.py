"""Several curves in one drawing of braille dots, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.text import Text

from shardwise.base import units
from shardwise_watch.overlay import Points
from shardwise_watch.screen.drawing import FAINT, RULE, TEXT, drawn, heading, resampled
from shardwise_watch.step_metrics import Column, Curve

_COLOURS = ("#6cb6d9", "#e39a5f", "#8cc084", "#d98fc0", "#e3d05f", "#9f8fe0", "#ef6f6c", "#c9d1d9")
_HEIGHT = 14
_LEAST_WIDTH = 40


def colour(number: int) -> str:
    """Return the colour of a curve, by its number from 0 on."""
    return _COLOURS[number % len(_COLOURS)]


def overlaid(title: str, curves: Mapping[str, Points], width: int, x: str, log: str) -> list[Text]:
    """Draw curves by their letters, which stand at the end of each, under a heading.

    Args:
        x: axis of `overlay.AXES`.
        log: axes that are logarithmic; what has no logarithm is left out.
    """
    placed = {name: _on_axes(points, log) for name, points in curves.items()}
    xs = [place for points in placed.values() for place in points]
    ys = sorted(value for points in placed.values() for value in points.values())
    lines = [heading(width, title, f"logarithmic {' and '.join(log)}" if log else "")]
    if not ys:
        return [*lines, Text(" no value can be drawn", FAINT)]
    # A steep beginning may hide the rest: a fiftieth of the values leave a drawing that is not logarithmic at each end.
    cut = 0 if log else len(ys) // 50
    low, high = ys[cut], ys[-1 - cut]
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    low, high = low - margin, high + margin
    values = [_back(high - (high - low) * row / (_HEIGHT - 1), "y" in log) for row in range(_HEIGHT)]
    labels = {row: f"{values[row]:.4g}" for row in (0, _HEIGHT // 2, _HEIGHT - 1)}
    gutter = max(map(len, labels.values())) + 1
    cells = max(_LEAST_WIDTH, width - gutter - 5)
    first, last = min(xs), max(xs)
    dots = [[0] * cells for _ in range(_HEIGHT)]
    colours: dict[tuple[int, int], str] = {}
    ends = [""] * _HEIGHT
    for number, (name, points) in enumerate(placed.items()):
        if not points:
            continue
        columns: list[Column | None] = [None] * (2 * cells)
        for place, value in points.items():
            at = round((place - first) / (last - first) * (2 * cells - 1)) if last > first else 0
            seen = columns[at] or Column(place, value, value, value)
            columns[at] = Column(place, min(seen.least, value), value, max(seen.largest, value))
        for row, bits in enumerate(drawn(resampled(Curve(columns), 2 * cells), cells, _HEIGHT, low, high)):
            for cell, bit in enumerate(bits):
                if bit:
                    dots[row][cell] |= bit
                    colours[row, cell] = colour(number)
        end = [*points.values()][-1]
        ends[max(0, min(_HEIGHT - 1, round((high - end) / (high - low) * (_HEIGHT - 1))))] += name
    for row in range(_HEIGHT):
        line = Text.assemble((labels.get(row, "").rjust(gutter), FAINT), ("┤" if row in labels else "│", RULE))
        for cell, bits in enumerate(dots[row]):
            line.append(chr(0x2800 + bits), colours.get((row, cell), RULE))
        lines.append(line.append(f" {ends[row]}", TEXT))
    begin, end_text = (_place_text(_back(place, "x" in log), x) for place in (first, last))
    return [*lines, Text(f"{' ' * gutter}└{begin}{f'{x} {end_text}'.rjust(cells - len(begin))}", FAINT)]


def _on_axes(points: Points, log: str) -> dict[float, float]:
    shown = ((x, y) for x, y in points.items() if not (("x" in log and x <= 0) or ("y" in log and y <= 0)))
    return {math.log10(x) if "x" in log else x: math.log10(y) if "y" in log else y for x, y in shown}


def _back(value: float, is_logarithm: bool) -> float:
    return 10**value if is_logarithm else value


def _place_text(place: float, x: str) -> str:
    return units.duration(place) if x == "time" else units.count(place) if x == "tokens" else f"{place:,.0f}"
