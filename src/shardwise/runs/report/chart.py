"""Charts as inline SVG and HTML, whose colours follow the page.

Chart libraries weigh megabytes in every file (plotly 4, Vega 1); a line with an axis is little code, and the page is
then as small as what it shows. Each chart has its numbers in `data-chart`, for the script of the page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, HEIGHT = 420, 236
LEFT, RIGHT, TOP, BOTTOM = 62, 10, 10, 26
_STEPS = (1, 2, 2.5, 5, 10)
_FEW_COLUMNS = 40
"""A curve with fewer shows all its values."""
_DIGITS, _DIGITS_OF_ENDS = 5, 4
"""Of a number in the page, and of the least and the largest of a column."""
_UNITS = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e5, " k"))

Rows = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Curve:
    """A number over the steps.

    Attributes:
        rows: [step, least, mean, largest] of each column, by `numbers.columns`.
        dots: [step, value] of single values, such as evaluations.
        breaks: first and last step at which the number is not finite.
    """

    rows: Rows
    dots: Rows = ()
    breaks: tuple[float, float] | None = None


@dataclass(frozen=True)
class _Frame:
    """The area of a chart: the numbers at its edges, and the places of numbers on it."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        share = (value - self.low_x) / (self.high_x - self.low_x) if self.high_x > self.low_x else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Of a value that is far outside, a place that is outside too."""
        share = (value - self.low_y) / (self.high_y - self.low_y) if self.high_y > self.low_y else 0.5
        return HEIGHT - BOTTOM - max(-1.0, min(2.0, share)) * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def line_chart(
    title: str, curves: Mapping[str, Curve], *, percent: bool = False, is_cut: bool = True, notes: Sequence[str] = ()
) -> str:
    """Curves over the steps of a run, as a line of means in a band from the least to the largest value of a column.

    Empty where nothing is known.

    Args:
        curves: by name.
        is_cut: whether few columns that would hide the rest, such as the steep beginning, may leave the chart; then the
            chart says so.
        notes: what else is said under the title.
    """
    known = {name: curve for name, curve in curves.items() if curve.rows or curve.dots or curve.breaks}
    rows = [row for curve in known.values() for row in [*curve.rows, *((x, y, y, y) for x, y in curve.dots)]]
    steps = [*(row[0] for row in rows), *(step for curve in known.values() for step in curve.breaks or ())]
    if not rows:
        return ""
    least, most = min(row[1] for row in rows), max(row[3] for row in rows)
    low, high = _middle(rows) if is_cut else (least, most)
    ticks = _ticks([low, high], 4)
    frame = _Frame(min(steps), max(steps), min(ticks[0], low), max(ticks[-1], high))
    drawn = [_y_axis(frame, ticks, percent=percent), _x_axis(frame, "step")]
    drawn.append(f'<svg x="{LEFT}" y="{TOP}" width="{_WIDE}" height="{_HIGH}" viewBox="{LEFT} {TOP} {_WIDE} {_HIGH}">')
    drawn += [_drawn(frame, curve, number) for number, curve in enumerate(known.values())]
    drawn.append("</svg>")
    dots = [(number, dot) for number, curve in enumerate(known.values()) for dot in curve.dots]
    drawn += [_dot(frame, dot[0], dot[1], number) for number, dot in dots if frame.low_y <= dot[1] <= frame.high_y]
    outside = [value for value in (least, most) if not frame.low_y <= value <= frame.high_y]
    cut = " and ".join(_told(_rounded(value, _DIGITS_OF_ENDS), percent) for value in outside)
    notes = [*notes, *([f"axis cut: values reach to {cut}"] if cut else [])]
    columns = {name: _columns(curve.rows) for name, curve in known.items()}
    shown: dict[str, Any] = {"curves": columns, "percent": percent}
    breaks = {name: curve.breaks for name, curve in known.items() if curve.breaks}
    shown |= {"breaks": breaks} if breaks else {}
    legend = [(f"c{number}", name) for number, name in enumerate(known)] if len(known) > 1 else []
    return _figure(title, legend, "".join(drawn), [frame.low_x, frame.high_x], shown, notes=notes)


def stacked_chart(title: str, names: Sequence[str], rows: Rows) -> str:
    """Seconds of parts over the steps, one on the other: [step, part, …] of each column. Empty where there is none."""
    if not rows:
        return ""
    ticks = _ticks([0.0, max(sum(row[1:]) for row in rows)], 4)
    frame = _Frame(rows[0][0], max(rows[-1][0], rows[0][0] + 1), 0.0, ticks[-1])
    drawn = []
    for number in reversed(range(len(names))):  # each part reaches down to 0, behind the parts below it
        if any(row[number + 1] for row in rows):
            tops = [(row[0], sum(row[1 : number + 2])) for row in rows]
            ends = [(frame.high_x, tops[-1][1]), (frame.high_x, 0.0), (frame.low_x, 0.0), (frame.low_x, tops[0][1])]
            drawn.append(f'<polygon class="f{number}" points="{frame.path([*tops, *ends])}"/>')
    drawn += [_y_axis(frame, ticks, " s"), _x_axis(frame, "step")]
    shown = {"names": list(names), "rows": _exact(rows)}
    legend = [(f"b{number}", name) for number, name in enumerate(names) if any(row[number + 1] for row in rows)]
    return _figure(title, legend, "".join(drawn), [frame.low_x, frame.high_x], shown)


