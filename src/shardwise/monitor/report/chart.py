"""Charts as inline SVG, whose colours follow the page.

Chart libraries weigh megabytes in every file (plotly 4, Vega 1); a line with an axis is little code, and the page is
then as small as what it shows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 420, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 10, 10, 26
_STEPS = (1, 2, 2.5, 5, 10)

Points = Sequence[Sequence[float]]


def line_chart(title: str, curves: Mapping[str, Points], *, dots: Points = (), percent: bool = False) -> str:
    """Curves over the steps of a run, with a place for what the pointer shows. Empty where nothing is known.

    Args:
        curves: by name, [[step, value], …].
        dots: single values, such as evaluations, which are drawn in the first curve's colour.
    """
    known = {name: points for name, points in curves.items() if points}
    everything = [point for points in known.values() for point in points] + [*dots]
    if not everything:
        return ""
    x_ticks, y_ticks = _ticks([p[0] for p in everything], 4, whole=True), _ticks([p[1] for p in everything], 4)
    low_x, high_x = min(p[0] for p in everything), max(p[0] for p in everything)
    low_y, high_y = min(y_ticks[0], *(p[1] for p in everything)), max(y_ticks[-1], *(p[1] for p in everything))

    def x(step: float) -> float:
        share = (step - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (value - low_y) / (high_y - low_y) if high_y > low_y else 0.5
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in y_ticks:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{_label(tick, percent)}</text>')
    for tick in x_ticks:
        if low_x <= tick <= high_x:
            anchor = "end" if x(tick) > WIDTH - 3 * _RIGHT else "middle"
            parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{short(tick)}</text>')
    for number, points in enumerate(known.values()):
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        if len(points) == 1:
            parts.append(_dot(x(points[0][0]), y(points[0][1]), number))
        parts.append(f'<polyline class="curve c{number}" points="{path}"/>')
    parts += [_dot(x(step), y(value), 0) for step, value in dots]
    shown = {"x": [low_x, high_x], "percent": percent, "curves": known}
    data = escape(json.dumps(shown, allow_nan=False), quote=True)
    legend = (
        "".join(f'<span class="key c{n}">{escape(name)}</span>' for n, name in enumerate(known))
        if len(known) > 1
        else ""
    )
    return (
        f'<figure class="chart" data-chart="{data}"><figcaption>{escape(title)}{legend}'
        f'<output></output></figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(title)}: arrow keys show values">{"".join(parts)}'
        f'<line class="cursor" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" visibility="hidden"/></svg></figure>'
    )


def timeline(rows: Mapping[str, Sequence[tuple[float, float, str]]]) -> str:
    """What happened when: a row for each kind, from [begin, end] in seconds since the first, with a text each."""
    known = [span for spans in rows.values() for span in spans]
    last = max((end for _, end, _ in known), default=0.0)
    if last <= 0:
        return ""
    wide, left, high = 1160, 92, 26
    parts = []
    for number, (name, spans) in enumerate(rows.items()):
        top = number * high
        parts.append(f'<text x="{left - 8}" y="{top + 16}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<line class="grid" x1="{left}" x2="{wide}" y1="{top + 12}" y2="{top + 12}"/>')
        for begin, end, text in spans:
            x = left + begin / last * (wide - left - 4)
            width = max(3.0, (end - begin) / last * (wide - left - 4))
            parts.append(
                f'<rect class="t{number}" x="{x:.1f}" y="{top + 4}" width="{width:.1f}" height="16" rx="2">'
                f"<title>{escape(text)}</title></rect>"
            )
    height = len(rows) * high
    return (
        f'<div class="scroll"><svg class="timeline" viewBox="0 0 {wide} {height}" role="img" '
        f'aria-label="timeline">{"".join(parts)}</svg></div>'
    )


def bar(parts: Mapping[str, float], label: Mapping[str, str]) -> str:
    """A bar of parts of a whole, with a legend. `label`: of each part, its amount as the reader sees it."""
    whole = sum(parts.values())
    if whole <= 0:
        return ""
    pieces, keys = [], []
    for number, (name, amount) in enumerate(parts.items()):
        share = 100 * amount / whole
        text = f"{escape(name)} {escape(label[name])}, {share:.1f} %"
        if amount > 0:
            pieces.append(f'<span class="b{number}" style="width:{share:.3f}%" title="{text}"></span>')
        amounts = f"<b>{escape(label[name])}</b><i>{share:.1f} %</i>"
        keys.append(f'<li><span class="dot b{number}"></span>{escape(name)}{amounts}</li>')
    return f'<div class="bar">{"".join(pieces)}</div><ul class="keys">{"".join(keys)}</ul>'


def short(value: float) -> str:
    """A number for an axis: 1,200; 1.2 M; 3e-05."""
    for limit, suffix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == ' k' else limit):.4g}{suffix}"
    if value and abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.6g}"


def _dot(x: float, y: float, number: int) -> str:
    return f'<circle class="dots c{number}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>'


def _label(value: float, percent: bool) -> str:
    return f"{100 * value:.4g} %" if percent else short(value)


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
