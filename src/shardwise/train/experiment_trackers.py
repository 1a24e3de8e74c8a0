"""Experiment trackers: a run's numbers for TensorBoard, Weights & Biases, trackio and MLflow (`log.trackers`)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.base.redaction import redacted
from shardwise.config import Config
from shardwise.runs.folder import AppendedFile, RunDirectory

_PROJECT = "shardwise"
_MLFLOW_TAG = "shardwise.run"
"""Tag of a run in MLflow with the run's own id, by which a resumed run finds it."""
_MLFLOW_METRICS = 1000
"""Numbers in a request at most, as MLflow's servers allow; `_MLFLOW_PARAMETERS` likewise."""
_MLFLOW_PARAMETERS = 100
_MLFLOW_VALUE = 6000
"""Characters of a parameter's value at most."""
_MLFLOW_SECONDS = 60.0
"""Time that the end of a run waits for a server that is slow."""


def require_trackers(config: Config) -> None:
    """Raise ConfigError where a package of `log.trackers` is not installed."""
    for name in config.log.trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"log.trackers ({name}) needs the package {name}: pip install 'shardwise[{name}]'")


class EventFile:
    """TensorBoard's event file: records of its protocol buffers. Torch's writer ends with a traceback on a full disk.

    Args:
        folder: folder of the run's event files.
        first_step: first step of this file; later steps of earlier files are no longer shown.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        names = ("compat.proto.event_pb2", "compat.proto.summary_pb2", "summary.writer.record_writer")
        modules: list[Any] = [importlib.import_module(f"tensorboard.{name}") for name in names]
        self._events, self._summaries, records = modules
        name = f"events.out.tfevents.{time.time():.0f}.{platform.node()}.{os.getpid()}"
        self._records = records.RecordWriter(AppendedFile(folder / name))
        self._write(file_version="brain.Event:2")
        # It tells TensorBoard to forget what earlier files have from this step on, which a resumed run does again.
        start = self._events.SessionLog(status=self._events.SessionLog.SessionStatus.START)
        self._write(step=first_step, session_log=start)

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Write values by their names."""
        summary = self._summaries.Summary
        entries = [summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=summary(value=entries))

    def close(self) -> None:
        self._records.close()

    def _write(self, **facts: Any) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **facts).SerializeToString())


class MlflowRun:
    """A run in MLflow, with the methods that the modules `wandb` and `trackio` have.

    A thread makes all requests, since each waits for its answer, and a server that is away for minutes. After an error
    it makes no more, and the next call raises it.

    Args:
        id_: id of the run; a run with this tag is continued.
        settings: section → keys of the configuration.
    """

    def __init__(self, name: str, id_: str | None, settings: Mapping[str, Any]) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        self._queue: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._send, args=(name, id_, settings), name="mlflow", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Queue the numbers of a step; raises the error of an earlier request."""
        if self._error is not None:
            raise self._error
        now = int(time.time() * 1000)
        self._queue.put([self._entities.Metric(name, value, now, step) for name, value in values.items()])

    def finish(self) -> None:
        """Send what is queued and end the run."""
        self._queue.put(None)
        self._thread.join(_MLFLOW_SECONDS)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"no answer within {_MLFLOW_SECONDS:.0f} s")

    def _experiment(self) -> str:
        experiment = self._client.get_experiment_by_name(_PROJECT)
        return str(self._client.create_experiment(_PROJECT) if experiment is None else experiment.experiment_id)

    def _earlier_run(self, id_: str | None) -> str | None:
        """MLflow's id of the run that an earlier start made; None where there is none."""
        if id_ is None:
            return None
        for earlier_run in self._client.search_runs(
            [self._experiment()], f"tags.`{_MLFLOW_TAG}` = '{id_}'", max_results=1
        ):
            self._client.update_run(earlier_run.info.run_id, status="RUNNING")
            return str(earlier_run.info.run_id)
        return None

    def _created(self, name: str, id_: str | None, settings: Mapping[str, Any]) -> str:
        tags = {} if id_ is None else {_MLFLOW_TAG: id_}
        run_id = str(self._client.create_run(self._experiment(), run_name=name, tags=tags).info.run_id)
        parameters = [
            self._entities.Param(f"{section}.{key}", str(value)[:_MLFLOW_VALUE])
            for section, keys in settings.items()
            for key, value in keys.items()
        ]
        for first in range(0, len(parameters), _MLFLOW_PARAMETERS):
            self._client.log_batch(run_id, params=parameters[first : first + _MLFLOW_PARAMETERS])
        return run_id

    def _send(self, name: str, id_: str | None, settings: Mapping[str, Any]) -> None:
        try:
            run_id = self._earlier_run(id_) or self._created(name, id_, settings)
            while (metrics := self._queue.get()) is not None:
                for first in range(0, len(metrics), _MLFLOW_METRICS):
                    self._client.log_batch(run_id, metrics=metrics[first : first + _MLFLOW_METRICS])
            self._client.set_terminated(run_id)
        except Exception as error:  # noqa: BLE001  whatever the client raises, the training's thread reports it
            self._error = error


