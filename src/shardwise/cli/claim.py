"""A run's folder, claimed by the process that runs there, once it is clear that the run may begin or go on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from shardwise.checkpoint_format.earlier_run import earlier_run
from shardwise.cli import output
from shardwise.config import Config
from shardwise.launch import stopping
from shardwise.runlog import RunDirectory, RunLock


def claim(held: ExitStack, run_path: Path) -> None:
    """Hold the folder's lock until `held` is left, and forget stop requests that were for an earlier run.

    Raises:
        ConfigError: another process runs there; it is named, and nothing of its run is touched.
    """
    lock = held.enter_context(RunLock(run_path))
    if lock.problem is not None:
        output.progress(
            f"warning: {run_path} cannot be locked ({lock.problem}): a second run in this folder would not be refused"
        )
    stopping.clear(run_path)


def finished(config: Config, run_path: Path) -> str | None:
    """What to say of a run in this folder that has taken all its steps; None where there is something left to do.

    Where `checkpoint.resume` names a step there may be: its checkpoints tell whether the run went back already.

    Raises:
        ConfigError: the run that is there cannot go on with this configuration.
    """
    directory = RunDirectory(run_path)
    directory.require_folder()
    if earlier_run(directory, config) is None:
        return None
    done, steps = directory.finished_steps(), config.train.steps
    if config.checkpoint.resume != "auto" or done is None or done < steps:
        return None
    return (
        f"the run in {run_path} is finished: {done:,} of {steps:,} steps, results in {directory.results}; to go on, "
        "raise train.steps"
    )
