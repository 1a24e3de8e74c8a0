"""The views of the pipeline, of the nodes and of the keys, as lines."""

from __future__ import annotations

from functools import lru_cache

from rich.text import Text

from shardwise import units
from shardwise.config import ParallelConfig
from shardwise.cost.picture import schedule_picture
from shardwise.monitor.screen import ink
from shardwise.monitor.screen.frame import Frame
from shardwise.monitor.screen.ink import ACCENT, BAD, FAINT, GOOD, RULE, TEXT, WARN

KEYS = (
    ("1 … 5, tab", "overview, ranks, pipeline, nodes, events; tab: the next one"),
    ("↑ ↓", "choose a rank or a node, go through the events"),
    ("page up, page down", "the same by ten"),
    ("← →", "what the cells of the ranks show: work, memory, use"),
    ("z", "curves of all steps, of the last tenth, of the last hundredth"),
    ("p", "pause: nothing is read until it is pressed again"),
    ("?", "this page"),
    ("q", "quit; the run goes on"),
)


def schedule(frame: Frame, width: int, height: int) -> list[Text]:
    """The planned order of a step, as the dry run prints it."""
    parallel = frame.config.get("parallel") or {}
    degree = parallel.get("pipeline", 1)
    head = ink.heading(width, "schedule", "" if degree == 1 else str(parallel.get("schedule", "1f1b")))
    if degree == 1:
        return [head, Text(" this run has no pipeline: all its ranks hold the whole depth of the model", FAINT)]
    train, data = frame.config.get("train") or {}, (frame.start.get("layout") or {}).get("data")
    try:
        micro_batches = train["global_batch"] // (train["micro_batch"] * data)
        lines = _picture(repr(parallel), micro_batches, train.get("recompute", "none"), width - 2, height - 5)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AssertionError):
        return [head, Text(" config.yaml and the start of the run do not tell the schedule", FAINT)]
    shown = [Text.assemble(" ", line) for line in lines]
    for line in shown:
        line.truncate(width)
    return [head, *shown][:height]


@lru_cache(maxsize=4)
def _picture(parallel: str, micro_batches: int, recompute: str, width: int, most_rows: int) -> list[Text]:
    """The picture of a schedule, whose section is given by its text: to simulate one takes time."""
    import ast

    section = ParallelConfig.model_validate(ast.literal_eval(parallel))
    return schedule_picture(section, micro_batches, recompute, width, max(2, most_rows))  # type: ignore[arg-type]


def bubbles(frame: Frame, width: int, height: int) -> list[Text]:
    """What each pipeline rank does in a step and how long it waits, as measured."""
    measured = frame.last.get("bubble")
    told = Text.assemble(("bubble ", FAINT), (ink.percent(measured), f"bold {ACCENT}")) if measured is not None else ""
    head = ink.heading(width, "measured", told, "means over the ranks of a pipeline rank")
    views = [view for view in frame.pipeline if view.bubble is not None or view.work_seconds is not None]
    if not views:
        return [head, Text(" no rank has recorded the seconds of its stages", FAINT)]
    most = max(view.work_seconds or 0.0 for view in views) or 1.0
    rows = [
        (("", FAINT), ("ranks", FAINT), ("forward", FAINT), ("backward", FAINT), ("work", FAINT), ("bubble", FAINT))
    ]
    left_out = max(0, len(views) - (height - 2))
    shown = views[: len(views) - left_out - 1] if left_out else views
    for view in shown:
        first, last = min(view.ranks), max(view.ranks)
        style = BAD if (view.bubble or 0) > 0.3 else WARN if (view.bubble or 0) > 0.15 else TEXT
        rows.append(
            (
                (f"pp {view.rank}", TEXT),
                (f"{first}" if first == last else f"{first}–{last}", FAINT),
                (ink.seconds(view.forward_seconds), TEXT),
                (ink.seconds(view.backward_seconds), TEXT),
                (ink.seconds(view.work_seconds), TEXT),
                (ink.percent(view.bubble), style),
            )
        )
    lines = ink.columns(rows, right=(2, 3, 4, 5), gap=3)
    room = width - max(line.cell_len for line in lines) - 4
    for line, view in zip(lines[1:], shown, strict=True):
        if room > 8:
            line.append("   ")
            line.append_text(ink.meter((view.work_seconds or 0.0) / most, room, "#5f9db8", ""))
    if left_out:
        lines.append(Text(f" … {left_out + 1} pipeline ranks left out", FAINT))
    return [head, *lines][:height]


