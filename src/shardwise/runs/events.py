"""The events of a run in its metrics.jsonl: their times and numbers, the last of a kind, and what they tell of the end.

Readers that follow a run while it trains are beside the core.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import platform
from collections.abc import Mapping
from datetime import datetime
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from shardwise.base.files import open_plain
from shardwise.runs.folder import RunDirectory, event_bytes
from shardwise.runs.json_records import record_of_json

NEXT_STAGE = "next stage"
"""Reason of a "stop" event of a run that goes on in the same processes, with the sizes of its next stage."""
_LAST_SECOND = 1e11  # in the year 5138: a later time is none, and cannot be shown in every time zone


def seconds_of(event: Mapping[str, Any]) -> float:
    """Return the time of a run's event, in seconds since the epoch; NaN if it is unknown."""
    try:
        seconds = datetime.fromisoformat(event["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return math.nan
    return seconds if 0 <= seconds <= _LAST_SECOND else math.nan


def number(value: Any, default: float = math.nan) -> float:
    """Return a number of a run's event, in which "nan", "inf" and "-inf" are texts; `default` for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return default


def recorded_ending(run_path: Path) -> str:
    """Read from a run's events how it ended, in words to add to a message; empty if no event is of its end."""
    stop = last_event(run_path, "stop")
    saved = newest_recorded_checkpoint(run_path, "")
    ending = f": {stop.get('reason', 'ended')} after step {stop.get('step') or 0:,}" if stop is not None else ""
    return f"{ending}; {saved or 'no checkpoint is recorded'}" if ending or saved else ""


def newest_recorded_checkpoint(run_path: Path, nothing: str = "no checkpoint was saved") -> str:
    """Read from a run's events its newest checkpoint: until a resumed run saves one, that from which it resumed.

    Args:
        nothing: text to return if there is none.
    """
    event = last_event(run_path, "checkpoint", "resume")
    return nothing if event is None else f"its newest checkpoint is of step {event.get('step') or 0:,}"


def newest_checkpoint(run_path: Path) -> int:
    """Return the step of the newest checkpoint among a run's events; 0 without one."""
    return _last_step(run_path, "checkpoint", "resume")


def last_recorded_step(run_path: Path) -> int:
    """Return the step of a run's last event; 0 without one."""
    return _last_step(run_path, "step", "checkpoint", "resume")


def first_step(run_path: Path) -> int:
    """Return, by a run's last event of a start, the number of steps that were done then."""
    event = last_event(run_path, "start", "resume") or {}
    return int(event.get("step") or 0) if event.get("event") == "resume" else 0


def _last_step(run_path: Path, *kinds: str) -> int:
    event = last_event(run_path, *kinds) or {}
    return int(event.get("step") or 0)


def last_event(run_path: Path, *kinds: str, until: float = math.inf) -> dict[str, Any] | None:
    """Return the last event of these kinds in metrics.jsonl, not later than `until` in seconds since the epoch."""
    return last_event_line(RunDirectory(run_path).metrics, *kinds, until=until)


def last_event_line(path: Path, *kinds: str, until: float = math.inf) -> dict[str, Any] | None:
    """Return the last event of these kinds in a run's file. It is searched from its end, as it may have gigabytes."""
    try:
        with open_plain(path) as file, mmap(file.fileno(), 0, access=ACCESS_READ) as lines:
            end = len(lines) if until == math.inf else _end(lines, until)
            while (position := max(lines.rfind(event_bytes(kind), 0, end) for kind in kinds)) >= 0:
                lines.seek(lines.rfind(b"\n", 0, position) + 1)
                end = lines.tell()
                # A crash cut the line short.
                with contextlib.suppress(ValueError):
                    event = record_of_json(lines.readline())
                    if event.get("event") in kinds and not seconds_of(event) > until:
                        return event
    except (OSError, ValueError):
        # ValueError: an empty file cannot be mapped.
        pass
    return None


def _end(lines: mmap, until: float) -> int:
    """Return where the lines that are not later than `until` end; they are in the order of their times."""

    def time_of_the_next(position: int) -> float:
        lines.seek(position)
        lines.readline()
        try:
            return seconds_of(record_of_json(lines.readline()))
        except ValueError:
            return math.nan  # a line that a crash cut short, or the end

    lines.seek(bisect.bisect(range(len(lines)), until, key=time_of_the_next))
    lines.readline()
    return lines.tell()


def local_ranks(run: RunDirectory) -> int | None:
    """Read from a run's events the number of ranks of its last start; None if unknown, or other machines had some."""
    ranks = (last_event(run.path, "start") or {}).get("ranks")
    if not isinstance(ranks, int) or ranks < 1:
        return None
    # A machine has neighbouring ranks: the first and the last one tell of all.
    starts = [last_event_line(run.rank_metrics(rank), "start") or {} for rank in (0, ranks - 1)]
    return ranks if all(start.get("host") == platform.node() for start in starts) else None
