"""What a launcher records and shows of a run that failed."""

import json
import signal
import sys
from pathlib import Path

import pytest

from shardwise.base.errors import see
from shardwise.launch.environment import ERROR_FILE, NODE
from shardwise.launch.failed_run import failure_text, resume_command
from shardwise.launch.first_failure import Failure, read_first_failure, report_first_failure, root_cause
from shardwise.launch.stop_requests import continuing_command
from tests.monitor_runs import FIRST, Start, write_run
from tests.rows import rows_of

ROWS = rows_of(__file__)

KILLED = Failure(1, "rank 1 was killed (SIGKILL; usually out of memory)", 1)
PLACE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
LOST = Failure(0, "rank 0 lost the connection to another rank during forward", 1, waited=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose rank 1 was killed after step 25, and its log; checkpoints are of steps 10 and 20."""
    path = write_run(tmp_path / "run", [Start(0, 25, None)])
    (path / "logs/rank-0001.log").touch()
    return path


def test_the_failure_of_a_run_is_recorded_and_put_into_a_block(run: Path) -> None:
    text = failure_text(KILLED, run, FIRST, "shardwise train x --run-dir run")
    assert text.splitlines() == [
        "FAILED at step 25: rank 1 was killed (SIGKILL; usually out of memory).",
        f"log: {run}/logs/rank-0001.log",
        "5 steps since checkpoint 20 are lost",
        "resume: shardwise train x --run-dir run",
    ]
    recorded = json.loads((run / "failure.json").read_text())
    assert (recorded["rank"], recorded["log"], recorded["step"], recorded["every"]) == (1, "logs/rank-0001.log", 25, 10)


@pytest.mark.parametrize(("family", "is_offered"), [("llama", True), ("my.model:Decoder", False)])
def test_a_resume_that_would_fail_alike_is_not_offered(family: str, is_offered: bool, run: Path) -> None:
    """A device that computes wrongly may be left out; what a class of the user's own does stays."""
    (run / "config.yaml").write_text(f"model: {{family: '{family}'}}\ncheckpoint: {{every: 0, every_minutes: 5}}\n")
    drift = Failure(0, f"step 25: replicated parameters have drifted apart: x{see('training#drifted-parameters')}", 1)
    lines = failure_text(drift, run, FIRST, "shardwise train x --run-dir run").splitlines()
    assert any(line.startswith("resume: ") for line in lines) == is_offered
    assert any(line.startswith("resume: ") for line in failure_text(KILLED, run, FIRST, "shardwise").splitlines())
    facts = json.loads((run / "failure.json").read_text())
    assert (facts["every"], facts["every_minutes"]) == (0, 5)


@pytest.mark.parametrize("checkpoint", [0, 20])
def test_a_loss_that_is_not_finite_comes_again_without_a_checkpoint(checkpoint: int, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [Start(0, 25, None)], checkpoint_every=checkpoint or 100)
    failure = Failure(0, f"step 26: the loss (nan) must be finite{see('training#loss-not-finite')}", 1)
    lines = failure_text(failure, run, FIRST, "shardwise train x --run-dir run").splitlines()
    assert any(line.startswith("resume: ") for line in lines) == (checkpoint > 0)
    facts = json.loads((run / "failure.json").read_text())
    assert (facts["checkpoint"], facts["resume"] is not None) == (checkpoint, checkpoint > 0)


def test_lines_of_failures_and_wrong_input_which_is_none(run: Path, tmp_path: Path) -> None:
    wrong = Failure(0, "data.path (x) must be there", 2)
    assert failure_text(wrong, run, FIRST, None) == wrong.text
    assert failure_text(KILLED, tmp_path / "new", FIRST, None) == KILLED.text
    assert failure_text(KILLED, None, FIRST, None) == KILLED.text
    assert not (run / "failure.json").exists()
    assert failure_text(LOST, run, FIRST, None).startswith("FAILED at step 25: rank 0 lost")
    failure_text(KILLED, run, FIRST, None)
    assert failure_text(LOST, run, FIRST, None) == LOST.text
    assert json.loads((run / "failure.json").read_text())["rank"] == 1
    lines = failure_text(KILLED, run, FIRST + 3600, None).splitlines()
    assert lines[0].startswith("FAILED before the first step after checkpoint 20: ")
    assert not any("lost" in line for line in lines)
    log = run / "logs/rank-0001.log"
    failure = Failure(1, f"rank 1 failed: ValueError: x\ntraceback: {log}", 1)
    lines = failure_text(failure, run, FIRST, None).splitlines()
    assert lines[:2] == ["FAILED at step 25: rank 1 failed: ValueError: x.", f"log: {log}"]


@pytest.mark.parametrize(
    ("words", "command"),
    ROWS["resumes"],
)
def test_the_command_that_resumes_a_run(words: list[str], command: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["shardwise", *words])
    assert resume_command(Path("runs/a")) == command


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "`shardwise train --run-dir runs/a`"),
        (PLACE, "the same command with --run-dir runs/a"),
        ({**PLACE, ERROR_FILE: "error.json"}, "`shardwise train --run-dir runs/a`"),
        ({**PLACE, ERROR_FILE: "error.json", NODE: "{}"}, "the same command with --run-dir runs/a"),
    ],
    ids=["one process", "torchrun", "local ranks", "ranks of a job"],
)
def test_the_command_after_a_stop(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["shardwise", "train", "x.yaml", "--nproc", "2"])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert continuing_command(Path("runs/a")) == expected


