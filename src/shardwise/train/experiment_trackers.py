"""Experiment trackers: a run's numbers for TensorBoard, Weights & Biases, trackio and MLflow (`log.trackers`)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import platform
import queue
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.base.redaction import redacted
from shardwise.config import LogConfig
from shardwise.runs.folder import AppendedFile, RunDirectory

_CRC32C = [reduce(lambda crc, _: crc >> 1 ^ 0x82F63B78 * (crc & 1), range(8), byte) for byte in range(256)]
_PROJECT = "shardwise"  # project or experiment, unless a variable of the tracker names one
_LOSS = "train/loss"  # a number of every step, which tells the last step that a tracker has
_MLFLOW_PARENT = "mlflow.parentRunId"  # MLflow's own tag of a run that belongs to another
_MLFLOW_TAG = "shardwise.run"  # tag of a run in MLflow with the run's own id, by which a resumed run finds it
_MLFLOW_METRICS = 1000  # numbers in a request at most, as MLflow's servers allow; `_MLFLOW_PARAMETERS` likewise
_MLFLOW_PARAMETERS = 100
_MLFLOW_VALUE = 6000  # characters of a parameter's value at most
_MLFLOW_SECONDS = 60.0  # time that the end of a run waits for a server that is slow


def require_trackers(trackers: Sequence[str]) -> tuple[str, ...]:
    """Look whether `log.trackers` are installed, else ConfigError; returns what one records on this machine alone."""
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"log.trackers ({name}) needs the package {name}: pip install 'shardwise[{name}]'")
    if "wandb" in trackers and _is_without_key():
        return (
            "log.trackers: wandb has no key on this machine, so it records in the run's folder, and `wandb sync` "
            "uploads that; for a live page run `wandb login` or set WANDB_API_KEY",
        )
    return ()


def _is_without_key() -> bool:
    """True if W&B would ask for a key, which a training cannot answer."""
    wandb: Any = importlib.import_module("wandb")
    if os.environ.get("WANDB_MODE", "online") != "online":
        return False
    with contextlib.redirect_stderr(io.StringIO()):
        return not wandb.login(prompt=False, verify=False)


def _reason(error: Exception) -> str:
    return redacted(str(error)).strip().partition("\n")[0] or type(error).__name__


@dataclass(frozen=True)
class _TrackedRun:
    """The names by which a tracker knows a run."""

    folder: Path
    id: str | None  # id of the run; None where it has none
    # How often the run went back to an earlier step by `checkpoint.resume`. Each time begins a curve of its own, as no
    # tracker can take numbers back.
    returns: int
    settings: Mapping[str, Any]  # section → keys of the configuration, without secrets and facts of the machines
    log: LogConfig  # `log.project`, `log.run_name` and `log.tags`

    @property
    def group(self) -> str:
        return self.log.run_name or self.folder.resolve().name

    @property
    def name(self) -> str:
        return self.group + self.suffix

    @property
    def key(self) -> str | None:
        """The id of this curve, by which a later start finds it."""
        return None if self.id is None else self.id + self.suffix

    @property
    def suffix(self) -> str:
        """The steps that tell the curves of a run apart."""
        return f"-{self.returns + 1}" if self.returns else ""


class _EventFile:
    """TensorBoard's event file: records of its protocol buffers. Torch's writer ends with a traceback on a full disk.

    Args:
        folder: folder of the run's event files.
        first_step: first step of this file; later steps of earlier files are no longer shown.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        name = f"events.out.tfevents.{time.time():.0f}.{platform.node()}.{os.getpid()}"
        self._file = AppendedFile(folder / name)
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._write(file_version="brain.Event:2")
        # It tells TensorBoard to forget what earlier files have from this step on, which a resumed run does again.
        start = self._events.SessionLog(status=self._events.SessionLog.SessionStatus.START)
        self._write(step=first_step, session_log=start)

    def add(self, values: Mapping[str, float], step: int) -> None:
        summary = self._summaries.Summary
        entries = [summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=summary(value=entries))

    def close(self) -> None:
        self._file.close()

    def _write(self, **facts: Any) -> None:
        # TensorBoard's own writer imports readers of all object stores, which take a twentieth of a start.
        data: bytes = self._events.Event(wall_time=time.time(), **facts).SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked_crc32c(length) + data + _masked_crc32c(data))


def _masked_crc32c(data: bytes) -> bytes:
    """The checksum of a TFRecord: that of RFC 3720, turned by 15 bits, plus a constant."""
    crc = ~reduce(lambda crc, byte: crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF], data, 2**32 - 1) & 2**32 - 1
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 2**32 - 1)