def graphs(frame: Frame, width: int) -> Text:
    """The heading that tells of compiled graphs."""
    found = frame.graphs
    if not found:
        return ink.heading(width, "compiled graphs", Text("none", FAINT))
    missed = int(found["misses"])
    told = Text.assemble((f"{found['graphs']:.0f}", f"bold {TEXT}"), ("  hits ", FAINT), (f"{found['hits']:.0f}", GOOD))
    told.append("  misses ", FAINT)
    told.append(f"{missed}", WARN if missed else TEXT)
    told.append(f"  {ink.seconds(found['seconds'])}", FAINT)
    return ink.heading(width, "compiled graphs", told)


def nodes(frame: Frame, width: int, height: int, cursor: int = 0) -> list[Text]:
    """Each machine of the run: its processors, its memory, its devices, and its slowest rank."""
    head = ink.heading(width, units.counted(len(frame.nodes), "node"), right="↑↓" if len(frame.nodes) > height else "")
    if not frame.nodes:
        return [head, Text(" no rank has a file yet", FAINT), Text(), graphs(frame, width)]
    views = {view.rank: view for view in frame.ranks}
    rows = height - 4
    begin = max(0, min(cursor - rows // 2, len(frame.nodes) - rows))
    wide = 20 if width >= 120 else 8
    lines = []
    for node in frame.nodes[begin : begin + rows]:
        own = [views[rank] for rank in node.ranks if rank in views]
        slowest = max((view for view in own if view.relative), key=lambda view: view.relative or 0.0, default=None)
        relative = slowest.relative if slowest is not None and slowest.relative else None
        silent = sum(view.is_silent for view in own)
        total = node.memory_total_bytes
        ram = node.memory_bytes / total if node.memory_bytes is not None and total else None
        line = Text.assemble((f" {node.host or '–':<14.14} ", f"bold {TEXT}"), (_ranks(node.ranks), FAINT))
        line.append_text(_gauge("cpu", node.cpu, wide))
        line.append_text(_gauge("ram", ram, wide))
        line.append(f" {ink.size(node.memory_bytes):>8}" if width >= 100 else "", FAINT)
        line.append(f"  {len(node.devices):>3} × {_device(node.devices)}", TEXT)
        if slowest is not None and relative is not None:
            style = ink.work_style(relative)
            line.append(f"  ×{relative:.2f}", style)
            line.append(f" rank {slowest.rank}" if relative >= 1.15 else "", style)
        line.append(f"  {ink.SILENT} {silent} silent" if silent else "", f"bold {BAD}")
        lines.append(ink.fitted(line, width))
    return [head, *lines, Text(), graphs(frame, width), *_host_note(frame)]


def _host_note(frame: Frame) -> list[Text]:
    device = frame.start.get("device")
    return [Text(f" device {device}", FAINT)] if device else []


def _gauge(name: str, share: float | None, wide: int) -> Text:
    gauge = Text(f"  {name} ", FAINT)
    if share is None:
        return gauge.append("–".ljust(wide + 5), RULE)
    style = BAD if share > 0.95 else WARN if share > 0.8 else "#5f9db8"
    return gauge.append_text(ink.meter(share, wide, style)).append(f" {share:>4.0%}", TEXT)


def _ranks(ranks: tuple[int, ...]) -> str:
    first, last = min(ranks), max(ranks)
    is_row = last - first + 1 == len(ranks) and len(ranks) > 1
    return (f"{first}–{last}" if is_row else ", ".join(map(str, ranks)))[:10].ljust(10)


def _device(devices: tuple[str, ...]) -> str:
    """The kind of the devices, without their numbers."""
    return next(iter(sorted({device.partition(":")[0] for device in devices})), "") or "device"


def keys(width: int, height: int) -> list[Text]:
    """What the keys do, and what the screen shows."""
    lines = [ink.heading(width, "keys"), Text()]
    for key, what in KEYS:
        lines.append(ink.fitted(Text.assemble((f"  {key:<20}", ACCENT), (what, TEXT)), width))
    lines += [Text(), ink.heading(width, "reading the screen"), Text()]
    for sentence in (
        "A cell of a heat strip stands for one rank or for several, of which it shows the highest number; its height "
        "tells the same as its colour.",
        "Work is what a rank does by itself, without waiting for others: the rank that all wait for stands out.",
        "A rank that has written nothing for long is marked × and named.",
        "A column of a curve reaches from the least to the largest value of its steps, so that no spike is lost; ◆ is "
        "an evaluation.",
    ):
        lines += ink.sentences(width - 1, sentence, TEXT)
    return lines[:height]
