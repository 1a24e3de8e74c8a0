"""The rehearsal of a preemption: that a job which the cluster interrupts is queued again and resumes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from shardwise.base.errors import RunError
from shardwise.cli import output
from shardwise.launch.slurm import commands
from shardwise.runs.folder import RunDirectory
from shardwise.runs.last_events import last_step, newest_checkpoint

_POLL_SECONDS = 0.5
_TRAIN_SECONDS = 3600.0
_QUEUE_SECONDS = 3600.0
_ASK_SECONDS = 5.0


def rehearse(job: str, run_path: Path) -> int:
    """Interrupt a job after its first steps, wait until it has resumed, end it, and tell what was seen.

    Raises:
        RunError: the job did not train, was not queued again, or did not resume.
    """
    _await(lambda: last_step(run_path) > 0, job, _TRAIN_SECONDS, "take a first step")
    output.line(f"job {job} trains; now it gets SIGUSR1, as before a preemption")
    commands.warn(job)
    _await(lambda: commands.restarts(job) > 0, job, _TRAIN_SECONDS, "be queued again")
    saved = newest_checkpoint(run_path)
    output.line(f"it saved step {saved:,} and was queued again")
    resumed = RunDirectory(run_path)
    asked = time.monotonic()

    def has_resumed() -> bool:
        nonlocal asked
        if time.monotonic() - asked > _ASK_SECONDS:
            commands.start_early(job)
            asked = time.monotonic()
        return any(True for _ in resumed.events("resume"))

    _await(has_resumed, job, _QUEUE_SECONDS, "resume")
    event = list(resumed.events("resume"))[-1]
    commands.cancel(job)
    if event["step"] != saved:
        raise RunError(f"job {job} resumed after step {event['step']:,}, and had saved step {saved:,}")
    output.line(f"it resumed after step {saved:,}: a preemption costs this run no step. The job was ended")
    return 0


def _await(condition: Callable[[], bool], job: str, seconds: float, action: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RunError(f"job {job} did not {action} within {seconds:,.0f} s; it goes on")
        if not commands.jobs(user=False, ids=[job]):
            raise RunError(f"job {job} ended before it could {action}; `shardwise jobs log {job}` says why")
        time.sleep(_POLL_SECONDS)
