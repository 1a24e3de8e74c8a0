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
from shardwise.config.pipeline_schedule_specs import DEFAULT_SCHEDULE
from shardwise.pipeline.schedule_picture import MOST_ROWS, schedule_picture
from shardwise_watch.rank_views import NodeView, PipelineView, RankView
from shardwise_watch.screen import drawing
from shardwise_watch.screen.drawing import ACCENT, BAD, FAINT, GOOD, PART_COLOURS, RULE, TEXT, WARN
from shardwise_watch.screen.frame import Frame
from shardwise_watch.step_metrics import PARTS

KEYS = (
    ("1 … 6, tab", "overview, ranks, pipeline, nodes, events, log; tab: the next one"),
    ("r", "runs: enter shows another one, b puts its curves behind"),
    ("↑ ↓ PgUp PgDn", "choose a rank, a node or a run, go through events and log"),
    ("← →", "what the cells of the ranks show: work, memory, use"),
    ("z", "curves of all steps, of the last tenth, of the last hundredth"),
    ("p", "pause: nothing is read until it is pressed again"),
    ("?", "this page"),
    ("q", "quit; the run goes on"),
)
_EXPLANATIONS = (
    "A cell of a heat strip stands for one rank or for several, of which it shows the worst; its height tells the same "
    "as its colour.",
    "Work is what a rank does by itself, without waiting for others: the rank that all wait for stands out.",
    "A rank that has written nothing for long is marked × and named.",
    "A column of a curve reaches from the least to the largest value of its steps, so that no spike is lost; ◆ is an "
    "evaluation. The steep beginning is cut off where it would hide the rest.",
)
_SLOW = 1.15  # work over that of the best rank, from which on a rank is named


