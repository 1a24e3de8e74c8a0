"""A curve drawn with braille dots: two columns and four rows of them in a cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from rich.text import Text

from shardwise.monitor.screen.frame import Curve
from shardwise.monitor.screen.ink import FAINT, RULE, WARN

_MARK_DISTANCE = 8
"""Cells between two evaluations, at least on average."""
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot of a braille character, by column and row."""


def plot(curve: Curve, width: int, height: int, style: str, shown: Callable[[float], str]) -> list[Text]:
    """A curve with its scale in `height` lines, of which the last names the steps.

    A column of dots reaches from the least to the largest value in it, and to the values beside it. Evaluations are
    marked by `◆`.
    """
    rows = height - 1
    low, high = _range(curve)
    if math.isnan(low) or rows < 2:
        return []
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - max(1e-9, abs(low) * 0.05), high + max(1e-9, abs(high) * 0.05)
    labels = {row: shown(high - (high - low) * row / (rows - 1)) for row in {0, (rows - 1) // 2, rows - 1}}
    gutter = max(map(len, labels.values())) + 1
    cells = max(4, width - gutter - 2)
    bits = _drawn(_resampled(curve, cells * 2), cells, rows, low, high)
    distance = max(1, math.ceil(len(curve.points) * _MARK_DISTANCE / cells))
    marks = {
        (int((high - value) / (high - low) * (rows - 1) + 0.5), min(cells - 1, at * cells // max(1, len(curve.lows))))
        for at, value in curve.points[::-1][::distance]
        if low <= value <= high
    }
    lines = []
    for row in range(rows):
        line = Text.assemble((labels.get(row, "").rjust(gutter), FAINT), ("┤" if row in labels else "│", RULE))
        for cell, dots in enumerate(bits[row]):
            line.append("◆" if (row, cell) in marks else chr(0x2800 + dots), WARN if (row, cell) in marks else style)
        lines.append(line)
    first, last = f"{curve.first:,}", f"step {curve.last:,}"
    lines.append(Text(f"{' ' * gutter}└{first}{last.rjust(cells - len(first))}", FAINT))
    return lines


def _range(curve: Curve) -> tuple[float, float]:
    """The least and the largest value to show: those of the first columns are cut off where they would hide the rest.

    A training begins with a steep loss, and with steps that compile.
    """
    pairs = [(low, high) for low, high in zip(curve.lows, curve.highs, strict=True) if math.isfinite(low)]
    if not pairs:
        return math.nan, math.nan
    begin = len(pairs) // 20
    low, high = min(low for low, _ in pairs[begin:]), max(high for _, high in pairs[begin:])
    least, largest = min(low for low, _ in pairs), max(high for _, high in pairs)
    margin = 0.25 * (high - low)
    return least if low - least < margin else low, largest if largest - high < margin else high


def _resampled(curve: Curve, columns: int) -> list[tuple[float, float]]:
    """(least, largest) by column of dots; columns between two known ones lie on the line between these."""
    count = len(curve.lows)
    found: list[tuple[float, float] | None] = []
    for column in range(columns):
        begin = column * count // columns
        group = range(begin, max(begin + 1, (column + 1) * count // columns))
        inside = [(curve.lows[at], curve.highs[at]) for at in group if math.isfinite(curve.lows[at])]
        found.append((min(low for low, _ in inside), max(high for _, high in inside)) if inside else None)
    places = [at for at, pair in enumerate(found) if pair is not None]
    for left, right in pairwise(places):
        (a, b), (c, d) = found[left] or (0.0, 0.0), found[right] or (0.0, 0.0)
        for at in range(left + 1, right):
            value = (a + b) / 2 + ((c + d) - (a + b)) / 2 * (at - left) / (right - left)
            found[at] = (value, value)
    return [pair or (math.nan, math.nan) for pair in found]


def _drawn(columns: Sequence[tuple[float, float]], cells: int, rows: int, low: float, high: float) -> list[list[int]]:
    """The bits of each cell."""
    bits = [[0] * cells for _ in range(rows)]
    top, before = rows * 4 - 1, (math.nan, math.nan)
    for column, (least, largest) in enumerate(columns):
        if math.isfinite(least):
            if math.isfinite(before[0]):  # up or down to the column before
                least, largest = min(least, before[1]), max(largest, before[0])
            if least > high or largest < low:
                before = columns[column]
                continue
            for dot in range(_dot(largest, low, high, top), _dot(least, low, high, top) + 1):
                bits[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
        before = columns[column]
    return bits


def _dot(value: float, low: float, high: float, top: int) -> int:
    """The row of dots of a value, counted from above."""
    return max(0, min(top, round((high - value) / (high - low) * top)))
