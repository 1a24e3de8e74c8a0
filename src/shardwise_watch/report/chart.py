"""Charts as inline SVG and HTML, whose colours follow the page.

Chart libraries weigh megabytes in every file (plotly 4, Vega 1); a line with an axis is little code, and the page is
then as small as what it shows. Each chart has its numbers in `data-chart`, for the script of the page.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from shardwise_watch.step_metrics import CurveColumn, StepCurve

LEFT = 62
RIGHT = 10
TOP = 10
BOTTOM = 26
_TICK_STEPS = (1, 2, 2.5, 5, 10)
_FEW_COLUMNS = 40  # a curve with fewer columns shows all its values
_DIGITS = 5  # digits of a number in the page: a difference of a thousandth of a chart's height is seen in none
_DIGITS_OF_ENDS = 4  # digits of the least and the largest value of a column, which are two thirds of the page's numbers
_COLOURS = 8
"""Colours of curves in the page; the ninth curve has the first one again, and is dashed, the seventeenth dotted."""
_LINES = 3
_FEW_CURVES = 4  # the bands of more curves are paler, since they lie upon each other
_LABEL_HEIGHTS = 3  # heights at which the labels of marks are written in turn
_UNITS = ((1e12, 1e12, " T"), (1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e5, 1e3, " k"))
"""Least of the largest number of an axis, the unit, and its name."""

Rows = Sequence[Sequence[float]]


class ChartSize(NamedTuple):
    """The size of a report's chart, in pixels of its picture, which is drawn as wide as its place in the page."""

    width: int
    height: int


SMALL = ChartSize(420, 236)
LARGE = ChartSize(640, 300)
BELOW = ChartSize(640, 190)


@dataclass(frozen=True)
class ChartMark:
    """A thin vertical line between two steps, whose text a browser shows at the pointer."""

    steps_before: int  # steps before the line
    text: str  # what happened there
    label: str = ""  # text beside the line, where there is room for it
    run: str = ""  # letters of the run whose step this is

    @property
    def place(self) -> float:
        """Place of the line on the axis of the steps."""
        return self.steps_before + 0.5


