"""The block of lines in which a user reads why a run failed, and which run has one."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shardwise.base.errors import see
from shardwise.runs.failure_record import FailureRecord, failure_of
from shardwise.runs.folder import RunDirectory
from shardwise_watch.run import open_run
from tests.monitor_runs import FIRST, Start, stamp, write_run
from tests.rows import rows_of

ROWS = rows_of(__file__)

KILLED = FailureRecord(
    time=stamp(FIRST + 1000),
    cause=f"rank 1 was killed (SIGKILL; usually out of memory){see('training#killed-rank')}",
    rank=1,
    log="logs/rank-0001.log",
    step=731,
    checkpoint=600,
    every=200,
    resume="shardwise train quickstart --nproc 2 --run-dir runs/live",
)


def test_a_record_is_a_block_of_lines_without_secrets_or_none(tmp_path: Path) -> None:
    assert KILLED.lines(Path("runs/live")) == [
        "FAILED at step 731: rank 1 was killed (SIGKILL; usually out of memory).",
        "log: runs/live/logs/rank-0001.log",
        "131 steps since checkpoint 600 are lost",
        "resume: shardwise train quickstart --nproc 2 --run-dir runs/live",
        f"see: {see('training#killed-rank').strip(' ()`')}",
    ]
    directory = RunDirectory(tmp_path)
    replace(KILLED, cause="https://me:word@host/x cannot be read").write(directory)
    assert "word" not in directory.failure.read_text()
    assert directory.recorded_failure()["step"] == 731
    facts = asdict(KILLED)
    assert failure_of(facts, {"time": stamp(FIRST + 999)}) == KILLED
    assert failure_of(facts, {}) == KILLED
    assert failure_of(facts, {"time": stamp(FIRST + 1001)}) is None
    assert failure_of({**facts, "step": "many"}, {}) is None
    assert failure_of({**facts, "time": "yesterday"}, {}) is None
    assert failure_of({}, {}) is None


LOST: list[tuple[dict[str, object], str, str | None]] = ROWS["lost"]


@pytest.mark.parametrize(("changes", "heading", "lost"), LOST)
def test_lines_that_do_not_apply_are_left_out(changes: dict[str, object], heading: str, lost: str | None) -> None:
    record = replace(FailureRecord(KILLED.time, "x", step=731, checkpoint=600, every=200), **changes)
    assert record.lines(Path("run")) == [f"FAILED {heading}", *([] if lost is None else [lost])]
    waited = "rank 0 waited for x, and lost the connection"
    assert replace(record, details=waited).lines(Path("run"))[1] == waited


def test_the_state_of_a_run_whose_launcher_recorded_a_failure(tmp_path: Path) -> None:
    """Of a killed rank, rank 0 records nothing, or that it lost a connection."""
    path = write_run(tmp_path / "run", [Start(0, 20, None)])
    run = open_run(path, all_steps=False)
    assert (run.state, run.failure) == ("killed", None)
    KILLED.write(run.directory)
    run.refresh()
    assert (run.state, run.reason) == ("failed", f"failed: {KILLED.cause}")
    replace(KILLED, time=stamp(FIRST)).write(run.directory)
    run.refresh()
    assert run.state == "killed"