def test_the_first_report_stays_and_its_log_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    assert read_first_failure(path) is None
    assert report_first_failure(Failure(3, "the cause: α", 2))
    assert report_first_failure(Failure(0, "a consequence", 1))
    assert read_first_failure(path) == Failure(3, "the cause: α", 2)
    (tmp_path / "error.json").write_text('{"rank": 1, "te')
    assert read_first_failure(tmp_path / "error.json") is None
    log = tmp_path / "rank-0005.log"
    log.touch()
    failure = root_cause(None, {5: 3}, tmp_path)
    assert failure.log == str(log)
    assert failure.told == f"rank 5 ended with exit code 3 and named no reason\nlog: {log}"


REPORT = Failure(0, "connection closed by peer", 1)
WAITED = Failure(
    0, "rank 0 waited for x of micro-batch 3 from stage 1 (rank 1), and lost the connection", 1, waited=True
)


def killed(rank: int, reason: str) -> str:
    return f"rank {rank} was killed ({reason}){see('training#killed-rank')}"


@pytest.mark.parametrize(
    ("reported", "exit_codes", "text"),
    [
        (REPORT, {0: 1, 1: -signal.SIGTERM}, REPORT.text),
        (REPORT, {0: 1, 1: -signal.SIGKILL}, killed(1, "SIGKILL; usually out of memory")),
        (WAITED, {0: 1, 1: -signal.SIGKILL}, killed(1, "SIGKILL; usually out of memory") + f"\n{WAITED.text}"),
        (LOST, {0: 1, 1: -signal.SIGKILL}, killed(1, "SIGKILL; usually out of memory")),
        (WAITED, {0: 1, 1: 1, 2: 3}, f"rank 2 ended with exit code 3 and named no reason\n{WAITED.text}"),
        (WAITED, {0: 1, 1: 1, 2: -signal.SIGTERM}, WAITED.text),
        (REPORT, {0: -signal.SIGSEGV, 1: 1}, REPORT.text),
        (REPORT, {0: 1, 1: -signal.SIGABRT}, REPORT.text),
        (None, {1: -signal.SIGBUS, 0: 1}, killed(1, "SIGBUS; usually shared memory or a disk is full")),
        (None, {2: -signal.SIGTERM, 0: -signal.SIGTERM}, killed(2, "SIGTERM")),
        (None, {5: 3}, "rank 5 ended with exit code 3 and named no reason"),
    ],
)
def test_root_cause(reported: Failure | None, exit_codes: dict[int, int], text: str, tmp_path: Path) -> None:
    assert root_cause(reported, exit_codes, tmp_path).text == text
