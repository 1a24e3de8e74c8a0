"""Trackers with the real packages, offline, in a process of their own."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise.base.errors import ConfigError
from shardwise.config import Config
from shardwise.runs.folder import RunDirectory
from shardwise.train import experiment_trackers
from shardwise.train.experiment_trackers import ExperimentTrackers, require_trackers
from shardwise.train.straggler import Straggler
from tests.unit.train.test_report import config, record, reporter

SECRET = "s3://me:hunter2@bucket/text"
SCRIPT = """
import sys
from pathlib import Path
from shardwise.runs.folder import RunDirectory
from shardwise.train.experiment_trackers import ExperimentTrackers
from tests.unit.train.test_scalars import tracked
told = []
for _ in range(int(sys.argv[3])):
    curves = ExperimentTrackers(tracked(), RunDirectory(Path(sys.argv[1])), "0123456789abcdef", 1, told.append)
    for step in (1, 2):
        curves.add(step, {"train": {"loss": 3.0 / step, "mfu": None}})
    curves.close()
print(told)
"""


def tracked() -> Config:
    chosen = config(tensorboard=False, trackers=sys.argv[2].split(","))
    return chosen.model_copy(update={"data": chosen.data.model_copy(update={"path": SECRET})})


def test_trackers_record_the_curve_and_no_secret(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    run = tmp_path / "runs/one"
    run.mkdir(parents=True)
    variables = {**os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    variables |= {"WANDB_CONFIG_DIR": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path)}
    record_with("wandb,trackio", run, variables)
    with sqlite3.connect(tmp_path / "trackio/shardwise.db") as base:
        rows = base.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    base.close()
    assert [(name, step, json.loads(values)["train/loss"]) for name, step, values in rows] == [
        ("one", 1, 3.0),
        ("one", 2, 1.5),
    ]
    (written,) = run.glob("wandb/offline-run-*/*.wandb")
    assert b"train/loss" in written.read_bytes()
    require_no_secret(tmp_path)


def test_mlflow_records_the_curve_and_continues_its_run_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    run = tmp_path / "runs/one"
    run.mkdir(parents=True)
    store = tmp_path / "store"
    variables = {**os.environ, "MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    record_with("mlflow", run, variables, starts=2)
    (metric,) = store.glob("*/*/metrics/train/loss")  # one experiment, one run
    assert [line.split()[1:] for line in metric.read_text().splitlines()] == [["3.0", "1"], ["1.5", "2"]] * 2
    recorded = metric.parents[2]
    assert (recorded / "tags/mlflow.runName").read_text() == "one"
    assert (recorded / "params/optimizer.lr").read_text() == str(config().optimizer.lr)
    assert not list(recorded.glob("params/launch*"))
    assert not list(recorded.glob("tags/mlflow.source*"))
    require_no_secret(tmp_path)


def test_a_server_that_fails_is_told_at_the_next_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Client:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: SimpleNamespace(info=SimpleNamespace(run_id="1"), experiment_id="0")

        def search_runs(self, *_: Any, **__: Any) -> list[Any]:
            return []

        def log_batch(self, *_: Any, metrics: list[Any] | None = None, **__: Any) -> None:
            if metrics:
                raise OSError("http://me:hunter2@host refuses")

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    entities = SimpleNamespace(Metric=lambda *facts: facts, Param=lambda *facts: facts)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    told: list[str] = []
    chosen: Any = config(tensorboard=False, trackers=["mlflow"])
    curves = ExperimentTrackers(chosen, RunDirectory(tmp_path), "0123", 1, told.append)
    curves.add(1, {"train": {"loss": 1.0}})
    assert told == []
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "mlflow")
    thread.join(10)
    for step in (2, 3):
        curves.add(step, {"train": {"loss": 1.0}})
    curves.close()
    (text,) = told
    assert text.startswith("log.trackers: mlflow failed and records no more of this run (http://")
    assert "hunter2" not in text


def record_with(trackers: str, run: Path, variables: dict[str, str], starts: int = 1) -> None:
    command = [sys.executable, "-c", SCRIPT, str(run), trackers, str(starts)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n", "nothing but what is said of a failure is printed"


def require_no_secret(folder: Path) -> None:
    for path in folder.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes(), path


def test_a_tracker_that_fails_is_told_once_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def log(self, values: dict[str, float], step: int) -> None:
            raise OSError("https://me:hunter2@host is not reachable\nand more")

    monkeypatch.setattr(experiment_trackers, "_start_tracker", lambda *_: Failing())
    told: list[str] = []
    chosen: Any = config(tensorboard=False, trackers=["wandb"])
    curves = ExperimentTrackers(chosen, RunDirectory(tmp_path), None, 1, told.append)
    for step in (1, 2):
        curves.add(step, {"train": {"loss": 1.0}})
    curves.close()
    assert len(told) == 1
    assert told[0].startswith("log.trackers: wandb failed and records no more of this run (https://")
    assert "hunter2" not in told[0]


def test_a_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_trackers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"^log\.trackers \(trackio\) needs the package trackio: pip install 'shard"):
        require_trackers(config(trackers=["trackio"]))
    require_trackers(config())


def test_tensorboard_has_memory_and_the_slowest_rank(tmp_path: Path) -> None:
    made, _ = reporter(tmp_path)
    with made:
        made.start()
        measured = {"memory": {"parameters": 64, "other": 32}, "communication_bytes": {"pp": 16}}
        made.step(record(1, **measured, straggler=Straggler(rank=3, relative=1.25, own=1.125)))
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    expected = {"memory/parameters": 64, "memory/other": 32, "memory/peak": 1000, "bytes/pp": 16}
    expected |= {"straggler/relative": 1.25, "straggler/own": 1.125}
    assert {name: events.Scalars(name)[0].value for name in expected} == expected
    assert [(each.step, each.value) for each in events.Scalars("train/samples")] == [(1, 8.0)]
    assert events.Scalars("train/tokens_per_second")[0].value == 512.0
