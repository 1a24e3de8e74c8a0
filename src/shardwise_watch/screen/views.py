"""The views of the pipeline, of the nodes, of the keys and of the ranks, as lines.

Heat strips show all ranks at once, so that a slow, a full or a silent one is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from rich.text import Text

from shardwise.base import units
from shardwise.base.mesh_axes import AXES
from shardwise.config import ParallelConfig
from shardwise.config.schedules import DEFAULT_SCHEDULE
from shardwise.pipeline.schedule_picture import MOST_ROWS, schedule_picture
from shardwise_watch.rank_views import NodeView, PipelineView, RankView
from shardwise_watch.screen import drawing
from shardwise_watch.screen.drawing import ACCENT, BAD, FAINT, GOOD, PART_COLOURS, RAISED, RULE, TEXT, WARN
from shardwise_watch.screen.frame import Frame
from shardwise_watch.step_metrics import PARTS

KEYS = (
    ("1 … 5, tab", "overview, ranks, pipeline, nodes, events; tab: the next one"),
    ("↑ ↓", "choose a rank or a node, go through the events"),
    ("PgUp PgDn", "the same by ten"),
    ("← →", "what the cells of the ranks show: work, memory, use"),
    ("z", "curves of all steps, of the last tenth, of the last hundredth"),
    ("p", "pause: nothing is read until it is pressed again"),
    ("?", "this page"),
    ("q", "quit; the run goes on"),
)


def schedule(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the planned order of a step, as the dry run prints it."""
    parallel = _section(frame, "parallel")
    degree = parallel.get("pipeline", 1)
    head = drawing.heading(width, "schedule", "" if degree == 1 else str(parallel.get("schedule", DEFAULT_SCHEDULE)))
    if degree == 1:
        return [head, Text(" this run has no pipeline: all its ranks hold the whole depth of the model", FAINT)]
    train = _section(frame, "train")
    data = (frame.start.get("layout") or {}).get("data")
    try:
        micro_batches = train["global_batch"] // (train["micro_batch"] * data)
        *picture, caption = _picture(
            repr(parallel), micro_batches, train.get("recompute", "none"), width - 2, max(2, height - 2)
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AssertionError):
        # Another version may have written the files: a key may be missing, or have a value of another type.
        return [head, Text(" config.yaml and the start of the run do not tell the schedule", FAINT)]
    lines = [Text.assemble(" ", line) for line in picture]
    for line in lines:
        line.truncate(width)
    numbers, separator, assumptions = caption.plain.partition(" with ")
    return [drawing.heading(width, "schedule", numbers, f"{separator}{assumptions}".strip()), *lines][:height]


def _section(frame: Frame, name: str) -> Mapping[str, Any]:
    section = frame.config.get(name)
    return section if isinstance(section, dict) else {}


def schedule_height(frame: Frame) -> int:
    """Return the number of lines that `schedule` needs."""
    return min(MOST_ROWS + 1, len(frame.pipeline)) + 4


@lru_cache(maxsize=4)
def _picture(parallel: str, micro_batches: int, recompute: str, width: int, most_rows: int) -> list[Text]:
    """Draw a schedule. The section is given by its text, which can be a key of the cache: a simulation takes time."""
    import ast

    section = ParallelConfig.model_validate(ast.literal_eval(parallel))
    return schedule_picture(section, micro_batches, recompute, width, most_rows)  # type: ignore[arg-type]


def bubbles(frame: Frame, width: int, height: int) -> list[Text]:
    """List the measured work and waits of each pipeline rank in a step."""
    measured = frame.last.get("bubble")
    bubble: Text | str = ""
    if measured is not None:
        bubble = Text.assemble(("bubble ", FAINT), (drawing.percent(measured), f"bold {ACCENT}"))
    head = drawing.heading(width, "measured", bubble, "means over the ranks of a pipeline rank")
    views = [view for view in frame.pipeline if view.bubble is not None or view.work_seconds is not None]
    if not views:
        return [head, Text(" no rank has recorded the seconds of its stages", FAINT)]
    titles = ("", "ranks", "forward", "backward", "work", "bubble")
    rows = [tuple((title, PART_COLOURS.get(title, FAINT)) for title in titles)]
    left_out = max(0, len(views) - (height - 2))
    shown = views[: len(views) - left_out - 1] if left_out else views
    for view in shown:
        first = min(view.ranks)
        last = max(view.ranks)
        style = _bubble_style(view.bubble or 0.0)
        rows.append(
            (
                (f"pp {view.rank}", TEXT),
                (f"{first}" if first == last else f"{first}–{last}", FAINT),
                (drawing.seconds(view.forward_seconds), TEXT),
                (drawing.seconds(view.backward_seconds), TEXT),
                (drawing.seconds(view.work_seconds), TEXT),
                (drawing.percent(view.bubble), style),
            )
        )
    lines = drawing.columns(rows, right=(2, 3, 4, 5), gap=3)
    room = width - max(line.cell_len for line in lines) - 4
    for line, view in zip(lines[1:], shown, strict=True):
        if room > 8:
            line.append("   ").append_text(_work_and_wait(view, min(room, 80)))
    if left_out:
        lines.append(Text(f" … {left_out + 1} pipeline ranks left out", FAINT))
    return [head, *lines][:height]


