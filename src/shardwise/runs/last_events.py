"""The end of a run and its saved steps, from the last events in its metrics.jsonl."""

from __future__ import annotations

import contextlib
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from shardwise.base.files import open_plain
from shardwise.base.run_records import record_of
from shardwise.runs.folder import RunDirectory


def how_it_ended(run_path: Path) -> str:
    """Return the words to add to a message on a run that is over; empty if no event is known of its end."""
    stop = _last(RunDirectory(run_path).metrics, "stop")
    saved = what_is_saved(run_path, "")
    ending = f": {stop.get('reason', 'ended')} after step {stop.get('step') or 0:,}" if stop is not None else ""
    return f"{ending}; {saved or 'no checkpoint is recorded'}" if ending or saved else ""


def what_is_saved(run_path: Path, nothing: str = "no checkpoint was saved") -> str:
    """Name the newest checkpoint of a run: until a resumed run saves its first, the one that it was resumed from.

    Args:
        nothing: text to return if there is none.
    """
    event = _last(RunDirectory(run_path).metrics, "checkpoint", "resume")
    return nothing if event is None else f"its newest checkpoint is of step {event.get('step') or 0:,}"


def newest_checkpoint(run_path: Path) -> int:
    """Return the step of the newest checkpoint that a run has recorded; 0 without one."""
    event = _last(RunDirectory(run_path).metrics, "checkpoint", "resume")
    return 0 if event is None else int(event.get("step") or 0)


def last_step_event(run_path: Path) -> dict[str, Any] | None:
    """Return the last "step" event that a run has recorded; None without one."""
    return _last(RunDirectory(run_path).metrics, "step")


def last_step(run_path: Path) -> int:
    """Return the last step that a run has recorded; 0 without one."""
    event = _last(RunDirectory(run_path).metrics, "step", "checkpoint", "resume")
    return 0 if event is None else int(event.get("step") or 0)


def first_step(run_path: Path) -> int:
    """Return the number of steps that were done when the run was started last."""
    event = _last(RunDirectory(run_path).metrics, "start", "resume") or {}
    return int(event.get("step") or 0) if event.get("event") == "resume" else 0


def _last(metrics: Path, *kinds: str) -> dict[str, Any] | None:
    """Return the last event of these kinds. The file is searched from its end, because it may have gigabytes."""
    try:
        with open_plain(metrics) as file, mmap(file.fileno(), 0, access=ACCESS_READ) as lines:
            end = len(lines)
            while (position := max(lines.rfind(f'"event": "{kind}"'.encode(), 0, end) for kind in kinds)) >= 0:
                lines.seek(lines.rfind(b"\n", 0, position) + 1)
                end = lines.tell()
                with contextlib.suppress(ValueError):  # a crash cut the line short
                    event = record_of(lines.readline())
                    if event.get("event") in kinds:
                        return event
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        pass
    return None