@dataclass(frozen=True)
class _PlotArea:
    """The area of a chart: the numbers at its edges, and the pixels of numbers on it."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float
    size: ChartSize = SMALL

    @property
    def width(self) -> int:
        return self.size.width - LEFT - RIGHT

    @property
    def height(self) -> int:
        return self.size.height - TOP - BOTTOM

    @property
    def bottom(self) -> int:
        """Pixel of the lower edge."""
        return self.size.height - BOTTOM

    def x(self, value: float) -> float:
        share = (value - self.low_x) / (self.high_x - self.low_x) if self.high_x > self.low_x else 0.5
        return LEFT + share * self.width

    def y(self, value: float) -> float:
        share = (value - self.low_y) / (self.high_y - self.low_y) if self.high_y > self.low_y else 0.5
        # A value far outside stays outside, without a coordinate that some browsers cannot draw.
        return self.bottom - max(-1.0, min(2.0, share)) * self.height

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def line_chart(
    title: str,
    curves: Mapping[str, StepCurve],
    *,
    percent: bool = False,
    is_cut: bool = True,
    notes: Sequence[str] = (),
    marks: Sequence[ChartMark] = (),
    size: ChartSize = SMALL,
    by_axis: Mapping[str, Mapping[str, StepCurve]] | None = None,
    axis: str = "step",
) -> str:
    """Draw curves over the steps of a run: a line of means in a band from the least to the largest value of a column.

    Returns an empty text if no curve has a value.

    Args:
        is_cut: True if few columns that would hide the rest, such as the steep beginning, may leave the chart; then the
            chart says so.
        notes: sentences under the title.
        marks: lines behind the curves.
        by_axis: of curves that are others over tokens and over time, all of them by the name of the axis.
        axis: name of the axis that is drawn.
    """
    known = {name: curve for name, curve in curves.items() if curve.columns or curve.dots or curve.breaks}
    dots = [CurveColumn(step, value, value, value) for curve in known.values() for step, value in curve.dots]
    columns = [*(column for curve in known.values() for column in curve.known), *dots]
    if not columns:
        return ""
    steps = [column.step for column in columns]
    for curve in known.values():
        steps += curve.breaks or ()
    least = min(column.least for column in columns)
    largest = max(column.largest for column in columns)
    low, high = _shown_range(columns) if is_cut else (least, largest)
    ticks = _ticks([low, high])
    area = _PlotArea(min(steps), max(steps), min(ticks[0], low), max(ticks[-1], high), size)
    drawn = [_y_axis(area, ticks, percent=percent), _x_axis(area, axis)]
    drawn += [_mark(area, mark) for mark in marks]
    if size == LARGE:
        drawn += [_mark_label(area, mark, number) for number, mark in enumerate(mark for mark in marks if mark.label)]
    # A curve has one colour in all charts, also in those where another has no values.
    looks = {name: curve_classes(number) for number, name in enumerate(curves)}
    drawn += _curves(area, known, looks, has_zero=by_axis is not None)
    outside = [value for value in (least, largest) if not area.low_y <= value <= area.high_y]
    if outside:
        cut = " and ".join(_tick_text(_rounded(value, _DIGITS_OF_ENDS), percent) for value in outside)
        notes = [*notes, f"axis cut: values reach to {cut}"]
    further = {
        "looks": looks if len(known) < len(curves) else None,
        "whole": not is_cut,
        "axis": axis if axis != "step" else None,
        **(_data_by_axis(by_axis) if by_axis else {"percent": percent}),
    }
    # The curve of a chart with one needs a name if other charts have others.
    legend = [(looks[name], name) for name in known if len(curves) > 1 or ": " in name]
    return _figure(title, legend, drawn, area, _line_data(known, further), notes=notes)


def _curves(area: _PlotArea, curves: Mapping[str, StepCurve], looks: Mapping[str, str], *, has_zero: bool) -> list[str]:
    drawn = [
        f'<svg x="{LEFT}" y="{TOP}" width="{area.width}" height="{area.height}" '
        f'viewBox="{LEFT} {TOP} {area.width} {area.height}">'
    ]
    if has_zero and area.low_y < 0 < area.high_y:
        y = f"{area.y(0):.1f}"
        drawn.append(f'<line class="zero" x1="{LEFT}" x2="{LEFT + area.width}" y1="{y}" y2="{y}"/>')
    drawn += [_curve(area, curve, looks[name]) for name, curve in curves.items()]
    drawn.append("</svg>")
    for name, curve in curves.items():
        drawn += [_dot(area, x, y, looks[name]) for x, y in curve.dots if area.low_y <= y <= area.high_y]
    return drawn


def _line_data(known: Mapping[str, StepCurve], further: Mapping[str, Any]) -> dict[str, Any]:
    dots = {name: [[x, _rounded(y, _DIGITS)] for x, y in curve.dots] for name, curve in known.items() if curve.dots}
    breaks = {name: curve.breaks for name, curve in known.items() if curve.breaks}
    parts = {**further, "dots": dots, "breaks": breaks}
    shown = {name: part for name, part in parts.items() if part or name == "percent"}
    return {"curves": {name: _column_data(curve.known) for name, curve in known.items()}, **shown}


def _data_by_axis(by_axis: Mapping[str, Mapping[str, StepCurve]]) -> dict[str, Any]:
    named = {x: {name: curve.known for name, curve in curves.items() if curve.known} for x, curves in by_axis.items()}
    return {"by": {x: {name: _column_data(curves[name]) for name in curves} for x, curves in named.items()}}


def stacked_chart(title: str, names: Sequence[str], rows: Rows, marks: Sequence[ChartMark] = ()) -> str:
    """Draw the seconds of parts over the steps, one on the other; `rows`: [step, seconds of each part …] of columns."""
    if not rows:
        return ""
    ticks = _ticks([0.0, max(sum(row[1:]) for row in rows)])
    area = _PlotArea(rows[0][0], max(rows[-1][0], rows[0][0] + 1), 0.0, ticks[-1])
    used = [number for number in range(len(names)) if any(row[number + 1] for row in rows)]
    drawn = []
    # Each part reaches down to 0, and the parts below it are drawn over it.
    for number in reversed(used):
        tops = [(row[0], sum(row[1 : number + 2])) for row in rows]
        # Along the bottom back to the beginning; one column alone is drawn over the whole width.
        corners = [(area.high_x, tops[-1][1]), (area.high_x, 0.0), (area.low_x, 0.0), (area.low_x, tops[0][1])]
        drawn.append(f'<polygon class="f{number}" points="{area.path([*tops, *corners])}"/>')
    drawn += [_y_axis(area, ticks, " s"), _x_axis(area, "step")]
    drawn += [_mark(area, mark) for mark in marks]
    data = {"names": list(names), "rows": [[row[0], *(_rounded(part, _DIGITS) for part in row[1:])] for row in rows]}
    legend = [(f"b{number}", names[number]) for number in used]
    return _figure(title, legend, drawn, area, data)


def bar_chart(title: str, columns: Sequence[CurveColumn], axis: str, suffix: str, note: str) -> str:
    """Draw a bar for each column: up to its largest value, and darker up to its least.

    Args:
        columns: columns over consecutive numbers, such as ranks; `step` is the last of these.
        axis: name of these numbers.
        suffix: unit after each value.
    """
    if not columns:
        return ""
    ticks = _ticks([0.0, max(column.largest for column in columns)])
    # A bar stands for whole numbers, and reaches half a number beyond them on both sides.
    begins = [columns[0].step - 0.5, *(column.step + 0.5 for column in columns[:-1])]
    area = _PlotArea(begins[0], columns[-1].step + 0.5, 0.0, ticks[-1])
    # Bars narrower than this would vanish in their gaps.
    gap = 1.5 if len(columns) <= area.width // 6 else 0.0
    drawn = [_y_axis(area, ticks, suffix)]
    heights = {"most": [column.largest for column in columns], "least": [column.least for column in columns]}
    for style, values in heights.items():
        bars = []
        for begin, column, value in zip(begins, columns, values, strict=True):
            left = f"{area.x(begin) + gap / 2:.1f}"
            right = f"{area.x(column.step + 0.5) - gap / 2:.1f}"
            bars.append(f"M{left},{area.bottom}V{area.y(value):.1f}H{right}V{area.bottom}")
        drawn.append(f'<path class="{style}" d="{"".join(bars)}"/>')
    drawn.append(_x_axis(area, axis))
    data = {"curves": {"": _column_data(columns)}, "suffix": suffix, "axis": axis}
    return _figure(title, [], drawn, area, data, notes=[note] if note else [])


def chart_axes(x: Sequence[float], y: Sequence[float], suffixes: tuple[str, str]) -> tuple[_PlotArea, str]:
    """Return the area of a small chart that holds these values, and its two axes with their units as suffixes."""
    across, upward = _ticks(x), _ticks(y)
    area = _PlotArea(across[0], across[-1], upward[0], upward[-1])
    return area, _y_axis(area, upward, suffixes[1]) + _x_axis(area, "", across, suffixes[0])


_LOADS = {"no token": 0.0, "to 0.5": 1e-9, "to 0.8": 0.5, "to 1.25": 0.8, "to 2": 1.25, "to 4": 2.0, "4 and more": 4.0}
"""Least load over the mean of each colour; the fourth is that of a load near the mean."""


def load_map(title: str, rows: Mapping[str, Rows], axis: str, note: str, size: ChartSize = SMALL) -> str:
    """Draw the loads of experts over their mean as the colours of cells.

    Args:
        rows: by block, the first one on top, [number on the axis, load] of each cell; equally many.
        axis: name of the numbers on the axis.
    """
    area = _PlotArea(*load_map_ends(rows), 0.0, len(rows), size)
    width, height = area.width / len(next(iter(rows.values()))), area.height / len(rows)
    paths: dict[int, list[str]] = {}
    drawn = [_x_axis(area, axis)]
    for row, (block, cells) in enumerate(rows.items()):
        y = TOP + (row + 0.5) * height
        # About ten of the blocks have room for their numbers.
        if row % (len(rows) // 10 + 1) == 0:
            drawn.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(block)}</text>')
        for at, (_, load) in enumerate(cells):
            start = f"M{LEFT + at * width:.1f},{y:.1f}h{width - min(1.0, width / 6):.1f}"
            paths.setdefault(bisect_right([*_LOADS.values()], load) - 1, []).append(start)
    stroke = f'stroke-width="{height - min(1.0, height / 6):.1f}"'
    drawn += [f'<path class="t{colour}" {stroke} d="{"".join(cells)}"/>' for colour, cells in sorted(paths.items())]
    data = {"curves": {f"block {block},": rows[block] for block in rows}, "axis": axis, "suffix": " × the mean"}
    legend = [(f"t{colour}", name) for colour, name in enumerate(_LOADS) if colour in paths]
    return _figure(title, legend, drawn, area, {**data, "is_map": True}, [note])


def load_map_ends(rows: Mapping[str, Rows]) -> tuple[float, float]:
    """Return the ends of the axis of a `load_map`, half a cell before the first number and after the last one."""
    numbers = [cell[0] for cell in next(iter(rows.values()))]
    half = (numbers[-1] - numbers[0]) / max(1, len(numbers) - 1) / 2 or 0.5
    return numbers[0] - half, numbers[-1] + half


def time_ticks(seconds: float) -> list[tuple[float, str]]:
    """Return at most nine round times for the axis of a chart, each as seconds and as text."""
    units = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    steps = {"s": (1, 2, 5, 10, 15, 30), "min": (1, 2, 5, 10, 15, 30), "h": (1, 2, 3, 6, 12), "d": (1, 2, 5)}
    choices = [(count * units[unit], unit) for unit, counts in steps.items() for count in counts]
    days = 10.0
    while choices[-1][0] * 8 < seconds:
        choices.append((days * 86400.0, "d"))
        days *= 2
    # Eight steps at most give nine ticks.
    step, unit = next(choice for choice in choices if choice[0] * 8 >= seconds)
    return [(tick * step, f"{tick * step / units[unit]:g} {unit}") for tick in range(int(seconds / step) + 1)]


def json_attribute(value: Any) -> str:
    """Return JSON as the text of an HTML attribute in single quotes, which takes less room than in double ones."""
    return escape(json.dumps(value, allow_nan=False, separators=(",", ":")), quote=False).replace("'", "&#39;")


def axis_numbers(values: Sequence[float]) -> list[str]:
    """Write the numbers of a chart's axis in the unit of the largest: 0, 0.5 M, 1 M; 5,000 and 10,000; 3e-05."""
    largest = max(map(abs, values), default=0.0)
    unit, suffix = next(((unit, name) for least, unit, name in _UNITS if largest >= least), (1.0, ""))
    return [f"{value / unit:,.6g}{suffix}" if value else "0" for value in values]


