"""Trackers with the real packages, offline, in a process of their own."""

import importlib
import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import Config
from shardwise.runs.folder import RunDirectory
from shardwise.train import experiment_trackers
from shardwise.train.experiment_trackers import ExperimentTrackers, require_trackers
from tests.unit.train.test_report import config, reporter

SECRET = "s3://me:hunter2@bucket/text"
SCRIPT = """
import json
import sys
from pathlib import Path
from shardwise.runs.folder import RunDirectory
from shardwise.train.experiment_trackers import ExperimentTrackers
from tests.unit.train.test_scalars import tracked
told = []
for number, (id_, first, last, returns, *log) in enumerate(json.loads(sys.argv[3])):
    chosen = tracked(*log)
    run = RunDirectory(Path(sys.argv[1]))
    curves = ExperimentTrackers(chosen.log, chosen.recorded(), run, id_, first, told.append, returns)
    for step in range(first, last + 1):
        curves.add(step, {"train": {"loss": 3.0 / step + number, "mfu": None}})
    curves.close()
print(*told)
"""
ID = "0123456789abcdef"
OTHER, NAMED = "fedcba9876543210", "00ff00ff00ff00ff"
STARTS = [(ID, 1, 2, 0), (ID, 2, 3, 0), (ID, 2, 3, 1), (ID, 4, 4, 1), (OTHER, 1, 1, 0)]
"""A run that does a step again after a crash, goes back, and continues; another run in a folder of the same name."""
NAMES = {"project": "ablations", "run_name": "lr 3e-4", "tags": ["small", "team=nlp"]}
"""The keys of `log` by which trackers know a run."""


def tracked(log: Any = None) -> Config:
    chosen = config(tensorboard=False, trackers=sys.argv[2].split(","), **(log or {}))
    return chosen.model_copy(update={"data": chosen.data.model_copy(update={"path": SECRET})})


