"""How the screen writes: its colours, bars, heat strips, and numbers in few characters.

A curve drawn with braille dots: two columns and four rows of them in a cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from rich.text import Text

from shardwise.base import units
from shardwise.runs.run import State
from shardwise.runs.screen.frame import Curve

GROUND, RAISED, TEXT, FAINT, RULE = "#12161c", "#1b212a", "#c9d1d9", "#7d8896", "#39424e"
ACCENT, GOOD, WARN, BAD = "#6cb6d9", "#8cc084", "#e3b25f", "#ef6f6c"
PART_COLOURS = {
    "data": "#c9a26d",
    "forward": "#6cb6d9",
    "backward": "#4f8fb8",
    "communication": "#b48ead",
    "optimizer": "#8cc084",
    "checkpoint": "#d98e73",
    "other": "#667180",
}
STATE_COLOURS: Mapping[State, str] = {
    "starting": ACCENT,
    "running": GOOD,
    "silent": WARN,
    "finished": GOOD,
    "stopped": WARN,
    "failed": BAD,
    "killed": BAD,
}
_HEIGHTS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
NOTHING, SILENT = "·", "×"
"""Of a rank that recorded no such number, and of one that has written nothing for long."""


def heading(width: int, title: str, told: Text | str = "", right: Text | str = "") -> Text:
    """The line above a panel: ` title  told ───── right `, cut to `width`."""
    line = Text.assemble((f" {title} ", f"bold {TEXT}"), told if isinstance(told, Text) else (told, TEXT))
    line.append(" " if line.plain[-1:] != " " else "")
    ending = right if isinstance(right, Text) else Text(right, style=FAINT)
    room = width - line.cell_len - ending.cell_len - 2
    if room < 2:
        ending, room = Text(), width - line.cell_len
    line.append("─" * max(0, room), RULE)
    if ending:
        line.append(" ")
        line.append_text(ending)
        line.append(" ")
    line.truncate(width, overflow="ellipsis")
    return line


def fitted(line: Text, width: int) -> Text:
    """`line` in exactly `width` cells."""
    line = line.copy()
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


def sentences(width: int, text: str, style: str = FAINT) -> list[Text]:
    """A text in lines that fit, set in by a space."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width - 2:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return [Text(f" {line}", style) for line in lines]


def columns(rows: Sequence[Sequence[tuple[str, str]]], right: Sequence[int] = (), gap: int = 2) -> list[Text]:
    """Rows of (text, style) as aligned columns; `right`: the numbers of those that are set flush right."""
    if not rows:
        return []
    widths = [max(len(row[at][0]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        line = Text(" ")
        for at, (text, style) in enumerate(row):
            space = " " * (gap if at else 0)
            padded = text.rjust(widths[at]) if at in right else text.ljust(widths[at])
            line.append(space)
            line.append(padded, style)
        lines.append(line)
    return lines


def meter(share: float, width: int, style: str, ground: str = RULE) -> Text:
    """A share of 1 as a bar of `width` cells, exact to an eighth of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    bar = "█" * full + (_EIGHTHS[part] if part else "")
    return Text.assemble((bar, style), (("─" if ground else " ") * (width - len(bar)), ground))


def progress(share: float, width: int, style: str) -> Text:
    """A share of 1 as a thin line."""
    halves = round(max(0.0, min(1.0, share)) * width * 2)
    bar = "━" * (halves // 2) + "╸" * (halves % 2)
    return Text.assemble((bar, style), ("─" * (width - len(bar)), RULE))


def segments(parts: Mapping[str, float], width: int, *, are_named: bool = True) -> Text:
    """Parts of a step side by side in proportion, each with its name where that fits."""
    whole = sum(parts.values())
    line, before, begin = Text(), 0.0, 0
    for name, amount in parts.items():
        before += amount
        end = round(before / whole * width) if whole > 0 else 0
        room = end - begin
        if room > 0:
            label = f" {name}" if are_named and room >= len(name) + 2 else ""
            line.append(label.ljust(room), f"{GROUND} on {PART_COLOURS[name]}")
        begin = end
    return line


def heat(
    values: Sequence[float | None],
    width: int,
    low: float,
    high: float,
    style: Callable[[float], str],
    silent: frozenset[int] = frozenset(),
    worst: Callable[[Sequence[float]], float] = max,
) -> Text:
    """Numbers of consecutive ranks as a strip of `width` cells.

    A cell that stands for several ranks shows the worst of their numbers; few ranks are spread over the width. The
    height of a cell tells its number where there are no colours.

    Args:
        low, high: numbers of the lowest and the highest cell.
        worst: chooses one of several numbers.
        silent: indices in `values` of the ranks that are marked as silent.
    """
    line, count = Text(), len(values)
    if not count:
        return line
    cells, wide = min(count, width), max(1, min(8, width // count))
    body = wide - (1 if wide > 2 else 0)
    for cell in range(cells):
        group = range(cell * count // cells, (cell + 1) * count // cells)
        known = [value for value in (values[at] for at in group) if value is not None]
        if any(at in silent for at in group):
            line.append(SILENT * body, f"bold {BAD}")
        elif known:
            value = worst(known)
            share = (value - low) / (high - low) if high > low else 0.0
            line.append(_HEIGHTS[max(0, min(7, int(share * 8)))] * body, style(value))
        else:
            line.append(NOTHING * body, RULE)
        line.append(" " * (wide - body))
    return line


def work_style(relative: float) -> str:
    """The colour of a rank's work over that of the best rank."""
    if relative >= 1.4:
        return f"bold {BAD}"
    return WARN if relative >= 1.15 else "#5f9db8" if relative >= 1.05 else "#46708a"


def memory_style(_: float) -> str:
    return "#514d73"


def use_style(share: float) -> str:
    """The colour of a share of the device's time in which it was busy."""
    return WARN if share < 0.7 else "#3f5d47"


def rate(value: object) -> str:
    """A number with three digits, such as `1.25 M`, or a dash."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    power = 0
    while abs(value) >= 999.5 and power < 5:
        value, power = value / 1000, power + 1
    return f"{value:.3g}{('', ' k', ' M', ' G', ' T', ' P')[power]}"


def percent(value: object, digits: int = 1) -> str:
    return f"{value:.{digits}%}" if isinstance(value, int | float) and math.isfinite(value) else "–"


def plain(value: object, form: str = ".4g") -> str:
    """A number in the given form; the texts "nan" and "inf" as they are; else a dash."""
    if isinstance(value, str):
        return value
    return format(value, form) if isinstance(value, int | float) else "–"


def size(value: object) -> str:
    return units.size(value) if isinstance(value, int | float) else "–"


def seconds(value: object) -> str:
    return units.duration(value) if isinstance(value, int | float) and math.isfinite(value) else "–"


def model(device: str) -> str:
    """The word of a device's name that tells most: that of its model, such as `H100`, or its only one."""
    words = device.partition(":")[0].split()
    return next((word for word in words if any(letter.isdigit() for letter in word)), "".join(words[:1])) or "–"


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
