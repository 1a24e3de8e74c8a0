"""How a run ended and what it saved, as its folder's events record it."""

from __future__ import annotations

import json
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from shardwise.runlog import RunDirectory


def how_it_ended(directory: RunDirectory) -> str:
    """What to add to a message on a run that is over; empty where no event says how it ended."""
    stop, saved = _last(directory.metrics, "stop"), _newest_checkpoint(directory.metrics)
    ending = f": {stop.get('reason')} after step {stop.get('step', 0):,}" if stop is not None else ""
    return f"{ending}; {saved or 'no checkpoint is recorded'}" if ending or saved else ""


def what_is_saved(run_path: Path) -> str:
    """Of a run that was ended at once."""
    return _newest_checkpoint(RunDirectory(run_path).metrics) or "no checkpoint was saved"


def _newest_checkpoint(metrics: Path) -> str | None:
    """For a run that was resumed from a checkpoint it is that one, until the run saves the next."""
    found = _last(metrics, "checkpoint", "resume")
    return None if found is None else f"its newest checkpoint is of step {found.get('step', 0):,}"


def _last(metrics: Path, *kinds: str) -> dict[str, Any] | None:
    """The last event of these kinds; the file is searched from its end, as it may have gigabytes."""
    try:
        with metrics.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as lines:
            end = len(lines)
            while (at := max(lines.rfind(f'"event": "{kind}"'.encode(), 0, end) for kind in kinds)) >= 0:
                begin, after = lines.rfind(b"\n", 0, at) + 1, lines.find(b"\n", at)
                if (event := _parsed(lines[begin : after if after >= 0 else len(lines)])) is not None:
                    return event
                end = begin
    except (FileNotFoundError, ValueError):  # ValueError: an empty file cannot be mapped
        pass
    return None


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None where a crash cut the line short."""
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return event
