"""Stop a run after the current step, with a checkpoint; a job that waits in SLURM's queue is cancelled.

The run ends with exit code 75; the same `shardwise train` command with --run-dir RUN continues it.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import time
from pathlib import Path

from shardwise.base.errors import ConfigError, RunError
from shardwise.base.files import reason_of
from shardwise.cli import output
from shardwise.launch import stop_requests
from shardwise.launch.slurm import commands
from shardwise.launch.slurm.submission import submitted
from shardwise.runs.folder import RUNS, RunLock
from shardwise.runs.summary import how_it_ended

_POLL_SECONDS = 0.2


def configure(parser: argparse.ArgumentParser) -> None:
    latest = RUNS / "latest"
    parser.add_argument(
        "run", metavar="RUN", nargs="?", type=Path, default=latest, help=f"its folder (default: {latest})"
    )
    parser.add_argument("--wait", action="store_true", help="return when the run has ended, and print what it saved")


def run(arguments: argparse.Namespace) -> int:
    path: Path = arguments.run
    if not path.is_dir():
        raise ConfigError(f"there is no run {path}: name its folder")
    is_here = RunLock.is_held(path)
    holder = RunLock.holder(path)
    cancelled = [] if is_here else _jobs_before_a_start(path)
    for job in cancelled:
        commands.cancel(job.id)
        activity = "waited in SLURM's queue" if job.state == "PENDING" else "compiled for the run"
        output.line(f"job {job.id}, which {activity}, is cancelled{how_it_ended(path)}")
    if cancelled:
        return 0
    # Some cluster file systems keep locks within a host: they do not show those of a run on another host.
    is_elsewhere = holder is not None and holder["host"] != platform.node()
    if not is_here and not is_elsewhere:
        raise ConfigError(f"no run is under way in {path}{how_it_ended(path)}")
    try:
        stop_requests.request(path, "`shardwise stop`")
    except OSError as error:
        raise RunError(f"{path} cannot be asked to stop: {reason_of(error)}") from None
    shown = path.resolve() if path.is_symlink() else path
    output.line(f"asked {shown} to stop after its current step, with a checkpoint")
    if not is_here and holder is not None:
        output.line(f"whether it still runs is unknown: the run belongs to {holder['host']}; check there")
    elif arguments.wait:
        # The run itself asks each step; it may save for as long as it takes.
        while RunLock.is_held(path):
            time.sleep(_POLL_SECONDS)
        output.line(f"{shown} ended{how_it_ended(path)}")
    return 0


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
