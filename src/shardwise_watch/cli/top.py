"""Watch a run: loss curve, parts of a step, every rank, pipeline, nodes, events, lost time and the end of its log.

It only reads the run's folder, so it works on any machine that can read it, and does not disturb the run. The key r
lists the runs beside it, of which another one can be shown instead, or behind its curves. `--once` prints a table, for
scripts and for terminals without a screen.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.base import units
from shardwise.base.errors import ConfigError
from shardwise.cli import output
from shardwise.runs.folder import RUNS
from shardwise_watch.curve_points import require_distinct_runs
from shardwise_watch.run import open_run
from shardwise_watch.screen import drawing
from shardwise_watch.screen.frame import Frame, FrameReader, make_frame

_LEAST_SECONDS = 0.2


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", nargs="?", type=Path, help=f"its folder (default: the newest run, {RUNS / 'latest'})")
    add("others", metavar="RUN", nargs="*", type=Path, help="further runs, the first of them behind")
    add("--once", action="store_true", help="print a table and end")
    add("--interval", metavar="S", type=float, default=2.0, help="seconds between two readings (default: 2)")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.interval >= _LEAST_SECONDS:
        raise ConfigError(f"--interval ({arguments.interval:g}) must be at least {_LEAST_SECONDS} seconds")
    paths = (arguments.run, *arguments.others)
    if arguments.once:
        for number, path in enumerate(paths):
            frame = make_frame(open_run(path, all_steps=False))
            output.line() if number else None
            output.table(_rows(frame))
            for line in frame.failure_lines:
                output.line(line)
        return 0
    _require_screen()
    reader = FrameReader(*paths)
    require_distinct_runs(paths, reader.paths)
    # Costly to import, for the screen alone.
    from shardwise_watch.screen.app import TopScreen

    # Without the mouse, so that the terminal still selects text.
    TopScreen(reader.read, arguments.interval, *reader.paths[1:2]).run(mouse=False)
    return 0


def _require_screen() -> None:
    terminal = os.environ.get("TERM", "")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("standard input and output must be a terminal: `shardwise top --once` prints a table")
    if terminal in ("", "dumb", "unknown"):
        raise ConfigError(f"TERM ({terminal}) must be a terminal with a screen: `shardwise top --once` prints a table")


def _rows(frame: Frame) -> list[tuple[str, str]]:
    last = frame.last
    lost = frame.lost
    slowest = frame.slowest
    heard = "" if frame.heard is None else f", heard {units.duration(max(0.0, frame.now - frame.heard))} ago"
    total = "" if frame.steps is None else f" of {frame.steps:,}"
    pace = "" if frame.step_seconds is None else f", {drawing.seconds(frame.step_seconds)} a step"
    left = "" if frame.eta_seconds is None else f", {drawing.seconds(frame.eta_seconds)} left"
    rows = [
        ("run", str(frame.path.resolve())),
        ("state", f"{frame.restart or frame.state}{_reason(frame)}{heard}"),
        ("step", f"{frame.step:,}{total}{pace}{left}"),
        ("loss", _loss(frame)),
        *([("evaluation", _evaluation(frame.evaluation))] if frame.evaluation else []),
        (
            "speed",
            f"{drawing.rate_text(last.get('tokens_per_second'))} tokens/s, MFU {drawing.percent(last.get('mfu'))}",
        ),
        *([("sources", _sources(last))] if last.get("sources") else []),
        *drawing.further_rows(last),
        ("split", _shares(frame.split)),
        ("ranks", _ranks(frame)),
    ]
    if slowest is not None and slowest.relative is not None:
        place = " ".join(f"{axis} {at}" for axis, at in slowest.place.items())
        where = ", ".join(filter(None, [slowest.host, place]))
        rows.append(("slowest", f"rank {slowest.rank} ({where}): {slowest.relative:.2f} times the work of the best"))
    if last.get("bubble") is not None:
        rows.append(("bubble", drawing.percent(last["bubble"])))
    if frame.graphs:
        graphs = ", ".join(f"{frame.graphs[name]:.0f} {name}" for name in ("graphs", "hits", "misses"))
        rows.append(("compile", f"{graphs}, {drawing.seconds(frame.graphs['seconds'])}"))
    causes = ", ".join(f"{cause} {drawing.seconds(seconds)}" for cause, seconds in lost.by_cause.items() if seconds)
    rows.append(("goodput", ", ".join(filter(None, [drawing.percent(lost.goodput), lost.later_starts_text]))))
    rows.append(("lost", causes or "nothing recorded"))
    warnings = [event for event in frame.events if event.get("event") == "warning"]
    if warnings:
        rows.append(("warning", f"{warnings[-1].get('text', '')} ({units.counted(len(warnings), 'warning')})"))
    return rows


def _reason(frame: Frame) -> str:
    return f" ({frame.reason})" if frame.state in ("failed", "stopped") and not frame.failure_lines else ""


def _evaluation(event: Mapping[str, Any]) -> str:
    loss = drawing.number_text(event.get("loss"), ".4f")
    perplexity = drawing.number_text(event.get("perplexity"), ".4g")
    return f"loss {loss}, perplexity {perplexity} at step {event.get('step'):,}"


def _loss(frame: Frame) -> str:
    last = frame.last
    if not last:
        return "no step is recorded yet"
    rate = drawing.number_text(last.get("lr"), ".2e")
    norm = drawing.number_text(last.get("grad_norm"), ".3g")
    return f"{drawing.number_text(last.get('loss'), '.4f')}, learning rate {rate}, gradient norm {norm}"


def _sources(last: Mapping[str, Any]) -> str:
    shown = []
    for name, numbers in last["sources"].items():
        share = drawing.percent(numbers.get("share"), 0)
        shown.append(f"{name} loss {drawing.number_text(numbers.get('loss'), '.4f')} ({share} of the samples)")
    return ", ".join(shown)


def _shares(split: object) -> str:
    assert isinstance(split, dict)
    total = sum(split.values())
    return ", ".join(f"{name} {amount / total:.0%}" for name, amount in split.items()) if total else "not recorded"


def _ranks(frame: Frame) -> str:
    memory = [view.memory_bytes for view in frame.ranks if view.memory_bytes is not None]
    used = f", memory {drawing.size(min(memory))} to {drawing.size(max(memory))}" if memory else ""
    silent = f", {units.counted(len(frame.silent), 'rank')} silent" if frame.silent else ""
    return f"{len(frame.ranks):,} on {units.counted(len(frame.nodes), 'node')}{used}{silent}"