@pytest.mark.slow
def test_wandb_records_the_curve_and_no_secret(tmp_path: Path) -> None:
    """W&B has no key here, so it records in the run's folder; a variable names its project, or the run's own keys do.

    A resumed run goes on under the same id, project and name.
    """
    pytest.importorskip("wandb")
    starts = [(ID, 1, 2, 0), (ID, 2, 3, 1, NAMES), (ID, 4, 4, 1, NAMES)]
    record_with("wandb", tmp_path, starts, WANDB_PROJECT="ours", WANDB_TAGS="theirs")
    files = sorted((tmp_path / "runs/one/wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    runs = [wandb_run(written) for written in files]
    assert [(run.run_id, run.project, run.display_name, list(run.tags)) for run in runs] == [
        (ID, "ours", "one", ["theirs"]),
        *[(f"{ID}-2", "ablations", "lr 3e-4-2", ["small", "team=nlp"])] * 2,
    ]
    for written in files:
        assert b"train/loss" in written.read_bytes()
    require_no_secret(tmp_path)


@pytest.mark.slow
def test_trackio_continues_its_own_run_alone(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    record_with("trackio", tmp_path, [*STARTS, (ID, 1, 1, 0, NAMES), (ID, 2, 2, 0, NAMES)])
    named = f"{NAMES['run_name']}-{ID[:8]}"
    assert trackio_rows(tmp_path, "ablations") == [(named, 1, 8.0), (named, 2, 7.5)]
    assert trackio_rows(tmp_path) == [
        ("one-01234567", 1, 3.0),
        ("one-01234567", 2, 1.5),
        ("one-01234567", 3, 2.0),
        ("one-01234567-2", 2, 3.5),
        ("one-01234567-2", 3, 3.0),
        ("one-01234567-2", 4, 3.75),
        ("one-fedcba98", 1, 7.0),
    ]
    require_no_secret(tmp_path)


@pytest.mark.slow
def test_mlflow_has_each_step_of_a_curve_once(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    store = tmp_path / "store"
    starts = [*STARTS, (NAMED, 1, 1, 0, NAMES), (NAMED, 2, 2, 0, NAMES)]
    variables = {"MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    record_with("mlflow", tmp_path, starts, **variables, MLFLOW_EXPERIMENT_NAME="theirs")
    found: dict[str, Any] = {}
    for metric in store.glob("*/*/metrics/train/loss"):
        tags = metric.parents[2] / "tags"
        rows = [tuple(line.split()[1:]) for line in metric.read_text().splitlines()]
        found[(tags / "shardwise.run").read_text()] = (tags, rows)
    assert {key: rows for key, (_, rows) in found.items()} == {
        ID: [("3.0", "1"), ("1.5", "2"), ("2.0", "3")],
        f"{ID}-2": [("3.5", "2"), ("3.0", "3"), ("3.75", "4")],
        OTHER: [("7.0", "1")],
        NAMED: [("8.0", "1"), ("7.5", "2")],
    }
    own = {name: (found[NAMED][0] / name).read_text() for name in ("mlflow.runName", "small", "team")}
    assert own == {"mlflow.runName": "lr 3e-4", "small": "", "team": "nlp"}
    experiments = [found[key][0].parents[1] / "meta.yaml" for key in (ID, NAMED)]
    names = [next(line for line in path.read_text().splitlines() if line.startswith("name")) for path in experiments]
    assert names == ["name: theirs", "name: ablations"]
    tags = found[ID][0]
    assert (found[f"{ID}-2"][0] / "mlflow.parentRunId").read_text() == tags.parent.name
    assert [(found[key][0] / "mlflow.runName").read_text() for key in (ID, f"{ID}-2")] == ["one", "one-2"]
    assert (tags.parent / "params/optimizer.lr").read_text() == str(config().optimizer.lr)
    assert not list(tags.parent.glob("params/launch*"))
    assert not list(tags.glob("mlflow.source*"))
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
    entities = SimpleNamespace(Metric=lambda *facts: SimpleNamespace(step=facts[3]), Param=lambda *facts: facts)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    told: list[str] = []
    chosen: Any = config(tensorboard=False, trackers=["mlflow"])
    curves = ExperimentTrackers(chosen.log, chosen.recorded(), RunDirectory(tmp_path), "0123", 1, told.append)
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


def record_with(trackers: str, at: Path, starts: list[Any], **variables: str) -> str:
    """Record some starts of a run in a process without a key; returns what it tells."""
    run = at / "runs/one"
    run.mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    kept |= {"HOME": str(at), "TRACKIO_DIR": str(at / "trackio"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, str(run), trackers, json.dumps(starts)]
    done = subprocess.run(command, env=kept | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wandb_run(written: Path) -> Any:
    """The run that a file of W&B records: a log of LevelDB after 7 bytes, whose records are protocol buffers."""
    records: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    content, at = written.read_bytes(), 7
    while True:
        (length,) = struct.unpack("<H", content[at + 4 : at + 6])
        record = records.Record.FromString(content[at + 7 : at + 7 + length])
        if record.WhichOneof("record_type") == "run":
            return record.run
        at += 7 + length


def trackio_rows(at: Path, project: str = "shardwise") -> list[tuple[str, int, float]]:
    with sqlite3.connect(at / f"trackio/{project}.db") as base:
        rows = base.execute("SELECT run_name, step, metrics FROM metrics ORDER BY run_name, step").fetchall()
    base.close()
    return [(name, step, json.loads(values)["train/loss"]) for name, step, values in rows]


def require_no_secret(folder: Path) -> None:
    for path in folder.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes(), path


def test_a_return_to_an_earlier_step_counts_for_later_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an error at the end is told in the run's files."""

    class Failing:
        def __init__(self, _name: str, run: Any, _warn: Any) -> None:
            found.append(run.key)

        def finish(self) -> None:
            raise TimeoutError("no answer")

    found: list[str] = []
    monkeypatch.setattr(experiment_trackers, "_start_tracker", Failing)
    directory = RunDirectory(tmp_path / "run").create()
    key = directory.id()
    for went_back in (False, True, False, True):
        made, _ = reporter(tmp_path, config(tensorboard=False, trackers=["wandb"]))
        with made:
            made.start(went_back=went_back)
    assert found == [key, f"{key}-2", f"{key}-2", f"{key}-3"]
    told = [event["text"] for event in directory.events("warning")]
    assert told == ["log.trackers: wandb failed and records no more of this run (no answer)"] * 4


def test_what_cannot_record_is_told_before_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (note,) = require_trackers(["wandb"])
    assert note.startswith("log.trackers: wandb has no key on this machine, so it records in the run's folder, and")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert require_trackers(["wandb"]) == ()
    monkeypatch.setattr(experiment_trackers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"^log\.trackers \(trackio\) needs the package trackio: pip install 'shard"):
        require_trackers(["trackio"])
    assert require_trackers([]) == ()
