"""Trainings from Python, and the records in their folders."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from shardwise.api.arguments import config_problems, require_path
from shardwise.base.errors import ConfigError, Problems, listing, nearest_name, raise_problems
from shardwise.base.files import read_plain
from shardwise.base.registered import optional_library, provided
from shardwise.base.user_code import given_objects, object_name
from shardwise.base.yaml_and_json import json_object
from shardwise.checkpoint.storage.checkpoint_folders import checkpoint_folder
from shardwise.config import Config, config_from_sections
from shardwise.launch import stop_requests
from shardwise.launch.environment import Rank, keep_own, may_be_a_task
from shardwise.launch.external_launchers import adopt_task
from shardwise.launch.rank_output import output_restored, survive_lost_reader
from shardwise.launch.rank_process import enter_job, failure_recorded
from shardwise.runs.folder import EVENTS, RunDirectory, read_config


class Run:
    """The folder of a run that is finished, stopped or in progress. Each call reads the files again.

    Args:
        path: the folder, such as `runs/latest`.

    Attributes:
        path: the folder.

    Raises:
        ConfigError: no run was started there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(require_path("path", path, "a folder's path, such as 'runs/latest'"))
        self._directory = RunDirectory(self.path)
        if not self._directory.holds_run:
            raise ConfigError(f"{self.path} must be a run's folder: it has neither config.yaml nor metrics.jsonl")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def metrics(self, event: str = "step") -> list[dict[str, Any]]:
        """The events of one kind in `metrics.jsonl`, oldest first; docs/outputs.md has their fields and units.

        If steps were done again after a crash or a resume, the last record counts, and steps that were undone are left
        out, so that step numbers increase. All records of other events are returned.

        Args:
            event: `step`, `eval`, `checkpoint`, `resume`, `compile`, `warning`, `start` or `stop`.

        Returns:
            one mapping an event; a number that is not finite is the text "nan", "inf" or "-inf", which `float` reads.

        Raises:
            ConfigError: there is no such event.
        """
        if event not in EVENTS:
            near = nearest_name(str(event), EVENTS, cutoff=0.5)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(f"event ({event!r}) must be {listing(EVENTS, 'or')}{hint}")
        return self._directory.steps() if event == "step" else list(self._directory.events(event))

    def frame(self, event: str = "step") -> Any:
        """The events of one kind as a `pandas.DataFrame`, with a row an event, as `metrics` has them.

        The index is the step, or for events without steps the row's number. Fields of fields are columns such as
        `split_seconds.forward`; `time` is a timestamp (UTC); a number that is not finite is NaN or an infinity, and one
        that an event does not have is NaN.

        Args:
            event: as for `metrics`.

        Raises:
            ConfigError: there is no such event.
            DataError: pandas is not installed.
        """
        events = self.metrics(event)
        pandas = optional_library("pandas", "Run.frame needs", "pandas")
        frame = pandas.json_normalize(list(map(_numbers, events))).drop(columns="event", errors="ignore")
        if "time" in frame:
            frame["time"] = pandas.to_datetime(frame["time"], utc=True, format="ISO8601", errors="coerce")
        return frame.set_index("step") if "step" in frame else frame

    def plot(
        self,
        *others: Run | str | os.PathLike[str],
        metric: str = "loss",
        x: str = "step",
        smoothing: float = 0.0,
        log: str | None = None,
        axes: Any = None,
    ) -> Any:
        """Draw a metric of this run, and of others, by matplotlib; a notebook shows the picture.

        Args:
            others: further runs, or their folders.
            metric: field of the "step" events, such as `loss`, `grad_norm` or `tokens_per_second`.
            x: `step`, `tokens` or `time`, the seconds of training without those between two starts and of steps that
                were undone. Runs with other batch sizes are comparable by tokens.
            smoothing: weight of what is before a point in its exponential mean, from 0 (none) to below 1, as in
                TensorBoard; for all runs at the same distance.
            log: axes that are logarithmic: `x`, `y` or `xy`.
            axes: `matplotlib.axes.Axes` to draw on; None: those of a new figure.

        Returns:
            the axes.

        Raises:
            ConfigError: an argument is none of these, a run is given twice, or a run has no such values.
            DataError: matplotlib is not installed.
        """
        for run in others:
            if isinstance(run, str) and not Path(run).exists():
                raise ConfigError(f"others ({run}) must be runs, or their folders; a metric is metric={run!r}")
        runs = [self, *(run if isinstance(run, Run) else Run(run) for run in others)]
        paths = [run.path for run in runs]
        return provided("plot_runs")(paths, metric, x, smoothing, log, axes)

    def config(self) -> Config:
        """The configuration as the run resolved it.

        Raises:
            ConfigError: `config.yaml` is missing or damaged.
        """
        return config_from_sections(read_config(self._directory))

    def results(self) -> dict[str, Any] | None:
        """The results at the end of the training: losses, tokens, speed, peak memory; None if it has not ended.

        Raises:
            ConfigError: `results.json` is damaged.
        """
        return _object(self._directory.results)

    def environment(self) -> dict[str, Any] | None:
        """Versions, devices, command line and variables of the last start, without secrets; None before a start.

        Raises:
            ConfigError: `environment.json` is damaged.
        """
        return _object(self._directory.environment)

    def checkpoints(self) -> list[str]:
        """Paths or URLs of the intact checkpoints, newest first.

        Raises:
            StoreError: the place of the checkpoints cannot be read.
        """
        try:
            folder = checkpoint_folder(str(self.path))
        except ConfigError:
            return []  # a run without checkpoints so far
        return [str(checkpoint.folder) for checkpoint in folder.checkpoints() if checkpoint.problem is None]