def _bubble_style(bubble: float) -> str:
    if bubble > 0.3:
        return BAD
    return WARN if bubble > 0.15 else TEXT


def _work_and_wait(view: PipelineView, width: int) -> Text:
    """Draw the step of a pipeline rank as a bar: forward, backward, and points for its waits."""
    forward = view.forward_seconds or 0.0
    backward = view.backward_seconds or 0.0
    busy = round((1 - (view.bubble or 0.0)) * width)
    worked = {"forward": forward, "backward": backward}
    line = drawing.segments(worked, busy, are_named=False) if forward + backward else Text()
    return line.append("·" * (width - line.cell_len), FAINT)


def graphs(frame: Frame, width: int) -> Text:
    """Write the heading with the numbers of compiled graphs."""
    counts = frame.graphs
    if not counts:
        return drawing.heading(width, "compiled graphs", Text("none", FAINT))
    missed = int(counts["misses"])
    summary = Text.assemble((f"{counts['graphs']:.0f}", f"bold {TEXT}"), ("  hits ", FAINT))
    summary.append(f"{counts['hits']:.0f}", GOOD)
    summary.append("  misses ", FAINT)
    summary.append(f"{missed}", WARN if missed else TEXT)
    summary.append(f"  {drawing.seconds(counts['seconds'])}", FAINT)
    return drawing.heading(width, "compiled graphs", summary)


class _NodeRow(NamedTuple):
    """A machine in the list, with its slowest rank and the number of its silent ones."""

    node: NodeView
    slowest: RankView | None
    silent: int

    @property
    def order(self) -> tuple[int, float, str]:
        """Key that sorts the machines with problems first: silent ranks, then slow ones, then by name."""
        relative = (self.slowest.relative or 0.0) if self.slowest is not None else 0.0
        return (-self.silent, -relative if relative >= 1.15 else 0.0, self.node.host)


