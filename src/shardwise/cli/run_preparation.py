"""The first work of the process that launches a training: claim the run's folder, and prepare the inputs of the run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.base.errors import ConfigError, ShardwiseError
from shardwise.checkpoint.format.weight_files import resolve_weights
from shardwise.checkpoint.storage.checkpoint_folders import load_location
from shardwise.checkpoint.storage.root import Root, is_url
from shardwise.checkpoint.storage.run_identity import continued_checkpoint, earlier_run
from shardwise.cli import output
from shardwise.config import Config, size_stages_of
from shardwise.data import fetch_dataset, prepare_evaluation_sets
from shardwise.data.open_data import prepare_data
from shardwise.data.tokens.tokenizer_files import resolve_tokenizer
from shardwise.launch import stop_requests
from shardwise.launch.environment import Rank
from shardwise.runs.folder import RUNS, RunDirectory, RunLock, new_run_path


@dataclass(frozen=True)
class PreparedFolder:
    """The folder of a run that a command is about to start."""

    path: Path | None  # the folder; None where a rank other than 0 does not know it yet
    is_new: bool = False  # True if this start has made it
    latest: Path | None = None  # folder to which `runs/latest` led before; None if there was none

    def remove_refused(self) -> None:
        """Leave nothing of a first start that was refused before its first step."""
        from shardwise.runs.events import last_event

        if self.path is None or not self.is_new or last_event(self.path, "step") is not None:
            return
        link = RUNS / "latest"
        if link.is_symlink() and link.resolve() == self.path.resolve():
            link.unlink()
            if self.latest is not None:
                RunDirectory(self.latest).mark_latest()
        shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def removed_if_refused(self) -> Iterator[None]:
        """Remove the folder if the body raises that the start is refused."""
        try:
            yield
        except ShardwiseError as error:
            if error.exit_code == ConfigError.exit_code:
                self.remove_refused()
            raise


def _claim(locks: ExitStack, run_path: Path) -> None:
    """Hold the folder's lock until `locks` is left; forget stop requests to, and the failure of, an earlier start.

    ConfigError: another process runs there; it is named, and nothing of its run is touched.
    """
    lock = locks.enter_context(RunLock(run_path))
    if lock.problem is not None:
        output.progress(f"warning: cannot lock {run_path} ({lock.problem}); do not start a second run in it")
    # After the lock is taken: else a request to the run that has it would be lost.
    stop_requests.clear(run_path)
    # Without success it is told from a later failure by its time.
    with suppress(OSError):
        RunDirectory(run_path).failure.unlink(missing_ok=True)


def is_finished_run(locks: ExitStack, config: Config, run_path: Path, place: Rank | None) -> bool:
    """Before a command trains, claim a folder that exists; True if its run has taken all steps, as rank 0 then prints.

    Where `checkpoint.resume` names a step it is False: the checkpoints alone tell whether the run went back already.
    ConfigError: the run that is there cannot continue with this configuration, or another process runs there.
    """
    leads = place is None or place.rank == 0
    directory = RunDirectory(run_path)
    if leads and run_path.is_dir():
        _claim(locks, run_path)
    directory.require_folder()
    if earlier_run(directory, config) is None:
        return False
    done = directory.finished_steps()
    steps = config.train.steps
    if config.checkpoint.resume != "auto" or done is None or done < steps:
        return False
    if leads:
        output.line(
            f"the run in {run_path} is finished: {done:,} of {steps:,} steps, results in {directory.results}; to "
            "continue it, raise train.steps"
        )
    return True


def prepare_run(
    locks: ExitStack, config: Config, recipe: str, run_path: Path | None, place: Rank | None
) -> PreparedFolder:
    """Fetch what keys name by a hub id and tokenize the data, each once; then make and claim a new run's folder."""
    # Before the folder is made, so that wrong inputs leave none behind.
    fetch_inputs(config, run_path, output.progress if place is None or place.local_rank == 0 else None)
    if place is not None and place.rank != 0:
        return PreparedFolder(run_path)
    link = RUNS / "latest"
    latest = link.resolve() if link.is_dir() else None
    is_new = run_path is None or not run_path.is_dir()
    run_path = run_path or new_run_path(recipe)
    RunDirectory(run_path).create()
    if is_new:
        _claim(locks, run_path)
    return PreparedFolder(run_path, is_new, latest)


def fetch_inputs(config: Config, run_path: Path | None, announce: Callable[[str], None] | None) -> None:
    """Prepare a run: fetch what keys name by a hub id, and tokenize data; one of the processes with one cache does it.

    A run that continues has its own weights and tokenizer, so that those of `checkpoint.load` may be gone. ConfigError:
    there are no such weights, tokenizer or data, or they cannot be read.
    """
    weights = None if config.checkpoint.load is None else continued_checkpoint(config.checkpoint, run_path)
    if weights is None and config.checkpoint.load is not None:
        load = load_location(config.checkpoint.load, announce)
        load_is_url = is_url(load)
        weights = Root.of(load if load_is_url else resolve_weights(load, config.checkpoint.revision, announce=announce))
    if weights is not None:
        from shardwise.checkpoint.storage.model_tokenizer import with_loaded_tokenizer

        config = with_loaded_tokenizer(config, weights)
    if config.data.tokenizer is not None:
        resolve_tokenizer(config.data.tokenizer, announce=announce)
    fetch_dataset(config.data, announce)
    config = size_stages_of(config)[0]
    data = prepare_data(config, announce=announce)
    prepare_evaluation_sets(config, data, announce)
    if config.evaluation.tasks_every:
        from shardwise.data.evaluation_tasks import require_tasks

        require_tasks(config.evaluation, config.model, config.train, data.tokenizer_path)
