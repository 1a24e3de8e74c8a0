"""Supervise a job of SLURM; only the script that `shardwise submit` makes calls this, on the job's first node."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

from shardwise.base.errors import ConfigError, see
from shardwise.cli import output
from shardwise.cli.run_preparation import is_finished_run
from shardwise.cli.train import with_batch
from shardwise.config import check_layout, load_config
from shardwise.launch import notices, stop_requests
from shardwise.runs.folder import RunLock
from shardwise_jobs import slurm_commands, supervisor

_LOCK_TRIES = 60
_LOCK_PAUSE = 2.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--run-dir", metavar="DIR", type=Path, required=True)
    parser.add_argument("--ranks-per-node", metavar="N", type=int, required=True)
    parser.add_argument("--killed-by", metavar="SIGNAL", type=int, help="what killed the supervisor before this one")


def run(arguments: argparse.Namespace) -> int:
    recipe = arguments.recipe
    overrides = arguments.overrides
    ranks = arguments.ranks_per_node
    run_path: Path = arguments.run_dir
    allocation = slurm_commands.allocation(os.environ)
    if not run_path.is_dir():
        raise ConfigError(
            f"--run-dir ({run_path}) is gone, with all that this job has trained: put it back and submit again with "
            "that --run-dir, or submit a new run"
            f"{see('jobs#run-folder-gone')}"
        )
    config = load_config(recipe, overrides)
    notices.set_up(config.log.notify)

    def refusal(world: int) -> str | None:
        try:
            check_layout(with_batch(config, world, run_path), world)
        except ConfigError as error:
            return str(error)
        return None

    # The process that had the lock before is gone, and the file system may not know it yet.
    if allocation.requeues or arguments.killed_by is not None:
        _await_lock(run_path)
    with contextlib.ExitStack() as locks:
        if is_finished_run(locks, config, run_path, None):
            return 0
        nodes = supervisor.usable_nodes(allocation.nodes, ranks, refusal)
        if nodes < allocation.nodes:
            output.line(f"{nodes} of the job's {allocation.nodes} nodes are used: {refusal(allocation.nodes * ranks)}")
        launcher = [sys.executable, "-P", "-m", "shardwise", "train", recipe, *overrides]
        launcher += ["--nproc", str(ranks), f"--run-dir={run_path}"]
        job = supervisor.Supervisor(
            config.launch, run_path, allocation, nodes, ranks, launcher, _say, arguments.killed_by
        )
        try:
            job.run()
        finally:
            # A late signal would kill this process, and the job's script would start another one.
            stop_requests.ignore()
    return 0


def _await_lock(run_path: Path) -> None:
    """Wait for the folder's lock: a network file system keeps that of a machine that was lost for a minute or two."""
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(ConfigError), RunLock(run_path):
            return
        time.sleep(_LOCK_PAUSE)


def _say(text: str) -> None:
    # The disk of the log may be full, which must not end the job.
    with contextlib.suppress(OSError):
        for line in text.splitlines():
            output.progress(f"shardwise: {line}")
