"""The state of submitted jobs, by SLURM and by the records of their runs, and the end of those that wait."""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.base import units
from shardwise.runs.events import last_event, recorded_ending, seconds_of
from shardwise.runs.folder import RunLock
from shardwise_jobs import slurm_commands
from shardwise_jobs.restarts import AttemptEnding, history, record
from shardwise_jobs.submission import Submitted, submitted


@dataclass(frozen=True)
class JobState:
    """The state of one job, as the user reads it."""

    id: str
    kind: str
    state: str  # queued, requeued, starting, running, or its end
    reason: str  # SLURM's reason, for a job that waits
    run: Path
    step: int | None = None  # last recorded step; None without one
    loss: float | None = None
    seconds: float | None = None
    job: slurm_commands.SlurmJob | None = None  # SLURM's facts; None if SLURM has forgotten the job

    @property
    def text(self) -> str:
        """The state, with SLURM's reason if the job waits, and with its kind if it does not train."""
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.state}{reason}{'' if self.kind == 'train' else f', {self.kind}'}"


def job_states(runs: Path, timeout: float = slurm_commands.TIMEOUT) -> list[JobState]:
    """Return the user's jobs that wait or run, and those of the runs in a folder that have ended, newest last.

    RunError: SLURM does not answer a question within `timeout` seconds.
    """
    present = {job.id: job for job in slurm_commands.jobs(timeout=timeout) if job.run is not None}
    run_paths = [path.parent for path in runs.glob("*/jobs.jsonl") if not path.parent.is_symlink()]
    known_states = []
    for job in present.values():
        run = Path(job.run or "")
        run_paths.append(run)
        if not run.is_dir():
            # SLURM cannot write its log, so nothing else shows the problem.
            known_states.append(JobState(job.id, "train", job.state.lower(), "its folder is gone", run, job=job))
    # One folder may come twice, under the name below `runs` and under the absolute one that SLURM has.
    unique_paths = {path.resolve(): path for path in run_paths}.values()
    for path in unique_paths:
        known_states += [_job_state(job, path, present.get(job.id), timeout) for job in submitted(path)]
    return sorted(known_states, key=lambda state: int(state.id) if state.id.isdecimal() else 0)


def _job_state(job: Submitted, run: Path, present: slurm_commands.SlurmJob | None, timeout: float) -> JobState:
    """Describe a job. `present`: SLURM's facts; None for a job that has ended."""
    endings = [ending for ending in history(run) if ending.job == job.id]
    began, ended = _time_span(job, run, present)
    event = last_event(run, "step", until=ended) or {}
    # The steps before are those of another job of the run.
    step: dict[str, Any] = event if job.kind == "train" and seconds_of(event) >= began else {}
    state: str = endings[-1].how if endings else "ended"
    reason = ""
    if present is not None:
        reason = present.reason
        if present.state == "PENDING":
            state = "requeued" if endings or slurm_commands.restarts(job.id, timeout) else "queued"
        elif present.state == "RUNNING":
            reason = ""
            started = time.time() - slurm_commands.seconds(present.elapsed)
            state = "running" if step and seconds_of(step) >= started else "starting"
        else:
            state = present.state.lower()
    loss = step.get("loss")
    return JobState(
        id=job.id,
        kind=job.kind,
        state=state,
        reason=reason,
        run=run,
        step=step.get("step"),
        loss=loss if isinstance(loss, float) else None,
        seconds=step.get("step_seconds"),
        job=present,
    )


def submitted_job_goodput(endings: Sequence[AttemptEnding], loading: float = 0.0) -> list[tuple[str, str]]:
    """Divide the time of a submitted job, over all its starts: the share of steps in the result, and the losses.

    A step that is done again counts once. The time in the queue between two starts does not count.

    Args:
        loading: seconds in which checkpoints were loaded.
    """
    total = sum(ending.seconds for ending in endings)
    if not total:
        return []
    launch = sum(ending.until_joined or ending.seconds for ending in endings)
    start = sum(ending.until_training or ending.seconds for ending in endings) - launch
    trained = [ending for ending in endings if ending.until_training is not None]
    lost_steps = 0
    lost = 0.0
    detection = 0.0
    for ending, following in itertools.pairwise(trained):
        detection += ending.after_last_step
        taken = ending.seconds - (ending.until_training or 0.0) - ending.after_last_step
        steps = ending.step - (ending.first_step or 0)
        undone = ending.step - (following.first_step or 0)
        if undone > 0:
            lost_steps += undone
            # The undone steps took their share of the time in which this attempt trained.
            lost += max(0.0, taken) * min(1.0, undone / max(1, steps))
    first_step = max(0.0, start - loading)
    useful = max(0.0, total - launch - start - lost - detection)
    return [
        ("goodput", f"{100 * useful / total:.1f} % of {total:,.0f} s in {units.counted(len(endings), 'start')}"),
        ("  lost steps", f"{lost:,.0f} s: {lost_steps:,} steps were done again"),
        ("  detection", f"{detection:,.0f} s from the last step before a failure to the end of its start"),
        ("  restart", f"{launch:,.0f} s until the launchers of all nodes were there"),
        ("  load", f"{loading:,.1f} s in which checkpoints were loaded"),
        ("  first step", f"{first_step:,.0f} s more until the first step: Python, torch, data and the model"),
    ]


def _time_span(job: Submitted, run: Path, present: slurm_commands.SlurmJob | None) -> tuple[float, float]:
    """Return when a job began and ended, in seconds since the epoch: a run may have had several jobs.

    A job that a kill left no record of its end lasts until the next one began.
    """
    endings = history(run)
    job_endings = [ending for ending in endings if ending.job == job.id]
    if present is not None:
        return job_endings[0].began if job_endings else time.time() - slurm_commands.seconds(present.elapsed), math.inf
    if job_endings:
        return job_endings[0].began, job_endings[-1].began + job_endings[-1].seconds
    submission = seconds_of(asdict(job))
    return submission, min((ending.began for ending in endings if ending.began > submission), default=math.inf)


def cancel_waiting_jobs(run_path: Path) -> dict[str, str]:
    """Cancel the jobs of a run that does not train yet: those that wait, start or compile; a sentence on each id."""
    kinds = {job.id: job.kind for job in submitted(run_path)}
    present = slurm_commands.jobs() if kinds and shutil.which("squeue") is not None else []
    jobs = [job for job in present if job.id in kinds and job.state in ("PENDING", "CONFIGURING", "RUNNING")]
    # The supervisor of a job claims the folder before it starts the training.
    if RunLock.holder(run_path) is not None and not any(job.state == "PENDING" for job in jobs):
        return {}
    texts = {}
    # The training first: it waits for the graphs, and would be found without them.
    for job in sorted(jobs, key=lambda job: kinds[job.id] == "compile"):
        slurm_commands.cancel(job.id)
        record(run_path, AttemptEnding("cancelled", job.id, requeues=0, nodes=job.nodes, began=time.time()))
        activity = "compiled for the run" if kinds[job.id] == "compile" else "was about to train"
        activity = "waited in SLURM's queue" if job.state == "PENDING" else activity
        texts[job.id] = f"job {job.id}, which {activity}, is cancelled{recorded_ending(run_path)}"
    return texts
