"""Follow the log of a job, until the job has ended or the user presses Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from shardwise.base.errors import RunError
from shardwise.cli import output
from shardwise.launch.slurm import commands
from shardwise.runs.summary import how_it_ended

_POLL_SECONDS = 0.5
_ASK_SLURM_SECONDS = 5.0


def follow(log: Path, job: str, run_path: Path) -> None:
    """Print what a job's log has and gets. While the job waits, print why."""
    with contextlib.suppress(KeyboardInterrupt):
        _follow(log, job, run_path)
        return
    advice = f"follow it by `shardwise jobs log {job} --follow`, end it by `shardwise stop {run_path}`"
    output.progress(f"job {job} goes on: {advice}")


def _follow(log: Path, job: str, run_path: Path) -> None:
    position = 0
    said = ""
    asked = 0.0
    present = True
    while True:
        if log.exists():
            with log.open("rb") as file:
                file.seek(position)
                new = file.read()
                position = file.tell()
            if sys.stdout.isatty():
                sys.stdout.write(output.text(new.decode(errors="replace")))
            else:
                sys.stdout.buffer.write(new)
            sys.stdout.flush()
        if not present:
            break
        if time.monotonic() - asked > _ASK_SLURM_SECONDS:
            asked = time.monotonic()
            try:
                queued = commands.jobs(user=False, ids=[job])
                present = bool(queued)
                waits = f"job {job} waits: {queued[0].reason}" if queued and queued[0].reason else ""
            except RunError as error:  # a controller that restarts: the job goes on
                waits = str(error)
            if waits and waits != said:
                output.progress(waits)
            said = waits
        time.sleep(_POLL_SECONDS if present else 0)
    output.line(f"job {job} has ended{how_it_ended(run_path)}")
