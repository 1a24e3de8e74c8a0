"""The panels of the overview. Each is a function of a frame, a width and a height, and gives lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from rich.text import Text

from shardwise.base import units
from shardwise.base.terminal import printable_line
from shardwise.runs.events import NEXT_STAGE, seconds_of
from shardwise_watch.cli.ls import RUN_COLUMNS
from shardwise_watch.event_text import event_text
from shardwise_watch.lost_time import CAUSES
from shardwise_watch.screen import drawing
from shardwise_watch.screen.drawing import ACCENT, BAD, BEHIND, FAINT, GOOD, PART_COLOURS, RULE, TEXT, WARN, plot_curves
from shardwise_watch.screen.frame import Frame, Span

_SPAN_NAMES: Mapping[Span, str] = {"whole": "all steps", "tenth": "last tenth", "hundredth": "last hundredth"}
_LOST = "#a9834d"


def header(frame: Frame, width: int, paused: bool = False) -> list[Text]:
    colour = drawing.STATE_COLOURS[frame.state]
    name = Text.assemble((f" {frame.name}", f"bold {TEXT}"))
    state = Text.assemble(("● ", colour), (frame.restart or frame.state, f"bold {colour}"))
    if frame.state in ("failed", "stopped") and frame.reason and not frame.failure_lines:
        state.append(f"  {frame.reason.removeprefix('failed: ')}", colour)
    if frame.behind_path is not None:
        state.append(f"  behind: {frame.behind_path.name}", BEHIND)
    if paused:
        state.append("  ❚❚ paused", f"bold {WARN}")
    heard = "" if frame.heard is None else f"heard {units.duration(round(max(0.0, frame.now - frame.heard)))} ago"
    if frame.heard is not None and frame.now - frame.heard < 1:
        heard = "heard just now"
    clock = datetime.fromtimestamp(frame.now).astimezone().strftime("%H:%M:%S")
    first = _between(width, Text.assemble(name, "  ", state), Text(f"{heard}  {clock} ", FAINT))
    if frame.problem:
        return [first, drawing.fitted_line(Text(f" {frame.problem}", f"bold {BAD}"), width)]
    done = frame.step / frame.steps if frame.steps else 0.0
    total = f" of {frame.steps:,}" if frame.steps else ""
    progress = Text.assemble((f"step {frame.step:,}", f"bold {TEXT}"), (total, TEXT))
    progress.append(f"  {drawing.percent(done)}" if frame.steps else "", TEXT)
    progress.append("" if frame.step_seconds is None else f"  {drawing.seconds(frame.step_seconds)}/step", FAINT)
    if frame.eta_seconds is not None:
        progress.append("  ETA ", FAINT)
        progress.append(drawing.seconds(frame.eta_seconds), f"bold {ACCENT}")
    room = max(4, width - progress.cell_len - 4)
    return [first, Text.assemble(" ", drawing.progress_line(done, room, colour), "  ", progress)]


class _CurveStyle(NamedTuple):
    """The way in which a curve is shown; `last` writes its last value, and `scale` a value at the scale."""

    title: str
    colour: str
    last: Callable[[object], str]
    scale: Callable[[float], str]


_CURVE_STYLES: Mapping[str, _CurveStyle] = {
    "loss": _CurveStyle("loss", ACCENT, lambda value: drawing.number_text(value, ".4f"), "{:.4g}".format),
    "tokens_per_second": _CurveStyle("tokens/s", GOOD, drawing.rate_text, drawing.rate_text),
    "grad_norm": _CurveStyle(
        "gradient norm", "#b48ead", lambda value: drawing.number_text(value, ".3g"), "{:.3g}".format
    ),
}


def curve(frame: Frame, width: int, height: int, name: str, span: Span = "whole") -> list[Text]:
    title, colour, last, scale = _CURVE_STYLES[name]
    # The loss is the largest panel: one notice that the history is still being read is enough.
    right = "reading all steps…" if name == "loss" and not frame.has_history else _SPAN_NAMES[span]
    summary = Text(last(frame.last.get(name)), f"bold {colour}")
    if name == "loss" and frame.evaluation:
        summary.append("  evaluation ", FAINT).append(last(frame.evaluation.get("loss")), f"bold {WARN}")
    head = drawing.heading(width, title, summary, right)
    curves = (frame.curves[name], frame.behind.get(name)) if name in frame.curves else None
    lines = plot_curves(*curves, width, height - 1, colour, scale) if curves else []
    return [head, *(lines or [Text(" no step is recorded yet" if not frame.step else " not recorded", FAINT)])]


def failure_panel(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the panel that says why the run failed, what is lost, and how it goes on."""
    lines = [drawing.heading(width, "failed")]
    for number, line in enumerate(frame.failure_lines):
        lines += drawing.sentences(width, printable_line(line), TEXT if number else f"bold {BAD}")
    return lines[:height]


