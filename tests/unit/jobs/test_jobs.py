"""What `shardwise jobs` tells of a job, from its run's folder, and which endings are followed by another start."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.runs.failure_record import FailureRecord
from shardwise.runs.folder import JsonLines, RunDirectory
from shardwise_jobs.cli import jobs as command
from shardwise_jobs.jobs import JobState, _job_state, submitted_job_goodput
from shardwise_jobs.restarts import AttemptEnding, _history_file, decide, history, record
from shardwise_jobs.slurm_commands import SlurmJob
from shardwise_jobs.submission import Submitted
from tests.monitor_runs import FIRST, Start, ending, stamp, write_run

KILLED = "rank 1 was killed (SIGKILL; usually out of memory)"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose job 4711 failed."""
    path = write_run(tmp_path / "run", [Start(0, 25, None)])
    with JsonLines(path / "restarts.jsonl") as file:
        file.write(ending("failed", FIRST, 35.0, 25, KILLED))
    failure = FailureRecord(stamp(FIRST + 36), KILLED, step=25, checkpoint=20, resume="sbatch run/job.sh")
    failure.write(RunDirectory(path))
    return path


def shown(job: str, run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    command._show(JobState(job, "train", "failed", "", run, 25, 2.8, 1.0, None))
    return capsys.readouterr().out


def test_each_job_of_a_run_has_its_own_failures_and_loads(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown("4711", run, capsys)
    assert f"start 1       steps 1 to 25 in 35 s on 2 nodes, failed: {KILLED}\n" in out
    block = [f"FAILED at step 25: {KILLED}.", "5 steps since checkpoint 20 are lost", "resume: sbatch run/job.sh"]
    assert out.splitlines()[-3:] == block
    with JsonLines(run / "restarts.jsonl") as file:
        file.write(ending("failed", FIRST + 36, 9.0, 25, "another one", job="4712"))
    FailureRecord(stamp(FIRST + 46), "another one", step=25).write(RunDirectory(run))
    with JsonLines(RunDirectory(run).metrics) as file:
        file.write({"event": "resume", "time": stamp(FIRST + 40), "step": 20, "load_seconds": 5.0})
    assert "another one" not in shown("4711", run, capsys)
    assert "  load        0.0 s" in shown("4711", run, capsys)
    assert "another one" in shown("4712", run, capsys)
    assert "  load        5.0 s" in shown("4712", run, capsys)


def test_each_job_of_a_run_has_its_own_end_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the first was cancelled after 20 steps, and the third one goes on where the second has finished."""
    monkeypatch.setattr("shardwise_jobs.slurm_commands.restarts", lambda *_: 0)
    run = write_run(tmp_path / "run", [Start(0, 20, "stopped by SIGTERM"), Start(20, 42)])
    second = FIRST + 60.0
    with JsonLines(run / "restarts.jsonl") as file:
        file.write(ending("ended by SLURM", FIRST, 35.0, 20))
        file.write(ending("finished", second, 60.0, 42, job="4712"))

    def state(job: str, present: SlurmJob | None = None) -> tuple[str, int | None]:
        state = _job_state(Submitted(job, "train", stamp(FIRST - 5), None), run, present, 60)
        return state.state, state.step

    assert state("4711") == ("ended by SLURM", 20)
    assert state("4712") == ("finished", 42)
    waiting = SlurmJob("4713", "PENDING", "Priority", 1, "", "0:00", "1:00:00", "main", "", "", str(run))
    assert state("4713", waiting) == ("queued", None)
    assert state("4713", replace(waiting, state="RUNNING", elapsed="0:10")) == ("starting", None)
    with JsonLines(RunDirectory(run).metrics) as file:
        file.write({"event": "step", "time": stamp(time.time()), "step": 43, "loss": 2.0})
    assert state("4713", replace(waiting, state="RUNNING", elapsed="0:10")) == ("running", 43)


def test_the_parts_of_a_job_are_its_whole_time() -> None:
    """40 steps of which 10 are lost, which is noticed after 5 s; a start that fails; 30 more steps."""
    start = {"until_joined": 2.0, "until_training": 10.0, "after_last_step": 5.0}
    first = replace(CRASH, seconds=55.0, **start, first_step=0, step=40)
    nothing = replace(CRASH, seconds=5.0, **start | {"until_joined": None, "until_training": None}, first_step=None)
    start |= {"until_joined": 1.0, "after_last_step": 0.2}
    last = replace(CRASH, how="finished", seconds=40.0, **start, first_step=30)
    told = dict(submitted_job_goodput([first, nothing, replace(last, step=60)], loading=3.0))
    assert told["goodput"] == "60.0 % of 100 s in 3 starts"
    seconds = {"lost steps": "10 s: 10 steps", "detection": "5 s ", "restart": "8 s ", "load": "3.0 s "}
    for part, text in {**seconds, "first step": "14 s "}.items():
        assert told[f"  {part}"].startswith(text)
    assert submitted_job_goodput([]) == []


CRASH = AttemptEnding(
    how="failed", job="7", requeues=0, nodes=2, began=100.0, seconds=60.0, until_joined=1.0, until_training=10.0,
    after_last_step=2.0, first_step=0, step=5, checkpoint=0, rank=3, exit_code=1,
    text="rank 3 was killed (SIGKILL; usually out of memory)\nrank 1 waited for x of micro-batch 3",
)  # fmt: skip


def crash(step: int, checkpoint: int = 0, text: str = CRASH.text, rank: int = 3) -> AttemptEnding:
    return replace(CRASH, step=step, checkpoint=checkpoint, text=text, rank=rank)


def test_crashes_are_counted_and_what_slurm_ends_is_not() -> None:
    assert decide([crash(5)], 2).why == "restart 1 of 2 (launch.max_restarts)"
    assert decide([crash(5), crash(6)], 2).starts_again
    refused = decide([crash(5), crash(6), crash(7)], 2)
    assert not refused.starts_again
    assert refused.why.endswith("3 restarts without a checkpoint exceed launch.max_restarts (2)")
    assert decide([crash(5), crash(6), crash(17, checkpoint=10)], 2).why.startswith("restart 1 of 2")
    assert not decide([crash(5)], 0).starts_again
    continued = [replace(crash(step), first_step=step - 2) for step in (5, 7, 9)]
    assert decide(continued, 1).why == "restart 1 of 1 (launch.max_restarts)"
    starts_again = decide([replace(ending, first_step=3) for ending in continued], 1)
    assert starts_again.why.endswith("3 restarts since the state of step 3 was kept exceed launch.max_restarts (1)")
    for how in ("preempted", "ended by SLURM"):
        assert decide([replace(CRASH, how=how)] * 50, 0).starts_again, how
    for how in ("time limit", "lost node"):
        assert decide([replace(CRASH, how=how)], 1).starts_again, how
        assert not decide([replace(CRASH, how=how)] * 2, 1).starts_again, f"{how} is counted: it may come for ever"


def test_the_same_failure_ends_the_job() -> None:
    for crashed, why in (
        (replace(CRASH, exit_code=2, text="data.path (x) must be there"), "its input must be corrected first"),
        (crash(5, text="step 6: the loss (nan) and the gradient norm (1) must be finite"), "the same loss"),
    ):
        decision = decide([crashed], 100)
        assert not decision.starts_again
        assert why in decision.why
    other_process = CRASH.text.replace("b.log", "c.log").replace("rank 1", "rank 0")
    assert not decide([crash(5), crash(5, text=other_process)], 100).starts_again
    for other in (crash(6), crash(5, rank=2), crash(5, text="rank 3 failed: RuntimeError: no such kernel")):
        assert decide([crash(5), other], 100).starts_again, other
    between = replace(CRASH, how="preempted", text="", rank=None)
    assert not decide([crash(5), between, crash(5)], 100).starts_again, "a preemption between the two does not matter"


def test_the_history_outlives_a_line_that_was_cut_short(tmp_path: Path) -> None:
    assert history(tmp_path) == []
    record(tmp_path, crash(5))
    with _history_file(tmp_path).open("a") as file:
        file.write('{"how": "fai\n')
    record(tmp_path, crash(6))
    assert history(tmp_path) == [crash(5), crash(6)]
