"""What passes between a verification and its ranks."""

from pathlib import Path

from shardwise.verify.job import Checkpoint, Job, Result
from shardwise.verify.layouts import Cell
from shardwise.verify.tolerance import Differences

ONE = Checkpoint("one/step-00000002", "one process, on cpu")
RESULT = Result(Differences(0.0, 1e-8, 2e-8, float("inf"), "w", "g"), ONE, "DP 2, on cpu", 1.5)


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job({"train": {"steps": 4}}, [Cell(ranks=2), Cell(ranks=2, tensor=2, sequence=True)], ONE, ONE, 3, 9)
    job.write(tmp_path)
    assert Job.read(tmp_path) == job


def test_results_are_those_of_the_job_and_a_line_that_was_cut_short_is_none(tmp_path: Path) -> None:
    assert Result.read_all(tmp_path) == []
    RESULT.append(tmp_path)
    RESULT.append(tmp_path)
    path = tmp_path / "results.jsonl"
    path.write_text(path.read_text() + '{"differences": {"weights"')
    assert Result.read_all(tmp_path) == [RESULT, RESULT]
    Job({}, [], ONE, ONE, 0, 0).write(tmp_path)
    assert Result.read_all(tmp_path) == [], "a new job has no results"
