"""The jobs of a run that have not begun to train, which `shardwise stop` cancels."""

from __future__ import annotations

import shutil
from pathlib import Path

from shardwise.runs.events import how_it_ended
from shardwise_jobs import commands
from shardwise_jobs.submission import submitted


def cancel_waiting_jobs(run_path: Path) -> list[str]:
    """Cancel the jobs of a run that wait in SLURM's queue, and those that compile for it; a sentence on each."""
    texts = []
    for job in _jobs_before_a_start(run_path):
        commands.cancel(job.id)
        activity = "waited in SLURM's queue" if job.state == "PENDING" else "compiled for the run"
        texts.append(f"job {job.id}, which {activity}, is cancelled{how_it_ended(run_path)}")
    return texts


def _jobs_before_a_start(run_path: Path) -> list[commands.SlurmJob]:
    """The jobs of this run that wait in SLURM's queue, and those that compile for it; none where none waits."""
    kinds = {job.id: job.kind for job in submitted(run_path)}
    if not kinds or shutil.which("squeue") is None:
        return []
    jobs = [job for job in commands.jobs() if job.id in kinds]
    is_waiting = any(job.state == "PENDING" for job in jobs)
    # The training first: it waits for the graphs, and would be found without them.
    jobs.sort(key=lambda job: kinds[job.id] == "compile")
    return [job for job in jobs if is_waiting and (job.state == "PENDING" or kinds[job.id] == "compile")]