class ExperimentTrackers:
    """Writes numbers to TensorBoard's event file and to the trackers of `log.trackers`.

    A tracker that fails is reported once and left out from then on: it must not end a training.

    Args:
        id_: id of the run, by which a tracker continues the same run after a resume.
        first_step: first step of this run; later ones that were recorded before are replaced in TensorBoard.
        warn: shows a warning to the user.
    """

    def __init__(
        self, config: Config, run: RunDirectory, id_: str | None, first_step: int, warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self._tensorboard = EventFile(run.tensorboard, first_step) if config.log.tensorboard else None
        self._trackers: dict[str, Any] = {}
        for name in config.log.trackers:
            with self._failure_reported(name):
                self._trackers[name] = _start_tracker(name, config, run, id_)

    def add(self, step: int, values: Mapping[str, Mapping[str, float | None]]) -> None:
        """Write the values that are known, by prefix and name, as `prefix/name`: as one event, as each takes time."""
        known: dict[str, float] = {}
        for prefix, values_by_name in values.items():
            for name, value in values_by_name.items():
                if value is not None:
                    known[f"{prefix}/{name}"] = value
        if self._tensorboard is not None:
            self._tensorboard.add(known, step)
        for name, tracker in list(self._trackers.items()):
            with self._failure_reported(name):
                tracker.log(known, step=step)

    def close(self) -> None:
        """Write what is buffered and close the files."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        for name, tracker in list(self._trackers.items()):
            with self._failure_reported(name):
                tracker.finish()
        self._trackers.clear()

    @contextlib.contextmanager
    def _failure_reported(self, name: str) -> Any:
        """Run the body; report an error of a tracker, and leave that tracker out from now on."""
        try:
            # What trackio prints would tear the progress line.
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        except Exception as error:  # noqa: BLE001  whatever a tracker raises
            self._trackers.pop(name, None)
            text = redacted(str(error)).strip().partition("\n")[0] or type(error).__name__
            self._warn(f"log.trackers: {name} failed and records no more of this run ({text})")


def _start_tracker(name: str, config: Config, run: RunDirectory, id_: str | None) -> Any:
    """Start a run in a tracker, without secrets and facts of the machine; return what takes its numbers."""
    # `launch` has addresses and scheduler options of the machines.
    settings = {section: keys for section, keys in config.recorded().items() if section != "launch"}
    if name == "mlflow":
        return MlflowRun(run.path.resolve().name, id_, settings)
    tracker = importlib.import_module(name)
    facts: dict[str, Any] = {"project": _PROJECT, "name": run.path.resolve().name, "config": settings}
    if name == "trackio":
        tracker.init(**facts, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)
        return tracker
    quiet = {"console": "off", "silent": True, "disable_git": True, "save_code": False}
    private = {"x_disable_meta": True, "x_disable_stats": True, "x_save_requirements": False}
    options = {"id": id_, "resume": "allow"} if id_ is not None else {}
    tracker.init(**facts, **options, dir=str(run.path), settings=tracker.Settings(**quiet, **private))
    return tracker