def _figure(
    title: str,
    legend: Sequence[tuple[str, str]],
    drawn: Sequence[str],
    area: _PlotArea,
    data: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> str:
    keys = "".join(f'<span class="key {style}">{escape(name)}</span>' for style, name in legend)
    small_print = "".join(f"<small>{escape(note)}</small>" for note in notes)
    width, height = area.size
    style = f"chart{'' if area.size == SMALL else ' large'}{' many' if len(legend) > _FEW_CURVES else ''}"
    ends = [area.low_x, area.high_x]
    return (
        f"<figure class=\"{style}\" data-chart='{json_attribute({'ends': ends, **data})}'>"
        f"<figcaption>{escape(title)}{keys}{small_print}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" role="img" tabindex="0" '
        f'aria-label="{escape(title)}: arrow keys show values">{"".join(drawn)}'
        f'<line class="cursor" y1="{TOP}" y2="{area.bottom}" visibility="hidden"/></svg><output></output></figure>'
    )


def curve_classes(number: int) -> str:
    """Return the classes of a curve's colour and line, which page.css has."""
    dashes = number // _COLOURS % _LINES
    return f"c{number % _COLOURS}{f' d{dashes}' if dashes else ''}"


def _curve(area: _PlotArea, curve: StepCurve, look: str) -> str:
    parts = []
    if curve.breaks is not None:
        first, last = curve.breaks
        width = max(2.0, area.x(last) - area.x(first))
        place = f'x="{area.x(first):.1f}" y="{TOP}" width="{width:.1f}" height="{area.height}"'
        parts.append(f'<rect class="break" {place}/>')
    columns = curve.known
    if any(column.least < column.largest for column in columns):
        edge = [(column.step, column.largest) for column in columns]
        edge += [(column.step, column.least) for column in reversed(columns)]
        parts.append(f'<polygon class="band {look}" points="{area.path(edge)}"/>')
    if len(columns) == 1:
        parts.append(_dot(area, columns[0].step, columns[0].mean, look))
    elif columns:
        line = area.path([(column.step, column.mean) for column in columns])
        parts.append(f'<polyline class="curve {look}" points="{line}"/>')
    return "".join(parts)


def _mark(area: _PlotArea, mark: ChartMark) -> str:
    """Draw a mark, with a wider line that cannot be seen, for the pointer; nothing outside of the chart."""
    if not area.low_x <= mark.place <= area.high_x:
        return ""
    x = f"{area.x(mark.place):.1f}"
    line = f'x1="{x}" x2="{x}" y1="{TOP}" y2="{area.bottom}"'
    return f'<g class="mark"><title>{escape(mark.text)}</title><line {line}/><line class="near" {line}/></g>'


def _mark_label(area: _PlotArea, mark: ChartMark, number: int) -> str:
    """Write a mark's label on the side of its line with more room, at a height by the `number` of the label."""
    if not area.low_x <= mark.place <= area.high_x:
        return ""
    is_left = 2 * mark.place < area.low_x + area.high_x
    x = area.x(mark.place) + (4 if is_left else -4)
    anchor = "start" if is_left else "end"
    y = TOP + 11 + 13 * (number % _LABEL_HEIGHTS)
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(mark.label)}</text>'


