"""How the screen writes: its colours, bars, heat strips, and numbers in few characters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rich.text import Text

from shardwise import units
from shardwise.monitor.run import State

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
