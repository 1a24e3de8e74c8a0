"""Drawing for the screen: its colours, bars, heat strips, curves of braille dots, and numbers in few characters."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

from rich.console import Console
from rich.text import Text

from shardwise.base import units
from shardwise_watch.curve_points import Points
from shardwise_watch.step_metrics import SPARSE_METRICS, SPARSE_ROW, CurveColumn, StepCurve, column_width

GROUND = "#12161c"
RAISED = "#1b212a"
TEXT = "#c9d1d9"
FAINT = "#7d8896"
RULE = "#39424e"
ACCENT = "#6cb6d9"
GOOD = "#8cc084"
WARN = "#e3b25f"
BAD = "#ef6f6c"
BEHIND = "#a8764a"
PART_COLOURS = {
    "data": "#c9a26d",
    "forward": "#6cb6d9",
    "backward": "#4f8fb8",
    "communication": "#b48ead",
    "optimizer": "#8cc084",
    "checkpoint": "#d98e73",
    "other": "#667180",
}
STATE_COLOURS: Mapping[str, str] = {
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
PLAIN_CONSOLE = Console(file=io.StringIO(), width=200)
"""The console that `Text.wrap` asks for; nothing is printed on it."""
NOTHING = "·"
SILENT = "×"
"""Marks of a rank that recorded no such number, and of one that has written nothing for long."""


def heading(width: int, title: str, summary: Text | str = "", right: Text | str = "") -> Text:
    """Write the line above a panel of the screen: ` title summary ───── right `, cut to `width`."""
    line = Text.assemble((f" {title} ", f"bold {TEXT}"), summary if isinstance(summary, Text) else (summary, TEXT))
    line.append(" " if line.plain[-1:] != " " else "")
    ending = right if isinstance(right, Text) else Text(right, style=FAINT)
    room = width - line.cell_len - ending.cell_len - 2
    if room < 2:
        ending = Text()
        room = width - line.cell_len
    line.append("─" * max(0, room), RULE)
    if ending:
        line.append_text(Text.assemble(" ", ending, " "))
    line.truncate(width, overflow="ellipsis")
    return line


def fitted_line(line: Text, width: int) -> Text:
    """Cut or fill a copy of a line of the screen to exactly `width` cells."""
    line = line.copy()
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


def sentences(width: int, text: str, style: str = FAINT) -> list[Text]:
    """Break a text into lines that fit the screen, set in by a space."""
    return [Text.assemble(" ", line) for line in Text(text, style).wrap(PLAIN_CONSOLE, width - 2)]


def aligned_columns(rows: Sequence[Sequence[tuple[str, str]]], right: Sequence[int] = (), gap: int = 2) -> list[Text]:
    """Align rows of (text, style) in columns of the screen. `right`: indices of columns that are set flush right."""
    widths = [max(len(text) for text, _ in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for column, (text, style) in enumerate(row):
            padded = text.rjust(widths[column]) if column in right else text.ljust(widths[column])
            cells.append(Text(padded, style))
        lines.append(Text.assemble(" ", Text(" " * gap).join(cells)))
    return lines


def marked_list(lines: Sequence[Text], width: int, at: int) -> list[Text]:
    """Fit the lines of a list on the screen, and mark the one at an index."""
    shown = [fitted_line(line, width) for line in lines]
    for line in shown[at : at + 1]:
        line.plain = f"▸{line.plain[1:]}"
        line.stylize(f"bold on {RAISED}")
    return shown


def meter(share: float, width: int, style: str) -> Text:
    """Draw a share of 1 on the screen as a bar of `width` cells, exact to an eighth of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    bar = "█" * full + (_EIGHTHS[part] if part else "")
    return Text(bar.ljust(width), style)


