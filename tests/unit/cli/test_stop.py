"""`shardwise stop`: whom it asks, and what it tells of a run that has ended."""

import json
import platform
import threading
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.launch import stop_requests
from shardwise.runs.folder import RunDirectory, RunLock
from shardwise_jobs import commands
from shardwise_jobs.restarts import history
from shardwise_jobs.submission import record


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tell(run: Path, *events: dict[str, Any]) -> None:
    with RunDirectory(run).metrics.open("a") as file:
        file.writelines(f"{json.dumps(event)}\n" for event in events)


THIS_HOST = platform.node()
CHECKPOINT = {"event": "checkpoint", "step": 1200}
STOP = {"event": "stop", "step": 1234, "reason": "stopped by `shardwise stop`"}


@pytest.mark.parametrize("arguments", [[], ["runs/one"], ["runs/latest/"]], ids=["latest", "named", "link"])
def test_a_run_under_way_is_asked(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory("runs/one").create()
    run.mark_latest()
    with RunLock(run.path):
        assert main(["stop", *arguments]) == 0
    assert stop_requests.requested(run.path) == "`shardwise stop`"
    said = capsys.readouterr().out
    assert "runs/one to stop after its current step, with a checkpoint\n" in said


@pytest.mark.parametrize(
    ("events", "ending"),
    [
        ([], ""),
        (
            [CHECKPOINT, *[{"event": "step", "step": 1200 + step, "text": "x" * 1000} for step in range(1200)], STOP],
            ": stopped by `shardwise stop` after step 1,234; its newest checkpoint is of step 1,200",
        ),
    ],
)
def test_a_run_that_has_ended_is_told(
    events: list[dict[str, Any]], ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory("run").create().path
    tell(run, *events)
    assert main(["stop", "run"]) == 2
    assert capsys.readouterr().err == f"shardwise: no run is under way in run{ending}\n"
    assert not (run / stop_requests.STOP_FILE).exists()


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_a_run_on_another_host_is_asked_though_its_lock_is_not_seen(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory("run").create().path
    lock = RunLock(run).__enter__()
    text = (run / ".lock").read_text()
    lock.__exit__(None, None, None)
    assert (run / ".lock").read_text() == "", "a run that ended by itself names no holder"
    (run / ".lock").write_text(text)  # as a run leaves it that was killed, or a file system shows it to other hosts
    monkeypatch.setattr("platform.node", lambda: THIS_HOST if host == "here" else "login-node")
    assert main(["stop", "run", "--wait"]) == (2 if host == "here" else 0)
    assert (run / stop_requests.STOP_FILE).exists() == (host == "elsewhere")
    if host == "elsewhere":
        assert f"is unknown: the run belongs to {THIS_HOST}; check there\n" in capsys.readouterr().out


def test_a_run_whose_folder_takes_no_request_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory("run").create()
    (run.path / stop_requests.STOP_FILE).mkdir()
    with RunLock(run.path):
        assert main(["stop", "run"]) == 2
    assert capsys.readouterr().err == "shardwise: the path run/stop.json cannot be used: Is a directory\n"


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_what_is_no_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert main(["stop", name]) == 2
    assert capsys.readouterr().err == f"shardwise: there is no run {name}: name its folder\n"


def test_waiting_ends_with_the_run_and_tells_what_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory("run").create().path
    tell(run, *[{"event": "step", "step": step, "text": "x" * 1000} for step in range(1200)])

    def train() -> None:
        with RunLock(run):
            locked.set()
            while not stop_requests.requested(run):
                pass
            tell(run, CHECKPOINT, STOP)

    locked = threading.Event()
    thread = threading.Thread(target=train)
    thread.start()
    locked.wait()
    assert main(["stop", "run", "--wait"]) == 0
    thread.join()
    asked, ended = capsys.readouterr().out.splitlines()
    assert asked == "asked run to stop after its current step, with a checkpoint"
    assert ended == ("run ended: stopped by `shardwise stop` after step 1,234; its newest checkpoint is of step 1,200")


def test_all_jobs_that_wait_or_compile_for_a_run_are_cancelled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else graphs would be compiled for nobody."""
    run = RunDirectory("run").create().path
    for number, kind in (("1", "compile"), ("2", "train"), ("3", "compile")):
        record(run, number, kind)
    with (run / "jobs.jsonl").open("a") as file:
        file.write('{"id": "4", "ki')
    states = {"1": "RUNNING", "2": "PENDING", "3": "PENDING", "9": "PENDING"}
    waiting = [commands._job(f"{number}|{state}||1||0:00|1:00|gpu||T|shardwise:/x") for number, state in states.items()]
    cancelled: list[str] = []
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(commands, "jobs", lambda: waiting)
    monkeypatch.setattr(commands, "cancel", cancelled.append)
    assert main(["stop", "run"]) == 0
    assert cancelled == ["2", "1", "3"]
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first == "job 2, which waited in SLURM's queue, is cancelled"
    assert second == "job 1, which compiled for the run, is cancelled"
    assert [(ending.job, ending.how) for ending in history(run)] == [(job, "cancelled") for job in ("2", "1", "3")]
    assert main(["stop", "run", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["cancelled"], facts["asked"]) == (["2", "1", "3"], False)


def test_a_job_that_runs_and_has_not_claimed_the_folder_is_cancelled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor is starting: no process is there that would read a request."""
    run = RunDirectory("run").create().path
    record(run, "1", "train")
    cancelled: list[str] = []
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(commands, "jobs", lambda: [commands._job("1|RUNNING||1||0:00|1:00|gpu||T|shardwise:/x")])
    monkeypatch.setattr(commands, "cancel", cancelled.append)
    holder = {"host": "elsewhere", "pid": 1, "started": "2026"}
    (run / ".lock").write_text(json.dumps(holder))
    assert main(["stop", "run"]) == 0
    assert cancelled == [], "a supervisor on another machine is asked, as a rank is"
    (run / ".lock").write_text("")
    capsys.readouterr()
    assert main(["stop", "run"]) == 0
    assert (cancelled, capsys.readouterr().out) == (["1"], "job 1, which was about to train, is cancelled\n")
