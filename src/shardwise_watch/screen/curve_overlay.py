"""Several curves in one drawing of braille dots, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.text import Text

from shardwise.base import units
from shardwise_watch.curve_points import Points
from shardwise_watch.screen.drawing import FAINT, RULE, TEXT, dot_bits, heading, resampled_curve
from shardwise_watch.step_metrics import CurveColumn, StepCurve

COLOURS = ("#6cb6d9", "#e39a5f", "#8cc084", "#d98fc0", "#e3d05f", "#9f8fe0", "#ef6f6c", "#c9d1d9")
_HEIGHT = 14


def draw_curve_overlay(title: str, curves: Mapping[str, Points], width: int, x: str, log: str) -> list[Text]:
    """Draw curves by their letters, which stand at the end of each, under a heading.

    Args:
        x: axis of `curve_points.AXES`.
        log: axes that are logarithmic; what has no logarithm is left out.
    """
    on_x, on_y = (math.log10 if axis in log else float for axis in "xy")
    back_x, back_y = ((lambda value: 10.0**value) if axis in log else float for axis in "xy")
    placed = {
        name: {
            on_x(at): on_y(y) for at, y in points.items() if (at > 0 or "x" not in log) and (y > 0 or "y" not in log)
        }
        for name, points in curves.items()
    }
    ys = sorted(value for points in placed.values() for value in points.values())
    lines = [heading(width, title, f"logarithmic {' and '.join(log)}" if log else "")]
    if not ys:
        return [*lines, Text(" no value can be drawn", FAINT)]
    # A steep beginning may hide the rest: a fiftieth of the values leave a drawing that is not logarithmic at each end.
    cut = 0 if log else len(ys) // 50
    margin = 0.05 * (ys[-1 - cut] - ys[cut]) or 0.05 * abs(ys[cut]) or 0.5
    low, high = ys[cut] - margin, ys[-1 - cut] + margin
    xs = [at for points in placed.values() for at in points]
    first, last = min(xs), max(xs)
    rows = {row: f"{back_y(high - (high - low) * row / (_HEIGHT - 1)):.4g}" for row in (0, _HEIGHT // 2, _HEIGHT - 1)}
    gutter = max(map(len, rows.values())) + 1
    cells = max(40, width - gutter - 5)
    dots = [[(0, RULE)] * cells for _ in range(_HEIGHT)]
    ends = [""] * _HEIGHT
    for number, (name, points) in enumerate(placed.items()):
        columns: list[CurveColumn | None] = [None] * (2 * cells)
        for place, value in points.items():
            at = round((place - first) / (last - first) * (2 * cells - 1)) if last > first else 0
            seen = columns[at] or CurveColumn(place, value, value, value)
            columns[at] = CurveColumn(place, min(seen.least, value), value, max(seen.largest, value))
        for row, bits in enumerate(dot_bits(resampled_curve(StepCurve(columns), 2 * cells), cells, _HEIGHT, low, high)):
            for cell, bit in enumerate(bits):
                dots[row][cell] = (
                    dots[row][cell][0] | bit,
                    COLOURS[number % len(COLOURS)] if bit else dots[row][cell][1],
                )
        for end in [*points.values()][-1:]:
            ends[max(0, min(_HEIGHT - 1, round((high - end) / (high - low) * (_HEIGHT - 1))))] += name
    for row, line_dots in enumerate(dots):
        line = Text.assemble((rows.get(row, "").rjust(gutter), FAINT), ("┤" if row in rows else "│", RULE))
        lines.append(line.append_text(Text.assemble(*((chr(0x2800 + bits), colour) for bits, colour in line_dots))))
        line.append(f" {ends[row]}", TEXT)
    place_text = {"time": units.duration, "tokens": units.count, "step": "{:,.0f}".format}[x]
    begin, end_text = place_text(back_x(first)), f"{x} {place_text(back_x(last))}"
    return [*lines, Text(f"{' ' * gutter}└{begin}{end_text.rjust(cells - len(begin))}", FAINT)]