def train(
    config: Config,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    name: str = "run",
    data: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    optimizer: type | None = None,
    callbacks: Sequence[Callable[..., Any]] = (),
) -> Run:
    """Train from Python, in this process as one rank, and return when all steps are done.

    Without a launcher, the process is the only rank. Under `torchrun --nproc_per_node=N program.py`, srun or mpirun
    each process is a rank: all of them call this function with the same configuration, which says how the model is cut;
    the remaining ranks are data parallelism. The function starts no processes, unlike the command `shardwise train`.

    Ctrl-C, SIGTERM and `shardwise stop` end the run after the current step, with a checkpoint. Afterwards the signal
    handlers of the program are restored, and so is the output of ranks above 0, which goes to `logs/` while they train.

    Args:
        config: as `load_recipe` gives it.
        run_dir: the run's folder, the same on all ranks; that of an earlier run is continued, and a finished run is
            returned as it is. None: `runs/NAME-YYYYMMDD-HHMMSS`.
        name: name of that folder, before the date.
        data, loss, optimizer, callbacks: functions and classes of your own instead of `hooks.*`, with the same
            contracts (docs/hooks.md). `config.yaml` records their names.

    Returns:
        the run, on every rank.

    Raises:
        ConfigError: the configuration, the data or the folder is wrong; no step was taken.
        RunError: training failed.
        StoppedError: the run was asked to stop, and its state is saved; the same call with its `run_dir` continues it.
    """
    from shardwise.cli.run_preparation import is_finished_run, prepare_run
    from shardwise.cli.train import check_user_code, with_batch
    from shardwise.runs.folder import run_folder
    from shardwise.train.rank_agreement import require_same_run_dir
    from shardwise.train.run import run

    _require_train_arguments(config, run_dir, name)
    rank = _join()
    world = 1 if rank is None else rank.world
    path = None if run_dir is None else run_folder(os.fspath(run_dir))
    config, objects = _with_hooks(config, data, loss, optimizer, callbacks)
    config = with_batch(config, world, path)
    _require_layout(config, world, is_new=path is None)
    if not config.data.is_named and config.hooks.data is None:
        raise ConfigError("data.path, data.blend or data.dataset must name the data; for a trial, data.dataset=tiny")
    with given_objects(objects), ExitStack() as locks:
        check_user_code(config)
        # A rank that finds a finished run there returns, and ranks that look elsewhere would wait for it.
        require_same_run_dir(path, config.launch.timeout)
        if path is not None and is_finished_run(locks, config, path, rank):
            return Run(path)
        folder = prepare_run(locks, config, name, path, rank)
        with folder.removed_if_refused(), output_restored(), _signals_restored(), failure_recorded(rank, folder.path):
            _prepare_output(rank)
            return Run(run(config, folder.path, name))


def _join() -> Rank | None:
    keep_own()
    if may_be_a_task():
        adopt_task()
    return enter_job(None)


def _prepare_output(rank: Rank | None) -> None:
    """Let the output take any character, and that of rank 0, which a program may close, outlive its reader."""
    from shardwise.base.terminal import take_any_character

    take_any_character()
    if rank is None or rank.rank == 0:
        survive_lost_reader()


def _require_train_arguments(config: object, run_dir: Any, name: object) -> None:
    problems = Problems(config_problems(config))
    with problems:
        if run_dir is not None:
            require_path("run_dir", run_dir, "a folder's path; None names a new one")
    if not isinstance(name, str) or not name or Path(name).name != name:
        problems.append(f"name ({name!r}) must be a folder's name without a path; run_dir takes a path")
    raise_problems(ConfigError, problems)


def _with_hooks(
    config: Config, data: Any, loss: Any, optimizer: Any, callbacks: Sequence[Any]
) -> tuple[Config, dict[str, object]]:
    # The configuration holds names alone, so that it can be written to `config.yaml`.
    objects: dict[str, object] = {}

    def named(value: object) -> str:
        class_name = object_name(value)
        name = class_name
        while name in objects and objects[name] is not value:  # two objects of one class
            name = f"{class_name}_{len(objects)}"
        objects[name] = value
        return name

    single = {"data": data, "loss": loss, "optimizer": optimizer}
    changes: dict[str, Any] = {key: named(value) for key, value in single.items() if value is not None}
    if callbacks:
        changes["callbacks"] = tuple(named(callback) for callback in callbacks)
    return config.with_keys(hooks=changes), objects


def _require_layout(config: Config, world: int, *, is_new: bool) -> None:
    """Refuse a number of ranks that does not fit; one process where the model is cut, with the way to start more."""
    from shardwise.config import check_layout

    ranks = config.parallel.ranks
    if world == 1 < ranks:
        raise ConfigError(
            f"the number of ranks (1) must be a multiple of {config.parallel.keys_text}: start the program by "
            f"torchrun --nproc_per_node={ranks}, which makes each process a rank"
        )
    check_layout(config, world, is_new=is_new)


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Give the program its signal handlers back; only the main thread may, and only there a run sets its own."""
    handlers = {number: signal.getsignal(number) for number in stop_requests.SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None:
                    signal.signal(number, handler)


def _numbers(value: Any) -> Any:
    """A record with numbers in place of the texts for those that are not finite."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    return float(value) if value in ("nan", "inf", "-inf") else value


def _object(path: Path) -> dict[str, Any] | None:
    return json_object(read_plain(path), str(path)) if path.exists() else None
