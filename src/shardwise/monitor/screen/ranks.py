"""Heat strips of all ranks, in which a slow, a full or a silent one is seen, and the list of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from rich.text import Text

from shardwise import units
from shardwise.monitor.run import RankView
from shardwise.monitor.screen import ink
from shardwise.monitor.screen.frame import Frame
from shardwise.monitor.screen.ink import ACCENT, BAD, FAINT, RAISED, TEXT, WARN
from shardwise.monitor.series import PARTS

Metric = Literal["work", "memory", "use"]
METRICS: tuple[Metric, ...] = ("work", "memory", "use")


class _Look(NamedTuple):
    """How a number of the ranks is shown.

    Attributes:
        value: of a rank.
        least_high: the number of the highest cell is at least this one, so that small differences stay small.
    """

    title: str
    value: Callable[[RankView], float | None]
    style: Callable[[float], str]
    shown: Callable[[float], str]
    low: float
    least_high: float
    worst: Callable[[Sequence[float]], float] = max


_LOOKS: Mapping[Metric, _Look] = {
    "work": _Look(
        "work over the best",
        lambda view: view.relative,
        ink.work_style,
        lambda value: f"×{value:.2f}",
        1.0,
        1.5,
    ),
    "memory": _Look("memory", lambda view: view.memory_bytes, ink.memory_style, units.size, 0.0, 1.0),
    "use": _Look(
        "busy devices",
        lambda view: view.utilization,
        ink.use_style,
        lambda value: f"{value:.0%}",
        0.0,
        1.0,
        min,
    ),
}
_LABEL = 8


def strips(frame: Frame, width: int, height: int) -> list[Text]:
    """The panel of the overview: a strip for each number; work has the lines that are left."""
    lines = [ink.heading(width, f"{units.counted(len(frame.ranks), 'rank')}", worst(frame))]
    known = [name for name in METRICS if any(_LOOKS[name].value(view) is not None for view in frame.ranks)]
    if not known:
        return [*lines, Text(" no rank has recorded a step yet", FAINT)]
    rows = height - 1
    for name in known:
        others = len(known) - 1
        share = max(1, rows - others) if name == known[0] else 1
        lines += _strip(frame, name, width, share)
    return lines[:height]


def worst(frame: Frame) -> Text:
    """The slowest rank, and those that are silent."""
    told, slowest, silent = Text(), frame.slowest, sorted(frame.silent)
    if slowest is not None and slowest.relative is not None:
        style = ink.work_style(slowest.relative)
        is_slow = style.endswith((BAD, WARN))
        told.append("slowest ", FAINT)
        told.append(f"rank {slowest.rank} ×{slowest.relative:.2f}", f"bold {style}" if is_slow else TEXT)
        told.append(f"{' on ' if slowest.host else ''}{slowest.host}", TEXT if is_slow else FAINT)
    if silent:
        told.append("  " if told else "")
        named = ", ".join(map(str, silent[:4])) + ("…" if len(silent) > 4 else "")
        told.append(f"{ink.SILENT} silent: {named}", f"bold {BAD}")
    return told


def _strip(frame: Frame, name: Metric, width: int, rows: int) -> list[Text]:
    """Ranks in their order, in `rows` lines, with what the number ranges over at the right of the first."""
    look = _LOOKS[name]
    values = [look.value(view) for view in frame.ranks]
    known = [value for value in values if value is not None]
    high = max(look.least_high, *known)
    span = f"{look.shown(min(known))} – {look.shown(max(known))}"
    if name == "work":
        span = f"max {look.shown(max(known))}"
    ending = 22 if width > 60 else 0
    room = width - _LABEL - ending
    rows = min(rows, -(-len(values) // room))
    parts = _rows(frame, rows) if rows > 1 else [("", list(range(len(values))))]
    gutter = _LABEL + (6 if rows > 1 else 0)
    lines = []
    for row, (label, ranks) in enumerate(parts):
        part = frozenset(at for at, index in enumerate(ranks) if frame.ranks[index].rank in frame.silent)
        numbers = [values[at] for at in ranks]
        cells = ink.heat(numbers, width - gutter - ending, look.low, high, look.style, part, look.worst)
        begin = f" {name if row == 0 else '':<7}{label}".ljust(gutter)
        line = Text.assemble((begin, FAINT), ink.fitted(cells, width - gutter - ending))
        line.append((span if row == 0 else "").rjust(ending - 1), FAINT)
        lines.append(line)
    return lines


def grid(frame: Frame, width: int, height: int, metric: Metric, cursor: RankView | None) -> list[Text]:
    """All ranks by one number: a line for each pipeline rank, or several ranks in each line and cell."""
    look = _LOOKS[metric]
    names = Text("←→", FAINT)
    for name in METRICS:
        names.append(f" {name}", f"bold {ACCENT}" if name == metric else FAINT)
    lines = [ink.heading(width, look.title, worst(frame) if metric == "work" else "", names)]
    values = [look.value(view) for view in frame.ranks]
    known = [value for value in values if value is not None]
    if not known:
        return [*lines, Text(" no rank has recorded this", FAINT)]
    high, rows = max(look.least_high, *known), _rows(frame, height - 2)
    for label, ranks in rows:
        room = width - _LABEL - 1
        silent = frozenset(at for at, index in enumerate(ranks) if frame.ranks[index].rank in frame.silent)
        cells = ink.heat([values[at] for at in ranks], room, look.low, high, look.style, silent, look.worst)
        line = Text.assemble((f" {label}".ljust(_LABEL), FAINT), cells)
        is_here = cursor is not None and any(frame.ranks[at].rank == cursor.rank for at in ranks)
        line.append(" ◂" if is_here and line.cell_len + 2 <= width else "", ACCENT)
        lines.append(line)
    per_cell = -(-max(len(ranks) for _, ranks in rows) // (width - _LABEL - 1))
    which = "lowest" if look.worst is min else "highest"
    meaning = f"a cell: the {which} of up to {per_cell} ranks" if per_cell > 1 else "a cell: a rank"
    span = f"{look.shown(min(known))} to {look.shown(max(known))}"
    lines.append(Text(f" {meaning}; {span}; {ink.SILENT} silent, {ink.NOTHING} not recorded", FAINT))
    return lines


def grid_height(frame: Frame, most: int) -> int:
    """The lines that `grid` needs."""
    return min(most, len(_rows(frame, most - 2)) + 2)


def _rows(frame: Frame, most: int) -> list[tuple[str, list[int]]]:
    """Labels and indices of ranks in at most that many lines, by pipeline rank where these are several and fit."""
    stages: dict[int, list[int]] = {}
    for at, view in enumerate(frame.ranks):
        stages.setdefault(view.place.get("pp", 0), []).append(at)
    if 1 < len(stages) <= most:
        return [(f"pp {stage}", ranks) for stage, ranks in sorted(stages.items())]
    count = len(frame.ranks)
    lines = max(1, min(most, -(-count // 64)))
    per_line = max(1, -(-count // lines))
    starts = range(0, count, per_line)
    return [(f"{frame.ranks[at].rank}", list(range(at, min(count, at + per_line)))) for at in starts]


def ordered(frame: Frame, metric: Metric) -> list[RankView]:
    """The ranks, those first that need a look: silent ones, then by the number, the worst first."""
    look, sign = _LOOKS[metric], 1 if metric == "use" else -1

    def place(view: RankView) -> tuple[bool, float, int]:
        value = look.value(view)
        return (view.rank not in frame.silent, float("inf") if value is None else sign * value, view.rank)

    return sorted(frame.ranks, key=place)


def listing(
    frame: Frame, width: int, height: int, views: Sequence[RankView], cursor: int, metric: Metric
) -> list[Text]:
    """The ranks in order of need, with that at `cursor` marked."""
    head = ink.heading(width, "ranks", right=f"{'least' if metric == 'use' else 'most'} {metric} first, ↑↓ choose")
    if not views:
        return [head, Text(" no rank has a file yet", FAINT)]
    rows = max(1, height - 2)
    begin = max(0, min(cursor - rows // 2, len(views) - rows))
    names = ("rank", "pp", "dp", "tp", "host", "device", "step", "work", "×best", "memory", "busy", "heard")
    parts = PARTS if width >= 150 else ()
    cells = [tuple((name, FAINT) for name in (*names, *parts))]
    cells += [(*_cells(frame, view), *_parts(view, parts)) for view in views[begin : begin + rows]]
    right = [at for at in range(len(cells[0])) if at not in (4, 5)]
    lines = ink.columns(cells, right=right, gap=1 if width < 100 else 2)
    for at, line in enumerate(lines[1:], begin):
        if at == cursor:
            line.plain = f"▸{line.plain[1:]}"
            line.pad_right(max(0, width - line.cell_len))
            line.stylize(f"bold on {RAISED}")
    return [head, *(ink.fitted(line, width) for line in lines)]


def _parts(view: RankView, names: Sequence[str]) -> list[tuple[str, str]]:
    """The parts of the rank's last step."""
    split = view.last.get("split_seconds") or {}
    return [(ink.seconds(split.get(name)), FAINT) for name in names]


def _cells(frame: Frame, view: RankView) -> tuple[tuple[str, str], ...]:
    relative = "–" if view.relative is None else f"×{view.relative:.2f}"
    heard = units.duration(round(max(0.0, frame.now - view.heard)))
    busy = WARN if view.utilization is not None and view.utilization < 0.7 else TEXT
    return (
        (str(view.rank), f"bold {TEXT}"),
        *((str(view.place.get(axis, "–")), FAINT) for axis in ("pp", "dp", "tp")),
        (view.host[:20] or "–", TEXT),
        (ink.model(view.device)[:10], FAINT),
        ("–" if view.step is None else f"{view.step:,}", TEXT),
        (ink.seconds(view.work_seconds), TEXT),
        (relative, FAINT if view.relative is None else ink.work_style(view.relative)),
        (ink.size(view.memory_bytes), TEXT),
        (ink.percent(view.utilization, 0), busy),
        (heard, f"bold {BAD}" if view.rank in frame.silent else FAINT),
    )