def _dot(area: _PlotArea, x: float, y: float, look: str) -> str:
    return f'<circle class="dots {look}" cx="{area.x(x):.1f}" cy="{area.y(y):.1f}" r="3"/>'


def _y_axis(area: _PlotArea, ticks: Sequence[float], suffix: str = "", *, percent: bool = False) -> str:
    parts = []
    texts = [_tick_text(tick, percent) for tick in ticks] if percent else axis_numbers(ticks)
    for tick, text in zip(ticks, texts, strict=True):
        y = area.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + area.width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}{suffix}</text>')
    return "".join(parts)


def _x_axis(area: _PlotArea, name: str, ticks: Sequence[float] = (), suffix: str = "") -> str:
    below = area.size.height - 8
    parts = [f'<text class="axis" x="{LEFT - 6}" y="{below}" text-anchor="end">{name}</text>']
    whole_ticks = _ticks([area.low_x, area.high_x], are_whole=True)
    ticks = ticks or [tick for tick in whole_ticks if area.low_x <= tick <= area.high_x]
    for tick, text in zip(ticks, axis_numbers(ticks), strict=True):
        x = area.x(tick)
        # A text in the middle of its tick would leave the picture at its ends.
        anchor = "end" if x > area.size.width - 3 * RIGHT else "start" if x < LEFT + 4 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{below}" text-anchor="{anchor}">{text}{suffix}</text>')
    return "".join(parts)


