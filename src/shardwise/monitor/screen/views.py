"""The views of the pipeline, of the nodes and of the keys, as lines."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rich.text import Text

from shardwise import units
from shardwise.config import ParallelConfig
from shardwise.cost.picture import MOST_ROWS, schedule_picture
from shardwise.monitor.groups import PipelineView
from shardwise.monitor.run import NodeView, RankView
from shardwise.monitor.screen import ink
from shardwise.monitor.screen.frame import Frame
from shardwise.monitor.screen.ink import ACCENT, BAD, FAINT, GOOD, PART_COLOURS, RULE, TEXT, WARN

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
    """The planned order of a step, as the dry run prints it."""
    parallel = _section(frame, "parallel")
    degree = parallel.get("pipeline", 1)
    head = ink.heading(width, "schedule", "" if degree == 1 else str(parallel.get("schedule", "1f1b")))
    if degree == 1:
        return [head, Text(" this run has no pipeline: all its ranks hold the whole depth of the model", FAINT)]
    train, data = _section(frame, "train"), (frame.start.get("layout") or {}).get("data")
    try:
        micro_batches = train["global_batch"] // (train["micro_batch"] * data)
        *picture, told = _picture(
            repr(parallel), micro_batches, train.get("recompute", "none"), width - 2, max(2, height - 2)
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AssertionError):
        return [head, Text(" config.yaml and the start of the run do not tell the schedule", FAINT)]
    lines = [Text.assemble(" ", line) for line in picture]
    for line in lines:
        line.truncate(width)
    numbers, with_, assumed = told.plain.partition(" with ")
    return [ink.heading(width, "schedule", numbers, f"{with_}{assumed}".strip()), *lines][:height]


def _section(frame: Frame, name: str) -> Mapping[str, Any]:
    section = frame.config.get(name)
    return section if isinstance(section, dict) else {}


def schedule_height(frame: Frame) -> int:
    """The lines that `schedule` needs."""
    return min(MOST_ROWS + 1, len(frame.pipeline)) + 4


@lru_cache(maxsize=4)
def _picture(parallel: str, micro_batches: int, recompute: str, width: int, most_rows: int) -> list[Text]:
    """The picture of a schedule, whose section is given by its text: to simulate one takes time."""
    import ast

    section = ParallelConfig.model_validate(ast.literal_eval(parallel))
    return schedule_picture(section, micro_batches, recompute, width, most_rows)  # type: ignore[arg-type]


def bubbles(frame: Frame, width: int, height: int) -> list[Text]:
    """What each pipeline rank does in a step and how long it waits, as measured."""
    measured = frame.last.get("bubble")
    told = Text.assemble(("bubble ", FAINT), (ink.percent(measured), f"bold {ACCENT}")) if measured is not None else ""
    head = ink.heading(width, "measured", told, "means over the ranks of a pipeline rank")
    views = [view for view in frame.pipeline if view.bubble is not None or view.work_seconds is not None]
    if not views:
        return [head, Text(" no rank has recorded the seconds of its stages", FAINT)]
    rows = [
        (
            ("", FAINT),
            ("ranks", FAINT),
            ("forward", PART_COLOURS["forward"]),
            ("backward", PART_COLOURS["backward"]),
            ("work", FAINT),
            ("bubble", FAINT),
        )
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
            line.append("   ").append_text(_work_and_wait(view, min(room, 80)))
    if left_out:
        lines.append(Text(f" … {left_out + 1} pipeline ranks left out", FAINT))
    return [head, *lines][:height]


def _work_and_wait(view: PipelineView, width: int) -> Text:
    """The step of a pipeline rank as a bar: forward, backward, and points where it waits."""
    forward, backward = view.forward_seconds or 0.0, view.backward_seconds or 0.0
    busy = round((1 - (view.bubble or 0.0)) * width)
    worked = {"forward": forward, "backward": backward}
    line = ink.segments(worked, busy, are_named=False) if forward + backward else Text()
    return line.append("·" * (width - line.cell_len), FAINT)


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
    found = sorted((_need(views, frame.silent, node) for node in frame.nodes), key=lambda need: (need[0], need[1].host))
    rows = height - 5
    begin = max(0, min(cursor - rows // 2, len(found) - rows))
    wide = 24 if width >= 120 else 7
    name = max(4, min(24 if width >= 120 else 12, max(len(node.host) for node in frame.nodes)))
    titles = Text(
        f" {'host':<{name}}  {'ranks':<10}  {'CPU':<{wide + 5}}  {'RAM':<{wide + (14 if width >= 100 else 5)}}", FAINT
    )
    titles.append("  devices      slowest work", FAINT)
    lines = [_node(*need, width, name, wide) for need in found[begin : begin + rows]]
    return [head, titles, *lines, Text(), graphs(frame, width), *_host_note(frame)]


def _need(
    views: Mapping[int, RankView], silent_ranks: frozenset[int], node: NodeView
) -> tuple[tuple[int, float], NodeView, RankView | None, int]:
    """Its place in the list, by how much it needs a look; itself, its slowest rank, and how many are silent."""
    own = [views[rank] for rank in node.ranks if rank in views]
    slowest = max((view for view in own if view.relative), key=lambda view: view.relative or 0.0, default=None)
    relative = slowest.relative if slowest is not None and slowest.relative else 0.0
    silent = len(silent_ranks.intersection(node.ranks))
    return (-silent, -relative if relative >= 1.15 else 0.0), node, slowest, silent


def _node(_: object, node: NodeView, slowest: RankView | None, silent: int, width: int, name: int, wide: int) -> Text:
    total = node.memory_total_bytes
    ram = node.memory_bytes / total if node.memory_bytes is not None and total else None
    line = Text.assemble((f" {(node.host or '–')[:name]:<{name}}", f"bold {TEXT}"), (f"  {_ranks(node.ranks)}", FAINT))
    line.append("  ").append_text(_gauge(node.cpu, wide))
    line.append("  ").append_text(_gauge(ram, wide))
    line.append(f" {ink.size(node.memory_bytes):>8}" if width >= 100 else "", FAINT)
    line.append(f"  {f'{len(node.devices)} × {_device(node.devices)}':<11.11}", TEXT)
    if slowest is not None and slowest.relative is not None:
        style = ink.work_style(slowest.relative)
        line.append(f"  ×{slowest.relative:.2f}", style)
        line.append(f" rank {slowest.rank}" if slowest.relative >= 1.15 else "", style)
    line.append(f"  {ink.SILENT} {silent} silent" if silent else "", f"bold {BAD}")
    return ink.fitted(line, width)


def _host_note(frame: Frame) -> list[Text]:
    device = frame.start.get("device")
    return [Text(f" device {device}", FAINT)] if device else []


def _gauge(share: float | None, wide: int) -> Text:
    if share is None:
        return Text("–".ljust(wide + 5), RULE)
    style = BAD if share > 0.95 else WARN if share > 0.8 else "#5f9db8"
    return ink.progress(share, wide, style).append(f" {share:>4.0%}", TEXT)


def _ranks(ranks: tuple[int, ...]) -> str:
    first, last = min(ranks), max(ranks)
    is_row = last - first + 1 == len(ranks) and len(ranks) > 1
    return (f"{first}–{last}" if is_row else ", ".join(map(str, ranks)))[:10].ljust(10)


def _device(devices: tuple[str, ...]) -> str:
    return ", ".join(sorted({ink.model(device) for device in devices}))


def keys(width: int, height: int) -> list[Text]:
    """What the keys do, and what the screen shows."""
    lines = [ink.heading(width, "keys"), Text()]
    for key, what in KEYS:
        lines.append(ink.fitted(Text.assemble((f"  {key:<14}", ACCENT), (what, TEXT)), width))
    lines += [Text(), ink.heading(width, "reading the screen"), Text()]
    for sentence in (
        "A cell of a heat strip stands for one rank or for several, of which it shows the worst; its height tells the "
        "same as its colour.",
        "Work is what a rank does by itself, without waiting for others: the rank that all wait for stands out.",
        "A rank that has written nothing for long is marked × and named.",
        "A column of a curve reaches from the least to the largest value of its steps, so that no spike is lost; ◆ is "
        "an evaluation. The steep beginning is cut off where it would hide the rest.",
    ):
        lines += ink.sentences(width - 1, sentence, TEXT)
    return lines[:height]
