"""Stop requests: what signals and a file ask of a run."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.launch import stop_requests
from shardwise.launch.environment import ERROR_FILE


@pytest.fixture(autouse=True)
def _own_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", ERROR_FILE):
        monkeypatch.delenv(name, raising=False)
    before = {number: signal.getsignal(number) for number in stop_requests.SIGNALS}
    yield
    stop_requests.install()
    for number, handler in before.items():
        signal.signal(number, handler)


def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("shardwise.launch.stop_requests.time.monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("name", ["Ctrl-C (SIGINT)", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_the_first_signal_asks_for_a_stop(name: str, tmp_path: Path) -> None:
    stop_requests.install()
    assert stop_requests.requested(tmp_path) is None
    os.kill(os.getpid(), signal.Signals[re.search(r"SIG\w+", name)[0]])
    assert stop_requests.requested(tmp_path) == name
    stop_requests.install()
    assert stop_requests.requested(tmp_path) is None, "another run in this process was not asked"


def test_the_second_ends_at_once_but_one_request_may_arrive_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    stop_requests.install()
    os.kill(os.getpid(), signal.SIGTERM)
    now[0] += 0.9
    os.kill(os.getpid(), signal.SIGTERM)  # as `timeout` does: to the process and to its group
    now[0] += 0.1
    with pytest.raises(stop_requests.Interrupted, match="SIGINT"):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_before_the_time_limit_and_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM: SIGUSR1 some minutes before the end of the job, SIGTERM at it."""
    now, requests = clock(monkeypatch), stop_requests.Requests()
    heard = []
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        heard.append(requests.hear(number))
        now[0] += 60
    assert heard == [False, False, False, False, True]
    assert requests.by == "SIGUSR1"
    stop_requests.end_at_once()
    for number in stop_requests.SIGNALS:
        with pytest.raises(stop_requests.Interrupted):
            os.kill(os.getpid(), number)


def test_an_ignored_signal_and_a_process_that_leaves_hear_nothing(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop_requests.install()
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop_requests.requested(tmp_path) is None, "nohup means it"
    stop_requests.install()
    stop_requests.ignore()
    for number in stop_requests.SIGNALS:
        os.kill(os.getpid(), number)
    assert stop_requests.requested(tmp_path) is None


def test_a_file_asks_and_rank_0_alone_tells_that_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_requests.install()
    stop_requests.request(tmp_path, "`shardwise stop`")
    assert stop_requests.requested(tmp_path) == stop_requests.requested(str(tmp_path)) == "`shardwise stop`"
    assert stop_requests.requested(None) is None, "another rank of this machine looks"
    stop_requests.clear(tmp_path)
    assert stop_requests.requested(tmp_path) is None
    stop_requests.clear(tmp_path)
    (tmp_path / "stop.json").touch()
    assert stop_requests.requested(tmp_path) == "stop.json", "`touch` asks too"
    stop_requests.install()
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    for rank, told in (("1", False), ("0", True)):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        stop_requests.install()
        assert stop_requests.training_mark(tmp_path).exists() == told