def _shown_range(columns: Sequence[CurveColumn]) -> tuple[float, float]:
    """Return the values to show: all, unless a tenth of the columns would hide the rest, as a steep beginning does."""
    lows = sorted(column.least for column in columns)
    highs = sorted(column.largest for column in columns)
    tenth = len(columns) // 10
    low = lows[tenth]
    high = highs[-1 - tenth]
    margin = high - low
    if len(columns) < _FEW_COLUMNS or margin <= 0:
        return lows[0], highs[-1]
    # An end is cut only if it would take more room than all that stays, which then has a little room to that side.
    shown_low = lows[0] if low - lows[0] <= margin else low - 0.1 * margin
    shown_high = highs[-1] if highs[-1] - high <= margin else high + 0.1 * margin
    return shown_low, shown_high


def _column_data(columns: Sequence[CurveColumn]) -> list[list[float]]:
    """Return columns for the script: [step, value] if each is a single value, else [step, least, mean, largest]."""
    if all(column.least == column.largest for column in columns):
        return [[column.step, _rounded(column.mean, _DIGITS)] for column in columns]
    digits = (_DIGITS_OF_ENDS, _DIGITS, _DIGITS_OF_ENDS)
    return [[column.step, *map(_rounded, column[1:], digits)] for column in columns]


def _rounded(value: float, digits: int) -> float:
    rounded = float(f"{value:.{digits}g}")
    # `1` takes less room in the page than `1.0`; above 1e15 Python writes a float as the shorter `1e+16`.
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _tick_text(value: float, percent: bool) -> str:
    return f"{100 * value:.4g}%" if percent else axis_numbers([value])[0]


def _ticks(values: Sequence[float], *, are_whole: bool = False) -> list[float]:
    """Return about four round numbers that span the values; `are_whole`: whole numbers between them."""
    low = min(values)
    high = max(values)
    if high <= low and are_whole:
        high = low + 1
    elif high <= low:
        # A constant is shown in the middle of a range as wide as itself; 0 in one from -0.5 to 0.5.
        high = low + abs(low) / 2 or 0.5
        low = low - abs(low) / 2 or -0.5
    raw_step = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw_step))
    # A thousandth less: a step such as 2.5 must not become 5 by rounding.
    step = next(factor * power for factor in _TICK_STEPS if factor * power >= raw_step * 0.999)
    if are_whole:
        step = max(1.0, round(step))
        first = math.ceil(low / step)
        last = math.floor(high / step)
    else:
        first = math.floor(low / step)
        last = math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)] or [low]