def nodes(frame: Frame, width: int, height: int, cursor: int = 0) -> list[Text]:
    """List the machines of the run: their processors, memory, devices, and slowest ranks."""
    head = drawing.heading(
        width, units.counted(len(frame.nodes), "node"), right="↑↓" if len(frame.nodes) > height else ""
    )
    if not frame.nodes:
        return [head, Text(" no rank has a file yet", FAINT), Text(), graphs(frame, width)]
    views = {view.rank: view for view in frame.ranks}
    node_rows = sorted((_node_row(views, frame.silent, node) for node in frame.nodes), key=lambda row: row.order)
    # Five lines are the heading, the titles, a blank one, the graphs and the device.
    visible = height - 5
    begin = max(0, min(cursor - visible // 2, len(node_rows) - visible))
    gauge_width = 24 if width >= 120 else 7
    longest_name = max(len(node.host) for node in frame.nodes)
    name_width = max(4, min(24 if width >= 120 else 12, longest_name))
    memory_width = gauge_width + (14 if width >= 100 else 5)
    titles = Text(f" {'host':<{name_width}}  {'ranks':<10}  {'CPU':<{gauge_width + 5}}  {'RAM':<{memory_width}}", FAINT)
    titles.append("  devices      slowest work", FAINT)
    lines = [_node(row, width, name_width, gauge_width) for row in node_rows[begin : begin + visible]]
    device = frame.start.get("device")
    note = [Text(f" device {device}", FAINT)] if device else []
    return [head, titles, *lines, Text(), graphs(frame, width), *note]


def _node_row(views: Mapping[int, RankView], silent: frozenset[int], node: NodeView) -> _NodeRow:
    compared = [views[rank] for rank in node.ranks if rank in views and views[rank].relative]
    slowest = max(compared, key=lambda view: view.relative or 0.0, default=None)
    return _NodeRow(node, slowest, len(silent.intersection(node.ranks)))


def _node(row: _NodeRow, width: int, name_width: int, gauge_width: int) -> Text:
    node = row.node
    total = node.memory_total_bytes
    memory = node.memory_bytes / total if node.memory_bytes is not None and total else None
    name = (node.host or "–")[:name_width]
    line = Text.assemble((f" {name:<{name_width}}", f"bold {TEXT}"), (f"  {_ranks(node.ranks)}", FAINT))
    line.append("  ").append_text(_gauge(node.cpu, gauge_width))
    line.append("  ").append_text(_gauge(memory, gauge_width))
    line.append(f" {drawing.size(node.memory_bytes):>8}" if width >= 100 else "", FAINT)
    models = ", ".join(sorted({drawing.model(device) for device in node.devices}))
    line.append(f"  {f'{len(node.devices)} × {models}':<11.11}", TEXT)
    if row.slowest is not None and row.slowest.relative is not None:
        style = drawing.work_style(row.slowest.relative)
        line.append(f"  ×{row.slowest.relative:.2f}", style)
        line.append(f" rank {row.slowest.rank}" if row.slowest.relative >= 1.15 else "", style)
    line.append(f"  {drawing.SILENT} {row.silent} silent" if row.silent else "", f"bold {BAD}")
    return drawing.fitted(line, width)


def _gauge(share: float | None, width: int) -> Text:
    if share is None:
        return Text("–".ljust(width + 5), RULE)
    style = "#5f9db8"
    if share > 0.95:
        style = BAD
    elif share > 0.8:
        style = WARN
    return drawing.progress(share, width, style).append(f" {share:>4.0%}", TEXT)


def _ranks(ranks: tuple[int, ...]) -> str:
    first = min(ranks)
    last = max(ranks)
    is_consecutive = last - first + 1 == len(ranks) and len(ranks) > 1
    return (f"{first}–{last}" if is_consecutive else ", ".join(map(str, ranks)))[:10].ljust(10)


def keys(width: int, height: int) -> list[Text]:
    """Explain the keys and the screen."""
    lines = [drawing.heading(width, "keys"), Text()]
    for key, effect in KEYS:
        lines.append(drawing.fitted(Text.assemble((f"  {key:<14}", ACCENT), (effect, TEXT)), width))
    lines += [Text(), drawing.heading(width, "reading the screen"), Text()]
    for sentence in (
        "A cell of a heat strip stands for one rank or for several, of which it shows the worst; its height tells the "
        "same as its colour.",
        "Work is what a rank does by itself, without waiting for others: the rank that all wait for stands out.",
        "A rank that has written nothing for long is marked × and named.",
        "A column of a curve reaches from the least to the largest value of its steps, so that no spike is lost; ◆ is "
        "an evaluation. The steep beginning is cut off where it would hide the rest.",
    ):
        lines += drawing.sentences(width - 1, sentence, TEXT)
    return lines[:height]


Metric = Literal["work", "memory", "use"]
METRICS: tuple[Metric, ...] = ("work", "memory", "use")


class _MetricStyle(NamedTuple):
    """The way in which a number of the ranks is shown.

    Attributes:
        value: function that returns the number of a rank.
        style: function that returns the colour of a value.
        shown: function that writes a value.
        low: number of the lowest cell.
        least_high: lower bound for the number of the highest cell, so that small differences stay small.
        worst: function that chooses the number of a cell of several ranks.
    """

    title: str
    value: Callable[[RankView], float | None]
    style: Callable[[float], str]
    shown: Callable[[float], str]
    low: float
    least_high: float
    worst: Callable[[Sequence[float]], float] = max


_METRIC_STYLES: Mapping[Metric, _MetricStyle] = {
    "work": _MetricStyle(
        "work over the best", lambda view: view.relative, drawing.work_style, "×{:.2f}".format, 1.0, 1.5
    ),
    "memory": _MetricStyle("memory", lambda view: view.memory_bytes, drawing.memory_style, units.size, 0.0, 1.0),
    "use": _MetricStyle(
        "busy devices", lambda view: view.utilization, drawing.use_style, "{:.0%}".format, 0.0, 1.0, worst=min
    ),
}
_LABEL = 8


def strips(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the panel of the overview: a strip for each number; work has the remaining lines."""
    lines = [drawing.heading(width, f"{units.counted(len(frame.ranks), 'rank')}", worst(frame))]
    known = [name for name in METRICS if any(_METRIC_STYLES[name].value(view) is not None for view in frame.ranks)]
    if not known:
        return [*lines, Text(" no rank has recorded a step yet", FAINT)]
    rows = height - 1
    for name in known:
        # The first number has the lines that the others leave.
        strip_rows = max(1, rows - len(known) + 1) if name == known[0] else 1
        lines += _strip(frame, name, width, strip_rows)
    return lines[:height]


def worst(frame: Frame) -> Text:
    """Name the slowest rank, and the silent ones."""
    summary = Text()
    slowest = frame.slowest
    silent = sorted(frame.silent)
    if slowest is not None and slowest.relative is not None:
        style = drawing.work_style(slowest.relative)
        is_slow = style.endswith((BAD, WARN))
        summary.append("slowest ", FAINT)
        summary.append(f"rank {slowest.rank} ×{slowest.relative:.2f}", f"bold {style}" if is_slow else TEXT)
        summary.append(f"{' on ' if slowest.host else ''}{slowest.host}", TEXT if is_slow else FAINT)
    if silent:
        summary.append("  " if summary else "")
        named = ", ".join(map(str, silent[:4])) + ("…" if len(silent) > 4 else "")
        summary.append(f"{drawing.SILENT} silent: {named}", f"bold {BAD}")
    return summary


def _strip(frame: Frame, name: Metric, width: int, rows: int) -> list[Text]:
    """Draw the ranks in their order, in `rows` lines, with the range of the number at the right of the first."""
    metric_style = _METRIC_STYLES[name]
    values = [metric_style.value(view) for view in frame.ranks]
    known = [value for value in values if value is not None]
    high = max(metric_style.least_high, *known)
    span = f"{metric_style.shown(min(known))} – {metric_style.shown(max(known))}"
    if name == "work":
        span = f"max {metric_style.shown(max(known))}"
    ending = 22 if width > 60 else 0
    room = width - _LABEL - ending
    rows = min(rows, -(-len(values) // room))
    parts = _rows(frame, rows) if rows > 1 else [("", list(range(len(values))))]
    gutter = _LABEL + (6 if rows > 1 else 0)
    lines = []
    for row, (label, ranks) in enumerate(parts):
        part = frozenset(at for at, index in enumerate(ranks) if frame.ranks[index].rank in frame.silent)
        numbers = [values[at] for at in ranks]
        cells = drawing.heat(
            numbers, width - gutter - ending, metric_style.low, high, metric_style.style, part, metric_style.worst
        )
        begin = f" {name if row == 0 else '':<7}{label}".ljust(gutter)
        line = Text.assemble((begin, FAINT), drawing.fitted(cells, width - gutter - ending))
        line.append((span if row == 0 else "").rjust(ending - 1), FAINT)
        lines.append(line)
    return lines


def grid(frame: Frame, width: int, height: int, metric: Metric, cursor: RankView | None) -> list[Text]:
    """Draw all ranks by one number: a line for each pipeline rank, or several ranks in each line and cell."""
    metric_style = _METRIC_STYLES[metric]
    names = Text("←→", FAINT)
    for name in METRICS:
        names.append(f" {name}", f"bold {ACCENT}" if name == metric else FAINT)
    lines = [drawing.heading(width, metric_style.title, worst(frame) if metric == "work" else "", names)]
    values = [metric_style.value(view) for view in frame.ranks]
    known = [value for value in values if value is not None]
    if not known:
        return [*lines, Text(" no rank has recorded this", FAINT)]
    high = max(metric_style.least_high, *known)
    rows = _rows(frame, height - 2)
    for label, ranks in rows:
        room = width - _LABEL - 1
        silent = frozenset(at for at, index in enumerate(ranks) if frame.ranks[index].rank in frame.silent)
        cells = drawing.heat(
            [values[at] for at in ranks], room, metric_style.low, high, metric_style.style, silent, metric_style.worst
        )
        line = Text.assemble((f" {label}".ljust(_LABEL), FAINT), cells)
        is_here = cursor is not None and any(frame.ranks[at].rank == cursor.rank for at in ranks)
        line.append(" ◂" if is_here and line.cell_len + 2 <= width else "", ACCENT)
        lines.append(line)
    per_cell = -(-max(len(ranks) for _, ranks in rows) // (width - _LABEL - 1))
    which = "lowest" if metric_style.worst is min else "highest"
    meaning = f"a cell: the {which} of up to {per_cell} ranks" if per_cell > 1 else "a cell: a rank"
    span = f"{metric_style.shown(min(known))} to {metric_style.shown(max(known))}"
    lines.append(Text(f" {meaning}; {span}; {drawing.SILENT} silent, {drawing.NOTHING} not recorded", FAINT))
    return lines


def grid_height(frame: Frame, most: int) -> int:
    """Return the number of lines that `grid` needs."""
    return min(most, len(_rows(frame, most - 2)) + 2)


def _rows(frame: Frame, most: int) -> list[tuple[str, list[int]]]:
    """Divide the ranks into at most `most` lines of label and indices, by pipeline rank if several of these fit."""
    stages: dict[int, list[int]] = {}
    for at, view in enumerate(frame.ranks):
        stages.setdefault(view.place.get("pp", 0), []).append(at)
    if 1 < len(stages) <= most:
        return [(f"pp {stage}", ranks) for stage, ranks in sorted(stages.items())]
    count = len(frame.ranks)
    # About 64 ranks fit in a line of a terminal.
    lines = max(1, min(most, -(-count // 64)))
    per_line = max(1, -(-count // lines))
    starts = range(0, count, per_line)
    return [(f"{frame.ranks[at].rank}", list(range(at, min(count, at + per_line)))) for at in starts]


def ordered(frame: Frame, metric: Metric) -> list[RankView]:
    """Sort the ranks by need of attention: silent ones, then by the number, the worst first."""
    metric_style = _METRIC_STYLES[metric]
    # A device with little use is the worst; of work and memory the most is.
    sign = 1 if metric == "use" else -1

    def place(view: RankView) -> tuple[bool, float, int]:
        value = metric_style.value(view)
        return (view.rank not in frame.silent, float("inf") if value is None else sign * value, view.rank)

    return sorted(frame.ranks, key=place)


def listing(
    frame: Frame, width: int, height: int, views: Sequence[RankView], cursor: int, metric: Metric
) -> list[Text]:
    """List `views` in their order, with the rank at `cursor` marked."""
    head = drawing.heading(width, "ranks", right=f"{'least' if metric == 'use' else 'most'} {metric} first, ↑↓ choose")
    if not views:
        return [head, Text(" no rank has a file yet", FAINT)]
    rows = max(1, height - 2)
    begin = max(0, min(cursor - rows // 2, len(views) - rows))
    axes = [axis.name for axis in AXES if not axis.is_optional or any(axis.name in view.place for view in views)]
    names = ("rank", *axes, "host", "device", "step", "work", "×best", "memory", "busy", "heard")
    parts = PARTS if width >= 150 else ()
    cells = [tuple((name, FAINT) for name in (*names, *parts))]
    cells += [(*_cells(frame, view, axes), *_parts(view, parts)) for view in views[begin : begin + rows]]
    # All columns but the host and the device are numbers.
    right = [at for at in range(len(cells[0])) if names[at : at + 1] not in (("host",), ("device",))]
    lines = drawing.columns(cells, right=right, gap=1 if width < 100 else 2)
    for at, line in enumerate(lines[1:], begin):
        if at == cursor:
            line.plain = f"▸{line.plain[1:]}"
            line.pad_right(max(0, width - line.cell_len))
            line.stylize(f"bold on {RAISED}")
    return [head, *(drawing.fitted(line, width) for line in lines)]


def _parts(view: RankView, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the cells with the parts of the rank's last step."""
    split = view.last.get("split_seconds") or {}
    return [(drawing.seconds(split.get(name)), FAINT) for name in names]


def _cells(frame: Frame, view: RankView, axes: Sequence[str]) -> tuple[tuple[str, str], ...]:
    relative = "–" if view.relative is None else f"×{view.relative:.2f}"
    heard = units.duration(round(max(0.0, frame.now - view.heard)))
    busy = WARN if view.utilization is not None and view.utilization < 0.7 else TEXT
    return (
        (str(view.rank), f"bold {TEXT}"),
        *((str(view.place.get(axis, "–")), FAINT) for axis in axes),
        (view.host[:20] or "–", TEXT),
        (drawing.model(view.device)[:10], FAINT),
        ("–" if view.step is None else f"{view.step:,}", TEXT),
        (drawing.seconds(view.work_seconds), TEXT),
        (relative, FAINT if view.relative is None else drawing.work_style(view.relative)),
        (drawing.size(view.memory_bytes), TEXT),
        (drawing.percent(view.utilization, 0), busy),
        (heard, f"bold {BAD}" if view.rank in frame.silent else FAINT),
    )