def speed(frame: Frame, width: int, height: int) -> list[Text]:
    last = frame.last
    terms = frame.start.get("mfu_terms") or {}
    kind = f" {terms['attention']}" if last.get("mfu") is not None and "attention" in terms else ""
    memory: Mapping[str, Any] = last.get("memory_bytes") or {}
    used = sum(memory.values()) if memory else last.get("peak_memory_bytes")
    sent: Mapping[str, Any] = last.get("communication_bytes") or {}
    rows = [
        ("tokens/s", drawing.rate_text(last.get("tokens_per_second")), f"bold {GOOD}"),
        ("of one device", drawing.rate_text(last.get("tokens_per_second_per_device")), TEXT),
        ("peak", drawing.rate_text(last.get("peak_tokens_per_second")), TEXT),
        (f"MFU{kind}", drawing.percent(last.get("mfu")), f"bold {ACCENT}"),
        ("tokens", drawing.rate_text(last.get("tokens")), TEXT),
        *(
            (
                f"  {name}, {drawing.percent(numbers.get('share'), 0)}",
                drawing.number_text(numbers.get("loss"), ".4f"),
                TEXT,
            )
            for name, numbers in (last.get("sources") or {}).items()
        ),
        ("learning rate", drawing.number_text(last.get("lr"), ".2e"), TEXT),
        ("gradient norm", drawing.number_text(last.get("grad_norm"), ".3g"), TEXT),
        ("memory, rank 0", drawing.size(used), TEXT),
        *((f"  {name}", drawing.size(amount), FAINT) for name, amount in memory.items()),
        *((f"sent over {axis}", f"{drawing.size(amount)}/step", FAINT) for axis, amount in sent.items()),
        ("samples", drawing.rate_text(last.get("samples")), TEXT),
        ("parameter norm", drawing.number_text(last.get("param_norm"), ".4g"), TEXT),
    ]
    lines = [drawing.heading(width, "speed")]
    for name, value, style in rows[: height - 1]:
        lines.append(_between(width, Text(f" {name}", FAINT), Text(f"{value} ", style)))
    return lines


