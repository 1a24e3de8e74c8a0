"""`shardwise stop`: whom it asks, and what it tells of a run that has ended."""

import json
import platform
import threading
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch import stop_requests
from shardwise.runs.folder import RunDirectory, RunLock
from shardwise_jobs import slurm_commands
from shardwise_jobs.restarts import history
from shardwise_jobs.submission import record
from tests.command_line import CommandLine


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tell(run: Path, *events: dict[str, Any]) -> None:
    with RunDirectory(run).metrics.open("a") as file:
        file.writelines(f"{json.dumps(event)}\n" for event in events)


THIS_HOST = platform.node()
CHECKPOINT = {"event": "checkpoint", "step": 1200}
STOP = {"event": "stop", "step": 1234, "reason": "stopped by `shardwise stop`"}


@pytest.mark.parametrize("arguments", [[], ["runs/latest/"]], ids=["latest", "link"])
def test_a_run_under_way_is_asked(arguments: list[str], cli: CommandLine) -> None:
    run = RunDirectory("runs/one").create()
    run.mark_latest()
    with RunLock(run.path):
        said = cli("stop", *arguments).out
    assert stop_requests.requested(run.path) == "`shardwise stop`"
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
def test_a_run_that_has_ended_is_told(events: list[dict[str, Any]], ending: str, cli: CommandLine) -> None:
    run = RunDirectory("run").create().path
    tell(run, *events)
    assert cli.refused("stop", "run") == f"shardwise: no run is under way in run{ending}\n"
    assert not (run / stop_requests.STOP_FILE).exists()


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_a_run_on_another_host_is_asked(host: str, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    run = RunDirectory("run").create().path
    with RunLock(run):
        text = (run / ".lock").read_text()
    assert (run / ".lock").read_text() == "", "a run that ended by itself names no holder"
    (run / ".lock").write_text(text)  # as a run leaves it that was killed, or a file system shows it to other hosts
    monkeypatch.setattr("platform.node", lambda: THIS_HOST if host == "here" else "login-node")
    said = cli("stop", "run", "--wait", code=2 if host == "here" else 0).out
    assert (run / stop_requests.STOP_FILE).exists() == (host == "elsewhere")
    assert (f"is unknown: the run belongs to {THIS_HOST}; check there\n" in said) == (host == "elsewhere")


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_what_is_no_run(name: str, cli: CommandLine) -> None:
    Path("file").touch()
    assert cli.refused("stop", name) == f"shardwise: there is no run {name}: name its folder\n"


def test_waiting_ends_with_the_run_and_tells_newest_checkpoint_text(cli: CommandLine) -> None:
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
    said = cli("stop", "run", "--wait").out
    thread.join()
    assert said.splitlines() == [
        "asked run to stop after its current step, with a checkpoint",
        "run ended: stopped by `shardwise stop` after step 1,234; its newest checkpoint is of step 1,200",
    ]


def slurm(monkeypatch: pytest.MonkeyPatch, **states: str) -> list[str]:
    """Have SLURM's queue hold jobs of these numbers, `job_7`, in these states; returns those that are cancelled."""
    cancelled: list[str] = []
    lines = [f"{name[4:]}|{state}||1||0:00|1:00|gpu||T|shardwise:/x" for name, state in states.items()]
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(slurm_commands, "jobs", lambda: [slurm_commands._job(line) for line in lines])
    monkeypatch.setattr(slurm_commands, "cancel", cancelled.append)
    return cancelled


def test_jobs_that_wait_or_compile_for_a_run_are_cancelled(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else graphs would be compiled for nobody."""
    run = RunDirectory("run").create().path
    for number, kind in (("1", "compile"), ("2", "train"), ("3", "compile")):
        record(run, number, kind)
    with (run / "jobs.jsonl").open("a") as file:
        file.write('{"id": "4", "ki')
    cancelled = slurm(monkeypatch, job_1="RUNNING", job_2="PENDING", job_3="PENDING", job_9="PENDING")
    first, second, _ = cli("stop", "run").out.splitlines()
    assert cancelled == ["2", "1", "3"]
    assert first == "job 2, which waited in SLURM's queue, is cancelled"
    assert second == "job 1, which compiled for the run, is cancelled"
    assert [(ending.job, ending.how) for ending in history(run)] == [(job, "cancelled") for job in ("2", "1", "3")]
    facts = cli.facts("stop", "run")
    assert (facts["cancelled"], facts["asked"]) == (["2", "1", "3"], False)


def test_a_running_job_without_its_folder_is_cancelled(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor is starting: no process is there that would read a request."""
    run = RunDirectory("run").create().path
    record(run, "1", "train")
    cancelled = slurm(monkeypatch, job_1="RUNNING")
    holder = {"host": "elsewhere", "pid": 1, "started": "2026"}
    (run / ".lock").write_text(json.dumps(holder))
    cli("stop", "run")
    assert cancelled == [], "a supervisor on another machine is asked, as a rank is"
    (run / ".lock").write_text("")
    assert (cancelled, cli("stop", "run").out) == (["1"], "job 1, which was about to train, is cancelled\n")
