"""What `shardwise jobs show` prints of a job that has ended, from its run's folder."""

from pathlib import Path

import pytest

from shardwise.cli import jobs as command
from shardwise.launch.slurm.jobs import JobState
from shardwise.runs.failure import FailureRecord
from shardwise.runs.folder import JsonLines, RunDirectory
from tests.monitor_runs import FIRST, Start, ending, stamp, write_run

KILLED = "rank 1 was killed (SIGKILL; usually out of memory)"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose job 4711 failed."""
    path = write_run(tmp_path / "run", [Start(0, 25, None)])
    with JsonLines(path / "restarts.jsonl") as file:
        file.write(ending("failed", FIRST, 35.0, 25, KILLED))
    FailureRecord(stamp(FIRST + 36), KILLED, step=25, checkpoint=20, resume="sbatch run/job.sh").write(
        RunDirectory(path)
    )
    return path


def shown(job: str, run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    command._show(JobState(job, "train", "failed", "", run, 25, 2.8, 1.0, None))
    return capsys.readouterr().out


def test_the_failure_of_a_job_is_shown_as_its_log_has_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown("4711", run, capsys)
    assert f"start 1       steps 1 to 25 in 35 s on 2 nodes, failed: {KILLED}\n" in out
    block = [f"FAILED at step 25: {KILLED}.", "5 steps since checkpoint 20 are lost", "resume: sbatch run/job.sh"]
    assert out.splitlines()[-3:] == block


def test_another_job_of_the_run_has_not_failed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with JsonLines(run / "restarts.jsonl") as file:
        file.write(ending("finished", FIRST + 3600, 35.0, 25, job="4712"))
    assert "FAILED" not in shown("4712", run, capsys)
    assert "FAILED" in shown("4711", run, capsys)