def step_parts_panel(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the parts of a step on rank 0 as a bar, with a legend, and the further rows of the step."""
    duration = "" if frame.step_seconds is None else drawing.seconds(frame.step_seconds)
    head = drawing.heading(width, "step", Text(duration, f"bold {TEXT}"), "rank 0, mean of 20 steps")
    rows = drawing.further_rows(frame.last)
    further = [drawing.fitted_line(Text.assemble((f" {name}  ", FAINT), (text, TEXT)), width) for name, text in rows]
    if not frame.split:
        return [head, Text(" this run has not recorded where the time of a step goes", FAINT), *further]
    total = sum(frame.split.values()) or 1.0
    bar = Text.assemble(" ", drawing.step_segments(frame.split, width - 2))
    shares = {name: amount / total for name, amount in frame.split.items()}
    legend = _legend(shares, "  ")
    # The names of larger parts are in the bar, so small ones can be left out.
    if legend.cell_len > width:
        legend = _legend({name: share for name, share in shares.items() if share >= 0.005}, " ")
    return [head, bar, legend, *further]


def _legend(shares: Mapping[str, float], gap: str) -> Text:
    line = Text()
    for name, share in shares.items():
        shown = "comm." if name == "communication" and len(gap) < 2 else name
        line.append_text(Text.assemble(" " if not line else gap, ("■ ", PART_COLOURS[name])))
        line.append(f"{shown} ", FAINT).append(drawing.percent(share, 0), TEXT)
    return line


def lost(frame: Frame, width: int, height: int) -> list[Text]:
    goodput = frame.lost.goodput
    summary = Text.assemble(("goodput ", FAINT), (drawing.percent(goodput), f"bold {_goodput_colour(goodput)}"))
    head = drawing.heading(width, "lost time", summary)
    causes = sorted(frame.lost.by_cause.items(), key=lambda pair: -pair[1])
    if height - 1 >= len(causes):
        causes = list(frame.lost.by_cause.items())
    # A bar as long as the panel would be the whole time of the run.
    run_seconds = max(frame.lost.whole, sum(seconds for _, seconds in causes)) or 1.0
    longest = max(map(len, CAUSES)) + (8 if width >= 50 else 0)
    rows = []
    for cause, seconds in causes[: height - 1]:
        count = f" ({frame.lost.steps:,})" if cause == "lost steps" and frame.lost.steps and width >= 50 else ""
        amount = Text(f"{drawing.seconds(seconds)} ", TEXT) if seconds else Text("– ", FAINT)
        name = Text(f" {cause}{count}".ljust(longest + 2), FAINT)
        bar = width - name.cell_len - 15
        line = Text.assemble(name, drawing.meter(seconds / run_seconds, bar, _LOST) if bar > 3 else "")
        rows.append(_between(width, line, amount))
    return [head, *rows]


def _goodput_colour(goodput: float | None) -> str:
    if goodput is None:
        return FAINT
    if goodput >= 0.9:
        return GOOD
    return WARN if goodput >= 0.7 else BAD


def newest_events_panel(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the newest events, the newest last; of checkpoints that follow each other only the last."""
    kept: list[Mapping[str, Any]] = []
    for event in frame.events:
        if kept and kept[-1].get("event") == event.get("event") == "checkpoint":
            kept.pop()
        kept.append(event)
    told = [event_line(event, frame.now, width) for event in kept[-(height - 1) :]]
    return [_events_heading(frame, width), *(told or [Text(" none yet", FAINT)])]


def all_events_panel(frame: Frame, width: int, height: int, skip: int = 0) -> list[Text]:
    """Draw the events without the newest `skip` ones; long texts are wrapped."""
    room = height - 1
    lines: list[Text] = []
    for event in reversed(frame.events[: len(frame.events) - skip]):
        begin, text = event_line(event, None).divide([_BEGIN])
        first, *following = text.wrap(drawing.PLAIN_CONSOLE, width - _BEGIN - 1)
        indented = [Text.assemble(" " * _BEGIN, line) for line in following]
        lines = [Text.assemble(begin, first), *indented, *lines]
        if len(lines) >= room:
            break
    lines = [drawing.fitted_line(line, width) for line in lines[-room:]]
    return [_events_heading(frame, width, "↑↓"), *(lines or [Text(" none yet", FAINT)])]


_BEGIN = len(" 01-31 23:59 ▌")


def log_panel(frame: Frame, width: int, height: int, skip: int = 0) -> list[Text]:
    """Draw the end of rank 0's log without the newest `skip` lines; long lines are wrapped."""
    lines: list[Text] = []
    for text in reversed(frame.log[: len(frame.log) - skip]):
        style = WARN if text.startswith("warning: ") else BAD if text.startswith("failed: ") else TEXT
        lines = [*drawing.sentences(width, printable_line(text) or " ", style), *lines]
        if len(lines) >= height - 1:
            break
    return [drawing.heading(width, "log of rank 0", right="↑↓"), *lines[1 - height :]]


def runs(frame: Frame, width: int, height: int, cursor: int) -> list[Text]:
    head = drawing.heading(width, "runs", right="↑↓ choose, enter shows it, b puts it behind")
    places = {frame.path.resolve(): ("shown", ACCENT), frame.behind_path: ("behind", BEHIND)}
    rows = [tuple((title, FAINT) for title in ("", *RUN_COLUMNS))]
    begin = max(0, min(cursor - height // 2, len(frame.runs) - height + 2))
    for path, _, cells in frame.runs[begin : begin + height - 2]:
        place, style = places.get(path, ("", TEXT))
        rows.append(((place, style), *((cell, drawing.STATE_COLOURS.get(cell, style)) for cell in cells)))
    lines = drawing.aligned_columns(rows, right=range(3, 10), gap=1 if width < 100 else 2)
    return [head, *drawing.marked_list(lines, width, cursor - begin + 1)]


def _events_heading(frame: Frame, width: int, keys: str = "") -> Text:
    warnings = sum(event.get("event") == "warning" for event in frame.events)
    counts = [units.counted(warnings, "warning") if warnings else "", frame.lost.later_starts_text]
    return drawing.heading(
        width, "events", right=Text(", ".join(filter(None, counts)), WARN).append(f"  {keys}" if keys else "", FAINT)
    )


_BEFORE = {
    "warning": "", "compile": "", "start": "start: ", "resume": "resumed from step {step}, ",
    "checkpoint": "checkpoint of step {step}, ", "eval_set": "evaluation of ", "eval_task": "task ",
    "ended": "ended at step {step}: ",
}  # fmt: skip
"""Words before the text of an event, by its kind."""


def event_line(event: Mapping[str, Any], now: float | None, width: int | None = None) -> Text:
    """Write an event in a line. With a `now` the line has the time of an event of that day, else the day."""
    kind = str(event.get("event"))
    text = event_text(event)
    style = {"warning": WARN, "resume": ACCENT, "ended": BAD if event.get("how") == "failed" else WARN}.get(kind, TEXT)
    if kind == "stop":
        style = {"finished": GOOD, NEXT_STAGE: TEXT}.get(text, BAD if text.startswith("failed") else WARN)
        if text not in ("finished", NEXT_STAGE) and not text.startswith("stopped"):
            text = f"stopped: {text.removeprefix('failed: ')}"
    else:
        before = _BEFORE.get(kind, f"{kind} ").format(step=f"{event.get('step') or 0:,}")
        text = f"{before}{text}" if text else before.rstrip(":, ")
    line = Text.assemble((f" {_moment(event, now)} ", FAINT), ("▌", style if style != TEXT else RULE))
    line.append(printable_line(text), style)
    if width is not None:
        line.truncate(width, overflow="ellipsis")
    return line


def _between(width: int, left: Text, right: Text) -> Text:
    """Put two texts at both ends of a line; the left one is cut if they do not fit."""
    left = drawing.fitted_line(left, max(0, width - right.cell_len))
    left.append_text(right)
    return left


def _moment(event: Mapping[str, Any], now: float | None) -> str:
    seconds = seconds_of(event)
    if math.isnan(seconds):
        return "–".rjust(5 if now is not None else 11)
    moment = datetime.fromtimestamp(seconds).astimezone()
    if now is None:
        return moment.strftime("%m-%d %H:%M")
    is_today = moment.date() == datetime.fromtimestamp(now).astimezone().date()
    return moment.strftime("%H:%M" if is_today else "%m-%d")
