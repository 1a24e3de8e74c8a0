"""Stop a run after the current step, with a checkpoint; a job that waits in SLURM's queue is cancelled.

The run ends with exit code 75; the same `shardwise train` command with --run-dir RUN continues it.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

from shardwise.base.errors import ConfigError
from shardwise.base.registered import provided
from shardwise.cli import output
from shardwise.cli.help import add_json
from shardwise.launch import stop_requests
from shardwise.runs.events import newest_checkpoint, recorded_ending
from shardwise.runs.folder import RUNS, RunLock

_POLL_SECONDS = 0.2


def configure(parser: argparse.ArgumentParser) -> None:
    latest = RUNS / "latest"
    parser.add_argument(
        "run", metavar="RUN", nargs="?", type=Path, default=latest, help=f"its folder (default: {latest})"
    )
    parser.add_argument("--wait", action="store_true", help="return when the run has ended, and print what it saved")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    path: Path = arguments.run
    if not path.is_dir():
        raise ConfigError(f"there is no run {path}: name its folder")
    is_here = RunLock.is_held(path)
    holder = RunLock.holder(path)
    # Costly to import, and only for a run that was submitted.
    cancelled: dict[str, str] = {} if is_here else provided("cancel_waiting_jobs")(path)
    shown = path.resolve() if path.is_symlink() else path
    facts = {"run": str(shown), "cancelled": [*cancelled], "asked": not cancelled}
    facts |= {"other_host": None, "ended": False, "checkpoint_step": None}
    if cancelled:
        output.answer(facts, [*cancelled.values()], as_json=arguments.json)
        return 0
    # Some cluster file systems keep locks within a host: they do not show those of a run on another host.
    is_elsewhere = holder is not None and holder["host"] != platform.node()
    if not is_here and not is_elsewhere:
        raise ConfigError(f"no run is under way in {path}{recorded_ending(path)}")
    stop_requests.request(path, "`shardwise stop`")
    say = output.progress if arguments.json else output.line
    say(f"asked {shown} to stop after its current step, with a checkpoint")
    further = []
    if not is_here and holder is not None:
        facts["other_host"] = holder["host"]
        further = [f"whether it still runs is unknown: the run belongs to {holder['host']}; check there"]
    elif arguments.wait:
        # The run itself asks each step; it may save for as long as it takes.
        while RunLock.is_held(path):
            time.sleep(_POLL_SECONDS)
        facts |= {"ended": True, "checkpoint_step": newest_checkpoint(path)}
        further = [f"{shown} ended{recorded_ending(path)}"]
    output.answer(facts, further, as_json=arguments.json)
    return 0