def bar_chart(title: str, rows: Rows, axis: str, suffix: str, note: str) -> str:
    """A bar for each column, [last, least, mean, largest]: up to the largest value, darker up to the least."""
    if not rows:
        return ""
    ticks = _ticks([0.0, max(row[3] for row in rows)], 4)
    begins = [rows[0][0] - 0.5, *(row[0] + 0.5 for row in rows[:-1])]
    frame = _Frame(begins[0], rows[-1][0] + 0.5, 0.0, ticks[-1])
    gap = 1.5 if len(rows) <= _WIDE // 6 else 0.0
    drawn = [_y_axis(frame, ticks, suffix)]
    for style, at in (("most", 3), ("least", 1)):
        bars = (
            f"M{frame.x(begin) + gap / 2:.1f},{HEIGHT - BOTTOM}V{frame.y(row[at]):.1f}"
            f"H{frame.x(row[0] + 0.5) - gap / 2:.1f}V{HEIGHT - BOTTOM}"
            for begin, row in zip(begins, rows, strict=True)
        )
        drawn.append(f'<path class="{style}" d="{"".join(bars)}"/>')
    drawn.append(_x_axis(frame, axis))
    shown = {"curves": {"": _columns(rows)}, "suffix": suffix, "axis": axis}
    return _figure(title, [], "".join(drawn), [frame.low_x, frame.high_x], shown, notes=[note] if note else [])