class _MlflowRun:
    """A run in MLflow, with the methods that the modules `wandb` and `trackio` have.

    A thread makes all requests, since each waits for its answer, and a server that is away for minutes. After an error
    it makes no more, and the next call raises it.

    A run whose tag is the key of `run` is continued, and gets each step once.
    """

    def __init__(self, run: _TrackedRun) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        self._queue: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._send, args=(run,), name="mlflow", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Queue the numbers of a step; raises the error of an earlier request."""
        if self._error is not None:
            raise self._error
        now = int(time.time() * 1000)
        self._queue.put([self._entities.Metric(name, value, now, step) for name, value in values.items()])

    def finish(self) -> None:
        self._queue.put(None)
        self._thread.join(_MLFLOW_SECONDS)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"no answer within {_MLFLOW_SECONDS:.0f} s")

    def _experiment(self, project: str | None) -> str:
        if project is None and "MLFLOW_EXPERIMENT_ID" in os.environ:
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        name = project or os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if experiment is None else experiment.experiment_id)

    def _found(self, experiment: str, key: str | None) -> str | None:
        if key is None:
            return None
        runs = self._client.search_runs([experiment], f"tags.`{_MLFLOW_TAG}` = '{key}'", max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _created(self, experiment: str, run: _TrackedRun) -> str:
        parent = self._found(experiment, run.id) if run.returns else None
        tags = dict(tag.partition("=")[::2] for tag in run.log.tags)
        tags |= {name: value for name, value in ((_MLFLOW_TAG, run.key), (_MLFLOW_PARENT, parent)) if value is not None}
        run_id = str(self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id)
        parameters = [
            self._entities.Param(f"{section}.{key}", str(value)[:_MLFLOW_VALUE])
            for section, keys in run.settings.items()
            for key, value in keys.items()
        ]
        for first in range(0, len(parameters), _MLFLOW_PARAMETERS):
            self._client.log_batch(run_id, params=parameters[first : first + _MLFLOW_PARAMETERS])
        return run_id

    def _send(self, run: _TrackedRun) -> None:
        try:
            experiment = self._experiment(run.log.project)
            run_id = self._found(experiment, run.key)
            last = 0
            if run_id is None:
                run_id = self._created(experiment, run)
            else:
                self._client.update_run(run_id, status="RUNNING", name=run.name)
                last = max((metric.step for metric in self._client.get_metric_history(run_id, _LOSS)), default=0)
            while (metrics := self._queue.get()) is not None:
                metrics = [metric for metric in metrics if metric.step > last]
                for first in range(0, len(metrics), _MLFLOW_METRICS):
                    self._client.log_batch(run_id, metrics=metrics[first : first + _MLFLOW_METRICS])
            self._client.set_terminated(run_id)
        except Exception as error:  # noqa: BLE001  whatever the client raises, the training's thread reports it
            self._error = error


class ExperimentTrackers:
    """Writes numbers to TensorBoard's event file and to the trackers of `log.trackers`.

    A tracker that fails is reported once and left out from then on: it must not end a training.

    Args:
        recorded: the configuration as a run's folder has it.
        id_: id of the run, by which a tracker continues the same run after a resume.
        first_step: first step of this run; later ones that were recorded before are replaced in TensorBoard.
    """

    def __init__(
        self,
        log: LogConfig,
        recorded: Mapping[str, Any],
        run: RunDirectory,
        id_: str | None,
        first_step: int,
        warn: Callable[[str], None],
        returns: int = 0,
    ) -> None:
        self._warn = warn
        self._tensorboard = _EventFile(run.tensorboard, first_step) if log.tensorboard else None
        self._trackers: dict[str, Any] = {}
        # `launch` has addresses and scheduler options of the machines.
        settings = {section: keys for section, keys in recorded.items() if section != "launch"}
        tracked = _TrackedRun(run.path, id_, returns, settings, log)
        for name in log.trackers:
            with self._failure_reported(name):
                self._trackers[name] = _start_tracker(name, tracked, warn)

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
        try:
            # What trackio prints would tear the progress line.
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        except Exception as error:  # noqa: BLE001  whatever a tracker raises
            self._trackers.pop(name, None)
            self._warn(f"log.trackers: {name} failed and records no more of this run ({_reason(error)})")


class _TrackioRun:
    """A run in trackio, which gets each step once.

    trackio continues the last run of a name, whoever recorded it: so the name has the run's id.
    """

    def __init__(self, run: _TrackedRun) -> None:
        trackio: Any = importlib.import_module("trackio")
        group = "-".join([run.group, *([] if run.id is None else [run.id[:8]])])
        self._run = trackio.init(
            project=run.log.project or _PROJECT,
            name=group + run.suffix,
            group=group,
            config=run.settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._next_step = getattr(self._run, "_next_step", 0)

    def log(self, values: Mapping[str, float], step: int) -> None:
        if step >= self._next_step:
            self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


def _start_tracker(name: str, run: _TrackedRun, warn: Callable[[str], None]) -> Any:
    if name == "mlflow":
        return _MlflowRun(run)
    if name == "trackio":
        return _TrackioRun(run)
    return _start_wandb(run, warn)


def _start_wandb(run: _TrackedRun, warn: Callable[[str], None]) -> Any:
    """Start W&B: on this machine alone where its server cannot be reached, so that nothing is lost."""
    wandb: Any = importlib.import_module("wandb")
    quiet = {"console": "off", "silent": True, "disable_git": True, "save_code": False}
    private = {"x_disable_meta": True, "x_disable_stats": True, "x_save_requirements": False}
    facts: dict[str, Any] = {"name": run.name, "config": run.settings, "dir": str(run.folder)}
    facts["project"] = run.log.project or os.environ.get("WANDB_PROJECT") or _PROJECT
    # Without tags of its own a run has those of WANDB_TAGS.
    facts["tags"] = run.log.tags or None
    if run.key is not None:
        facts |= {"id": run.key, "resume": "allow"}

    def start(mode: str | None) -> None:
        wandb.init(**facts, mode=mode, settings=wandb.Settings(**quiet, **private))

    if _is_without_key():
        start("offline")
        return wandb
    try:
        start(None)
    except Exception as error:  # noqa: BLE001  whatever it raises: no server, no permission
        # Its process still holds the id.
        wandb.teardown()
        start("offline")
        warn(
            "log.trackers: wandb cannot record on its server, so it records in the run's folder, and `wandb sync` "
            f"uploads that ({_reason(error)})"
        )
    return wandb