def schedule_view(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the screen's view of the planned order of a step, as the dry run prints it."""
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
    return min(MOST_ROWS + 1, len(frame.pipeline)) + 4


@lru_cache(maxsize=4)
def _picture(parallel: str, micro_batches: int, recompute: str, width: int, most_rows: int) -> list[Text]:
    """Draw a schedule. The section is given by its text, which can be a key of the cache: a simulation takes time."""
    import ast

    section = ParallelConfig.model_validate(ast.literal_eval(parallel))
    return schedule_picture(section, micro_batches, recompute, width, most_rows)  # type: ignore[arg-type]


def bubbles(frame: Frame, width: int, height: int) -> list[Text]:
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
        bubble_share = view.bubble or 0.0
        style = BAD if bubble_share > 0.3 else WARN if bubble_share > 0.15 else TEXT
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
    lines = drawing.aligned_columns(rows, right=(2, 3, 4, 5), gap=3)
    room = width - max(line.cell_len for line in lines) - 4
    for line, view in zip(lines[1:], shown, strict=True):
        if room > 8:
            line.append("   ").append_text(_work_and_wait(view, min(room, 80)))
    if left_out:
        lines.append(Text(f" … {left_out + 1} pipeline ranks left out", FAINT))
    return [head, *lines][:height]


def _work_and_wait(view: PipelineView, width: int) -> Text:
    forward = view.forward_seconds or 0.0
    backward = view.backward_seconds or 0.0
    busy = round((1 - (view.bubble or 0.0)) * width)
    worked = {"forward": forward, "backward": backward}
    line = drawing.step_segments(worked, busy, are_named=False) if forward + backward else Text()
    return line.append("·" * (width - line.cell_len), FAINT)


def graphs(frame: Frame, width: int) -> Text:
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


def nodes_view(frame: Frame, width: int, height: int, cursor: int = 0) -> list[Text]:
    """Draw the machines of the run: their processors, memory, devices, and slowest ranks.

    Those with problems come first: silent ranks, then slow ones.
    """
    count = len(frame.nodes)
    head = drawing.heading(width, units.counted(count, "node"), right="↑↓" if count > height else "")
    if not count:
        return [head, Text(" no rank has a file yet", FAINT), Text(), graphs(frame, width)]
    views = {view.rank: view for view in frame.ranks}

    def slowest(node: NodeView) -> RankView | None:
        compared = [views[rank] for rank in node.ranks if rank in views and views[rank].relative]
        return max(compared, key=_relative, default=None)

    def silent(node: NodeView) -> int:
        return len(frame.silent.intersection(node.ranks))

    def order(node: NodeView) -> tuple[int, float, str]:
        work = _relative(slowest(node))
        return -silent(node), -work if work >= _SLOW else 0.0, node.host

    # Five lines are the heading, the titles, a blank one, the graphs and the device.
    visible = height - 5
    begin = max(0, min(cursor - visible // 2, len(frame.nodes) - visible))
    gauge_width = 24 if width >= 120 else 7
    name_width = max(4, min(24 if width >= 120 else 12, max(len(node.host) for node in frame.nodes)))
    memory_width = gauge_width + (14 if width >= 100 else 5)
    titles = Text(f" {'host':<{name_width}}  {'ranks':<10}  {'CPU':<{gauge_width + 5}}  {'RAM':<{memory_width}}", FAINT)
    lines = [head, titles.append("  devices      slowest work", FAINT)]
    for node in sorted(frame.nodes, key=order)[begin : begin + visible]:
        total = node.memory_total_bytes
        memory = node.memory_bytes / total if node.memory_bytes is not None and total else None
        models = ", ".join(sorted({_device_model(device) for device in node.devices}))
        name = (node.host or "–")[:name_width]
        line = Text.assemble((f" {name:<{name_width}}", f"bold {TEXT}"), (f"  {_ranks(node.ranks)}", FAINT))
        line.append("  ").append_text(_gauge(node.cpu, gauge_width))
        line.append("  ").append_text(_gauge(memory, gauge_width))
        line.append(f" {drawing.size(node.memory_bytes):>8}" if width >= 100 else "", FAINT)
        line.append(f"  {f'{len(node.devices)} × {models}':<11.11}", TEXT)
        if worker := slowest(node):
            named = f" rank {worker.rank}" if _relative(worker) >= _SLOW else ""
            line.append(f"  ×{worker.relative:.2f}{named}", drawing.work_style(_relative(worker)))
        line.append(f"  {drawing.SILENT} {silent(node)} silent" if silent(node) else "", f"bold {BAD}")
        lines.append(drawing.fitted_line(line, width))
    device = frame.start.get("device")
    note = [Text(f" device {device}", FAINT)] if device else []
    return [*lines, Text(), graphs(frame, width), *note]


def _relative(view: RankView | None) -> float:
    return 0.0 if view is None else view.relative or 0.0


def _gauge(share: float | None, width: int) -> Text:
    if share is None:
        return Text("–".ljust(width + 5), RULE)
    style = "#5f9db8"
    if share > 0.95:
        style = BAD
    elif share > 0.8:
        style = WARN
    return drawing.progress_line(share, width, style).append(f" {share:>4.0%}", TEXT)


def _ranks(ranks: tuple[int, ...]) -> str:
    first = min(ranks)
    last = max(ranks)
    is_consecutive = last - first + 1 == len(ranks) and len(ranks) > 1
    return (f"{first}–{last}" if is_consecutive else ", ".join(map(str, ranks)))[:10].ljust(10)


def keys_view(width: int, height: int) -> list[Text]:
    """Explain the keys and the screen."""
    lines = [drawing.heading(width, "keys"), Text()]
    for key, effect in KEYS:
        lines.append(drawing.fitted_line(Text.assemble((f"  {key:<14}", ACCENT), (effect, TEXT)), width))
    lines += [Text(), drawing.heading(width, "reading the screen"), Text()]
    for sentence in _EXPLANATIONS:
        lines += drawing.sentences(width - 1, sentence, TEXT)
    return lines[:height]


Metric = Literal["work", "memory", "use"]
METRICS: tuple[Metric, ...] = ("work", "memory", "use")


class _MetricStyle(NamedTuple):
    """The way in which a number of the ranks is shown.

    Cells reach from the number `low` to the largest one, which is at least `least_high`, so that small differences stay
    small. `worst` chooses the number of a cell of several ranks.
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
    "memory": _MetricStyle("memory", lambda view: view.memory_bytes, lambda _: "#514d73", units.size, 0.0, 1.0),
    "use": _MetricStyle(
        "busy devices", lambda view: view.utilization, drawing.use_style, "{:.0%}".format, 0.0, 1.0, worst=min
    ),
}
_LABEL = 8


class _Heat:
    """A number of all ranks, whose strips have one scale; `known`: numbers of the ranks that recorded one."""

    def __init__(self, frame: Frame, metric: Metric) -> None:
        self._frame = frame
        self.style = _METRIC_STYLES[metric]
        self._values = [self.style.value(view) for view in frame.ranks]
        self.known = [value for value in self._values if value is not None]
        self._high = max(self.style.least_high, *self.known) if self.known else 0.0

    @property
    def ends(self) -> tuple[str, str]:
        """Least and largest number, as texts."""
        return self.style.shown(min(self.known)), self.style.shown(max(self.known))

    def strip(self, ranks: Sequence[int], width: int) -> Text:
        silent = frozenset(at for at, index in enumerate(ranks) if self._frame.ranks[index].rank in self._frame.silent)
        values = [self._values[index] for index in ranks]
        return drawing.heat_strip(values, width, self.style.low, self._high, self.style.style, silent, self.style.worst)


def rank_strips(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the panel of the overview: a strip for each number; work has the remaining lines."""
    lines = [drawing.heading(width, f"{units.counted(len(frame.ranks), 'rank')}", _slowest_rank_line(frame))]
    heats = {name: heat for name in METRICS if (heat := _Heat(frame, name)).known}
    if not heats:
        return [*lines, Text(" no rank has recorded a step yet", FAINT)]
    ending = 22 if width > 60 else 0
    # The first number has the lines that the others leave.
    most_rows = max(1, height - len(heats))
    for name, heat in heats.items():
        rows = min(most_rows, -(-len(frame.ranks) // (width - _LABEL - ending)))
        parts = _rows(frame, rows) if rows > 1 else [("", list(range(len(frame.ranks))))]
        gutter = _LABEL + (6 if rows > 1 else 0)
        span = f"max {heat.ends[1]}" if name == "work" else " – ".join(heat.ends)
        room = width - gutter - ending
        for row, (label, ranks) in enumerate(parts):
            begin = f" {name if row == 0 else '':<7}{label}".ljust(gutter)
            line = Text.assemble((begin, FAINT), drawing.fitted_line(heat.strip(ranks, room), room))
            # The range of the number stands at the right of its first line.
            lines.append(line.append((span if row == 0 else "").rjust(ending - 1), FAINT))
        most_rows = 1
    return lines[:height]


def _slowest_rank_line(frame: Frame) -> Text:
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


def rank_grid(frame: Frame, width: int, height: int, metric: Metric, cursor: RankView | None) -> list[Text]:
    """Draw all ranks by one number: a line for each pipeline rank, or several ranks in each line and cell."""
    heat = _Heat(frame, metric)
    names = Text("←→", FAINT)
    for name in METRICS:
        names.append(f" {name}", f"bold {ACCENT}" if name == metric else FAINT)
    lines = [drawing.heading(width, heat.style.title, _slowest_rank_line(frame) if metric == "work" else "", names)]
    if not heat.known:
        return [*lines, Text(" no rank has recorded this", FAINT)]
    rows = _rows(frame, height - 2)
    room = width - _LABEL - 1
    for label, ranks in rows:
        line = Text.assemble((f" {label}".ljust(_LABEL), FAINT), heat.strip(ranks, room))
        is_here = cursor is not None and any(frame.ranks[at].rank == cursor.rank for at in ranks)
        lines.append(line.append(" ◂" if is_here and line.cell_len + 2 <= width else "", ACCENT))
    per_cell = -(-max(len(ranks) for _, ranks in rows) // room)
    which = "lowest" if heat.style.worst is min else "highest"
    meaning = f"a cell: the {which} of up to {per_cell} ranks" if per_cell > 1 else "a cell: a rank"
    marks = f"{drawing.SILENT} silent, {drawing.NOTHING} not recorded"
    return [*lines, Text(f" {meaning}; {' to '.join(heat.ends)}; {marks}", FAINT)]


def rank_grid_height(frame: Frame, most: int) -> int:
    return min(most, len(_rows(frame, most - 2)) + 2)


def _rows(frame: Frame, most: int) -> list[tuple[str, list[int]]]:
    """Divide the ranks into at most `most` lines of label and indices, by pipeline rank if several of these fit."""
    stages: dict[int, list[int]] = {}
    for at, view in enumerate(frame.ranks):
        stages.setdefault(view.place.get("pp", 0), []).append(at)
    if 1 < len(stages) <= most:
        return [(f"pp {stage}", ranks) for stage, ranks in sorted(stages.items())]
    # About 64 ranks fit in a line of a terminal.
    count = len(frame.ranks)
    lines = max(1, min(most, -(-count // 64)))
    per_line = max(1, -(-count // lines))
    starts = range(0, count, per_line)
    return [(f"{frame.ranks[at].rank}", list(range(at, min(count, at + per_line)))) for at in starts]


def ordered_ranks(frame: Frame, metric: Metric) -> list[RankView]:
    """Sort the ranks that the screen shows by need of attention: silent ones, then by the number, the worst first."""
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
    head = drawing.heading(width, "ranks", right=f"{'least' if metric == 'use' else 'most'} {metric} first, ↑↓ choose")
    if not views:
        return [head, Text(" no rank has a file yet", FAINT)]
    rows = max(1, height - 2)
    begin = max(0, min(cursor - rows // 2, len(views) - rows))
    axes = [axis.name for axis in AXES if not axis.is_optional or any(axis.name in view.place for view in views)]
    parts = PARTS if width >= 150 else ()
    shown = [_cells(frame, view, axes, parts) for view in views[begin : begin + rows]]
    cells = [tuple((name, FAINT) for name in shown[0]), *(tuple(row.values()) for row in shown)]
    right = [at for at, name in enumerate(shown[0]) if name not in ("host", "device")]
    lines = drawing.aligned_columns(cells, right=right, gap=1 if width < 100 else 2)
    return [head, *drawing.marked_list(lines, width, cursor - begin + 1)]


def _cells(frame: Frame, view: RankView, axes: Sequence[str], parts: Sequence[str]) -> dict[str, tuple[str, str]]:
    split = view.last.get("split_seconds") or {}
    heard = units.duration(round(max(0.0, frame.now - view.heard)))
    busy = WARN if view.utilization is not None and view.utilization < 0.7 else TEXT
    relative = ("–", FAINT) if view.relative is None else (f"×{view.relative:.2f}", drawing.work_style(view.relative))
    return {
        "rank": (str(view.rank), f"bold {TEXT}"),
        **{axis: (str(view.place.get(axis, "–")), FAINT) for axis in axes},
        "host": (view.host[:20] or "–", TEXT),
        "device": (_device_model(view.device)[:10], FAINT),
        "step": ("–" if view.step is None else f"{view.step:,}", TEXT),
        "work": (drawing.seconds(view.work_seconds), TEXT),
        "×best": relative,
        "memory": (drawing.size(view.memory_bytes), TEXT),
        "busy": (drawing.percent(view.utilization, 0), busy),
        "heard": (heard, f"bold {BAD}" if view.rank in frame.silent else FAINT),
        **{part: (drawing.seconds(split.get(part)), FAINT) for part in parts},
    }


def _device_model(device: str) -> str:
    """Return the word of a device's name to show, such as `H100`; the first word if none has a digit."""
    words = device.partition(":")[0].split()
    return next((word for word in words if any(letter.isdigit() for letter in word)), "".join(words[:1])) or "–"