def progress_line(share: float, width: int, style: str) -> Text:
    """Draw a share of 1 on the screen as a thin line, exact to half a cell."""
    halves = round(max(0.0, min(1.0, share)) * width * 2)
    bar = "━" * (halves // 2) + "╸" * (halves % 2)
    return Text.assemble((bar, style), ("─" * (width - len(bar)), RULE))


def step_segments(parts: Mapping[str, float], width: int, *, are_named: bool = True) -> Text:
    """Draw parts of a step on the screen side by side in proportion, each with its name if that fits."""
    parts_sum = sum(parts.values())
    line = Text()
    total = 0.0
    begin = 0
    for name, amount in parts.items():
        total += amount
        # The sum is rounded, not the part: otherwise the roundings of many parts would add up.
        end = round(total / parts_sum * width) if parts_sum > 0 else 0
        room = end - begin
        if room > 0:
            label = f" {name}" if are_named and room >= len(name) + 2 else ""
            line.append(label.ljust(room), f"{GROUND} on {PART_COLOURS[name]}")
        begin = end
    return line


def heat_strip(
    values: Sequence[float | None],
    width: int,
    low: float,
    high: float,
    style: Callable[[float], str],
    silent: frozenset[int] = frozenset(),
    worst: Callable[[Sequence[float]], float] = max,
) -> Text:
    """Draw numbers of consecutive ranks on the screen as a strip of `width` cells.

    A cell that stands for several ranks shows the worst of their numbers; few ranks are spread over the width. The
    height of a cell tells its number where there are no colours.

    Args:
        low, high: numbers of the lowest and the highest cell.
        worst: chooses one of several numbers.
        silent: indices in `values` of the ranks that are marked as silent.
    """
    line = Text()
    count = len(values)
    if not count:
        return line
    cells = min(count, width)
    cell_width = max(1, min(8, width // count))
    # Wide cells have a gap between them.
    body = cell_width - 1 if cell_width > 2 else cell_width
    for cell in range(cells):
        group = range(cell * count // cells, (cell + 1) * count // cells)
        known = [value for value in values[group.start : group.stop] if value is not None]
        if any(index in silent for index in group):
            line.append(SILENT * body, f"bold {BAD}")
        elif known:
            value = worst(known)
            share = (value - low) / (high - low) if high > low else 0.0
            line.append(_HEIGHTS[max(0, min(7, int(share * 8)))] * body, style(value))
        else:
            line.append(NOTHING * body, RULE)
        line.append(" " * (cell_width - body))
    return line


def work_style(relative: float) -> str:
    if relative >= 1.4:
        return f"bold {BAD}"
    if relative >= 1.15:
        return WARN
    return "#5f9db8" if relative >= 1.05 else "#46708a"


def use_style(share: float) -> str:
    return WARN if share < 0.7 else "#3f5d47"


def rate_text(value: object) -> str:
    """Write a number on the screen with three digits, such as `1.25 M`, or a dash."""
    if not _is_finite(value):
        return "–"
    power = 0
    while abs(value) >= 999.5 and power < 5:
        value /= 1000
        power += 1
    return f"{value:.3g}{('', ' k', ' M', ' G', ' T', ' P')[power]}"


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def percent(value: object, digits: int = 1) -> str:
    return f"{value:.{digits}%}" if _is_finite(value) else "–"


def further_rows(last: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and texts for the screen of what only some models record in a step."""
    values = {words: last.get(name) for name, words in SPARSE_METRICS.items()}
    if next(iter(values.values())) is None:
        return []
    losses = last.get("balance_losses")
    shown = [f"{name} {number_text(loss)}" for name, loss in losses.items()] if isinstance(losses, dict) else []
    texts = [
        words.format(value) if _is_finite(value) else re.sub(r"×?\{.*\}", "–", words) for words, value in values.items()
    ]
    return [(SPARSE_ROW, ", ".join(texts + shown))]


def number_text(value: object, form: str = ".4g") -> str:
    """Write a number on the screen in the given form, the texts "nan" and "inf" as they are, a dash for all else."""
    if isinstance(value, str):
        return value
    return format(value, form) if isinstance(value, int | float) else "–"


def size(value: object) -> str:
    return units.size(value) if isinstance(value, int | float) else "–"


def seconds(value: object) -> str:
    return units.duration(value) if _is_finite(value) else "–"


_MARK_DISTANCE = 8  # cells between two evaluations, at least on average
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot of a braille character, by column and row."""


def plot_curves(
    curve: StepCurve, behind: StepCurve | None, width: int, height: int, style: str, shown: Callable[[float], str]
) -> list[Text]:
    """Draw a curve, and another one behind it, with their scale in `height` lines, the last of which names the steps.

    Lines are made of braille characters, each with two columns and four rows of dots. A column of dots reaches from the
    least to the largest value in it, and to the values of the column before. Evaluations are marked by `◆`.
    """
    rows = height - 1
    low, high = _range(curve)
    if math.isnan(low) or rows < 2:
        return []
    behind = behind or StepCurve(())
    if behind.known:
        # At most twice as much room again: a curve that is far away must not flatten this one.
        least, largest = _range(behind)
        low, high = max(min(low, least), 2 * low - high), min(max(high, largest), 2 * high - low)
    # A constant gets some room, so that nothing divides by zero.
    if high - low < 1e-9 * max(1.0, abs(high)):
        low = low - max(1e-9, abs(low) * 0.05)
        high = high + max(1e-9, abs(high) * 0.05)
    labels = {row: shown(high - (high - low) * row / (rows - 1)) for row in {0, (rows - 1) // 2, rows - 1}}
    gutter = max(map(len, labels.values())) + 1
    # Two cells are the axis and a margin.
    cells = max(4, width - gutter - 2)
    # Each cell has two columns of dots.
    bits, bits_behind = (
        _dot_bits(_resampled_curve(drawn_curve, cells * 2), cells, rows, low, high) for drawn_curve in (curve, behind)
    )
    marks = _marks(curve, cells, rows, low, high)
    lines = []
    for row in range(rows):
        line = Text.assemble((labels.get(row, "").rjust(gutter), FAINT), ("┤" if row in labels else "│", RULE))
        for cell, dots in enumerate(bits[row]):
            is_mark = (row, cell) in marks
            colour = style if dots else BEHIND
            line.append("◆" if is_mark else chr(0x2800 + (dots or bits_behind[row][cell])), WARN if is_mark else colour)
        lines.append(line)
    first = f"{curve.span[0]:,}"
    last = f"step {curve.span[1]:,}"
    lines.append(Text(f"{' ' * gutter}└{first}{last.rjust(cells - len(first))}", FAINT))
    return lines


def _marks(curve: StepCurve, cells: int, rows: int, low: float, high: float) -> set[tuple[int, int]]:
    """Return (row, cell) of the evaluations that are shown, so few that marks do not hide the curve."""
    distance = max(1, math.ceil(len(curve.dots) * _MARK_DISTANCE / cells))
    count = len(curve.columns)
    marks = set()
    # Counted from the end, so that the newest one is marked.
    for step, value in curve.dots[::-1][::distance]:
        if low <= value <= high:
            column = int((step - curve.span[0]) / column_width(curve.span, count))
            row = int((high - value) / (high - low) * (rows - 1) + 0.5)
            marks.add((row, min(cells - 1, column * cells // max(1, count))))
    return marks


def _range(curve: StepCurve) -> tuple[float, float]:
    """Return the least and the largest value to show; those of the first columns are cut off if they hide the rest.

    A training begins with a steep loss, and with steps that compile.
    """
    columns = curve.known
    if not columns:
        return math.nan, math.nan
    ends = []
    for shown in (columns, columns[len(columns) // 20 :]):
        ends.append((min(column.least for column in shown), max(column.largest for column in shown)))
    (least, largest), (low, high) = ends
    # What was left out is shown all the same if it makes the curve a quarter higher at most.
    margin = 0.25 * (high - low)
    return (least if low - least < margin else low, largest if largest - high < margin else high)


def _resampled_curve(curve: StepCurve, dot_columns: int) -> list[tuple[float, float]]:
    """Return (least, largest) of each column of dots; columns between two known ones lie on the line between these."""
    count = len(curve.columns)
    pairs: list[tuple[float, float] | None] = []
    for dot_column in range(dot_columns):
        begin = dot_column * count // dot_columns
        stop = max(begin + 1, (dot_column + 1) * count // dot_columns)
        columns = StepCurve(curve.columns[begin:stop]).known
        ends = (min(column.least for column in columns), max(column.largest for column in columns)) if columns else None
        pairs.append(ends)
    known = [index for index, pair in enumerate(pairs) if pair is not None]
    for left, right in pairwise(known):
        left_middle = sum(pairs[left] or ()) / 2
        right_middle = sum(pairs[right] or ()) / 2
        for index in range(left + 1, right):
            value = left_middle + (right_middle - left_middle) * (index - left) / (right - left)
            pairs[index] = (value, value)
    return [pair or (math.nan, math.nan) for pair in pairs]


def _dot_bits(
    columns: Sequence[tuple[float, float]], cells: int, rows: int, low: float, high: float
) -> list[list[int]]:
    bits = [[0] * cells for _ in range(rows)]
    lowest_dot = rows * 4 - 1
    for column, ((least, largest), before) in enumerate(zip(columns, [(math.nan, math.nan), *columns], strict=False)):
        # The line goes up or down to the column before, so that it has no holes.
        if math.isfinite(before[0]):
            least = min(least, before[1])
            largest = max(largest, before[0])
        if math.isfinite(columns[column][0]) and least <= high and largest >= low:
            for dot in range(_dot(largest, low, high, lowest_dot), _dot(least, low, high, lowest_dot) + 1):
                bits[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
    return bits


def _dot(value: float, low: float, high: float, lowest_dot: int) -> int:
    return max(0, min(lowest_dot, round((high - value) / (high - low) * lowest_dot)))


OVERLAY_COLOURS = ("#6cb6d9", "#e39a5f", "#8cc084", "#d98fc0", "#e3d05f", "#9f8fe0", "#ef6f6c", "#c9d1d9")
_OVERLAY_HEIGHT = 14


def draw_curve_overlay(title: str, curves: Mapping[str, Points], width: int, x: str, log: str) -> list[Text]:
    """Draw curves by their letters, which stand at the end of each, under a heading.

    Args:
        x: axis of `curve_points.AXES`.
        log: axes that are logarithmic; what has no logarithm is left out.
    """
    on_x, on_y = (math.log10 if axis in log else float for axis in "xy")
    back_x, back_y = ((lambda value: 10.0**value) if axis in log else float for axis in "xy")
    placed = {
        name: {on_x(x): on_y(y) for x, y in points.items() if (x > 0 or "x" not in log) and (y > 0 or "y" not in log)}
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
    rows = {
        row: f"{back_y(high - (high - low) * row / (_OVERLAY_HEIGHT - 1)):.4g}"
        for row in (0, _OVERLAY_HEIGHT // 2, _OVERLAY_HEIGHT - 1)
    }
    gutter = max(map(len, rows.values())) + 1
    cells = max(40, width - gutter - 5)
    dots = [[(0, RULE)] * cells for _ in range(_OVERLAY_HEIGHT)]
    ends = [""] * _OVERLAY_HEIGHT
    for number, (name, points) in enumerate(placed.items()):
        columns: list[CurveColumn | None] = [None] * (2 * cells)
        for place, value in points.items():
            at = round((place - first) / (last - first) * (2 * cells - 1)) if last > first else 0
            seen = columns[at] or CurveColumn(place, value, value, value)
            columns[at] = CurveColumn(place, min(seen.least, value), value, max(seen.largest, value))
        for row, bits in enumerate(
            _dot_bits(_resampled_curve(StepCurve(columns), 2 * cells), cells, _OVERLAY_HEIGHT, low, high)
        ):
            for cell, bit in enumerate(bits):
                dots[row][cell] = (
                    dots[row][cell][0] | bit,
                    OVERLAY_COLOURS[number % len(OVERLAY_COLOURS)] if bit else dots[row][cell][1],
                )
        for end in [*points.values()][-1:]:
            ends[max(0, min(_OVERLAY_HEIGHT - 1, round((high - end) / (high - low) * (_OVERLAY_HEIGHT - 1))))] += name
    for row, line_dots in enumerate(dots):
        line = Text.assemble((rows.get(row, "").rjust(gutter), FAINT), ("┤" if row in rows else "│", RULE))
        lines.append(line.append_text(Text.assemble(*((chr(0x2800 + bits), colour) for bits, colour in line_dots))))
        line.append(f" {ends[row]}", TEXT)
    place_text = {"time": units.duration, "tokens": units.count, "step": "{:,.0f}".format}[x]
    begin, end_text = place_text(back_x(first)), f"{x} {place_text(back_x(last))}"
    return [*lines, Text(f"{' ' * gutter}└{begin}{end_text.rjust(cells - len(begin))}", FAINT)]
