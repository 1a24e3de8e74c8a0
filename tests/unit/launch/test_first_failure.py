"""Which failure of a run is shown."""

import signal
from pathlib import Path

import pytest

from shardwise.base.errors import see
from shardwise.launch.environment import ERROR_FILE
from shardwise.launch.first_failure import Failure, read_first_failure, report_first_failure, root_cause


def test_the_first_report_stays_and_one_that_is_cut_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    assert read_first_failure(path) is None
    assert report_first_failure(Failure(3, "the cause: α", 2))
    assert report_first_failure(Failure(0, "a consequence", 1))
    assert read_first_failure(path) == Failure(3, "the cause: α", 2)
    (tmp_path / "error.json").write_text('{"rank": 1, "te')
    assert read_first_failure(tmp_path / "error.json") is None


REPORT = Failure(0, "connection closed by peer", 1)
WAITED = Failure(
    0, "rank 0 waited for x of micro-batch 3 from stage 1 (rank 1), and lost the connection", 1, waited=True
)
LOST = Failure(0, "rank 0 lost the connection to another rank during forward", 1, waited=True)


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


def test_the_log_is_named_where_there_is_one(tmp_path: Path) -> None:
    log = tmp_path / "rank-0005.log"
    log.touch()
    failure = root_cause(None, {5: 3}, tmp_path)
    assert failure.log == str(log)
    assert failure.told == f"rank 5 ended with exit code 3 and named no reason\nlog: {log}"