def timeline(told: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """What happened when, as rows: the spans of training, and marks of the kinds in `names`; below them the time."""
    whole = told["seconds"]
    if whole <= 0:
        return ""
    spans = "".join(
        f'<i class="span" style="left:{100 * begin / whole:.2f}%;width:{100 * (end - begin) / whole:.2f}%"></i>'
        for begin, end in told["training"]
    )
    rows = [("training", spans)]
    for kind, name in names.items():
        places = dict.fromkeys(f"{100 * at / whole:.1f}" for at in told["marks"].get(kind, []))
        if places:
            rows.append((name, "".join(f'<i class="{kind}" style="left:{place}%"></i>' for place in places)))
    ticks = time_ticks(whole)
    lines = "".join(f'<u style="left:{100 * at / whole:.2f}%"></u>' for at, _ in ticks)
    labels = "".join(f'<span style="left:{100 * at / whole:.2f}%">{text}</span>' for at, text in ticks)
    tracks = "".join(f"<b>{escape(name)}</b><div>{lines}{marks}</div>" for name, marks in rows)
    return f'<div class="timeline">{tracks}<b></b><div class="axis">{labels}</div></div>'


def time_ticks(seconds: float) -> list[tuple[float, str]]:
    """At most nine round times from 0 on within a duration, each as seconds and as text."""
    units = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    steps = {"s": (1, 2, 5, 10, 15, 30), "min": (1, 2, 5, 10, 15, 30), "h": (1, 2, 3, 6, 12), "d": (1, 2, 5)}
    choices = [(count * units[unit], unit) for unit, counts in steps.items() for count in counts]
    days = 10.0
    while choices[-1][0] * 8 < seconds:
        choices.append((days * 86400.0, "d"))
        days *= 2
    step, unit = next(choice for choice in choices if choice[0] * 8 >= seconds)
    return [(at * step, f"{at * step / units[unit]:g} {unit}") for at in range(int(seconds / step) + 1)]


def bar(parts: Mapping[str, float], label: Mapping[str, str], colours: Sequence[int] = range(8)) -> str:
    """A bar of parts of a whole, with a legend.

    Args:
        label: of each part, its amount as the reader sees it.
        colours: of each part, its number in the page.
    """
    whole = sum(parts.values())
    if whole <= 0:
        return ""
    pieces, keys = [], []
    for number, (name, amount) in zip(colours, parts.items(), strict=False):
        share = 100 * amount / whole
        text = f"{escape(name)} {escape(label[name])}, {share:.1f} %"
        if amount > 0:
            pieces.append(f'<span class="b{number}" style="width:{share:.3f}%" title="{text}"></span>')
        amounts = f"<b>{escape(label[name])}</b><i>{share:.1f} %</i>"
        keys.append(f'<li><span class="dot b{number}"></span>{escape(name)}{amounts}</li>')
    return f'<div class="bar">{"".join(pieces)}</div><ul class="keys">{"".join(keys)}</ul>'


def attribute(value: Any) -> str:
    """JSON as the text of an attribute in single quotes, which takes less room than in double ones."""
    return escape(json.dumps(value, allow_nan=False, separators=(",", ":")), quote=False).replace("'", "&#39;")


def short(values: Sequence[float]) -> list[str]:
    """Numbers of an axis in the unit of the largest: 0, 0.5 M, 1 M; 5,000 and 10,000; 3e-05."""
    most = max(map(abs, values), default=0.0)
    limit, suffix = next((pair for pair in _UNITS if most >= pair[0]), (1.0, ""))
    return [f"{value / limit:,.6g}{suffix}" if value else "0" for value in values]


_WIDE, _HIGH = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


def _figure(
    title: str,
    legend: Sequence[tuple[str, str]],
    drawn: str,
    ends: Sequence[float],
    shown: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> str:
    keys = "".join(f'<span class="key {style}">{escape(name)}</span>' for style, name in legend)
    said = "".join(f"<small>{escape(note)}</small>" for note in notes)
    return (
        f"<figure class=\"chart\" data-chart='{attribute({'ends': ends, **shown})}'>"
        f"<figcaption>{escape(title)}{keys}{said}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(title)}: arrow keys show values">{drawn}'
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/></svg><output></output></figure>'
    )


def _drawn(frame: _Frame, curve: Curve, number: int) -> str:
    parts = []
    if curve.breaks is not None:
        begin, end = (frame.x(step) for step in curve.breaks)
        size = f'width="{max(2.0, end - begin):.1f}" height="{_HIGH}"'
        parts.append(f'<rect class="break" x="{begin:.1f}" y="{TOP}" {size}/>')
    if any(row[1] < row[3] for row in curve.rows):
        edge = [(row[0], row[3]) for row in curve.rows] + [(row[0], row[1]) for row in reversed(curve.rows)]
        parts.append(f'<polygon class="band c{number}" points="{frame.path(edge)}"/>')
    if len(curve.rows) == 1:
        parts.append(_dot(frame, curve.rows[0][0], curve.rows[0][2], number))
    elif curve.rows:
        parts.append(
            f'<polyline class="curve c{number}" points="{frame.path([(row[0], row[2]) for row in curve.rows])}"/>'
        )
    return "".join(parts)


def _dot(frame: _Frame, x: float, y: float, number: int) -> str:
    return f'<circle class="dots c{number}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3"/>'


def _y_axis(frame: _Frame, ticks: Sequence[float], suffix: str = "", *, percent: bool = False) -> str:
    parts = []
    texts = [_told(tick, percent) for tick in ticks] if percent else short(ticks)
    for tick, text in zip(ticks, texts, strict=True):
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}{suffix}</text>')
    return "".join(parts)


def _x_axis(frame: _Frame, name: str) -> str:
    parts = [f'<text class="axis" x="{LEFT - 6}" y="{HEIGHT - 8}" text-anchor="end">{name}</text>']
    ticks = [tick for tick in _ticks([frame.low_x, frame.high_x], 4, whole=True) if frame.low_x <= tick <= frame.high_x]
    for tick, text in zip(ticks, short(ticks), strict=True):
        x = frame.x(tick)
        anchor = "end" if x > WIDTH - 3 * RIGHT else "start" if x < LEFT + 4 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{text}</text>')
    return "".join(parts)


def _middle(rows: Rows) -> tuple[float, float]:
    """The values to show: all, unless a tenth of the columns would hide the rest, as the steep beginning does."""
    lows, highs = sorted(row[1] for row in rows), sorted(row[3] for row in rows)
    least, most, few = lows[0], highs[-1], len(rows) // 10
    if len(rows) < _FEW_COLUMNS:
        return least, most
    low, high = lows[few], highs[-1 - few]
    margin = high - low
    if margin <= 0:
        return least, most
    return (
        least if low - least <= margin else low - 0.1 * margin,
        most if most - high <= margin else high + 0.1 * margin,
    )


def _columns(rows: Rows) -> list[list[float]]:
    """Columns for the script; where each is a single value, [step, value]."""
    if all(row[1] == row[3] for row in rows):
        return _exact([(row[0], row[2]) for row in rows])
    return [
        [row[0], _rounded(row[1], _DIGITS_OF_ENDS), _rounded(row[2], _DIGITS), _rounded(row[3], _DIGITS_OF_ENDS)]
        for row in rows
    ]


def _exact(rows: Rows) -> list[list[float]]:
    """As exact as a reader needs it."""
    return [[row[0], *(_rounded(value, _DIGITS) for value in row[1:])] for row in rows]


def _rounded(value: float, digits: int) -> float:
    found = float(f"{value:.{digits}g}")
    return int(found) if found.is_integer() and abs(found) < 1e15 else found


def _told(value: float, percent: bool) -> str:
    return f"{100 * value:.4g} %" if percent else short([value])[0]


def _ticks(values: Sequence[float], count: int, *, whole: bool = False) -> list[float]:
    """About `count` round numbers that span the values."""
    low, high = min(values), max(values)
    if high <= low:
        low, high = (low, low + 1) if whole else (low - abs(low) / 2 or -0.5, low + abs(low) / 2 or 0.5)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in _STEPS if factor * power >= raw * 0.999)
    step = max(1.0, round(step)) if whole else step
    first = math.ceil(low / step) if whole else math.floor(low / step)
    last = math.floor(high / step) if whole else math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)] or [low]
