"""Stop requests: what signals and a file ask of a run; and heartbeats."""

import errno
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from shardwise.launch import heartbeat, stop_requests
from shardwise.launch.environment import ERROR_FILE, HEARTBEATS
from shardwise.launch.heartbeat import Beat, missing
from tests.e2e import processes


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


def test_which_second_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    stop_requests.install()
    os.kill(os.getpid(), signal.SIGTERM)
    now[0] += 0.9
    os.kill(os.getpid(), signal.SIGTERM)  # as `timeout` does: to the process and to its group
    now[0] += 0.1
    with pytest.raises(stop_requests.Interrupted, match="SIGINT"):
        os.kill(os.getpid(), signal.SIGINT)
    # SLURM: SIGUSR1 some minutes before the end of the job, SIGTERM at it.
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


DOING = "gradient reduction of step 12"


def beat(rank: int, *, age: float = 0.4, doing: str = DOING, **called: int) -> Beat:
    """Of a rank of two nodes of two; `called`: by group, such as `tp_0`."""
    calls = {name.replace("_", "@"): (count, "all_reduce") for name, count in called.items()}
    return Beat(rank, 100 + rank, f"n{rank // 2}", "cpu", 0, age, 11, doing, 30.0, calls)


def test_who_does_not_answer_or_has_called_less_is_named() -> None:
    beats = [beat(0), beat(1), beat(2), beat(3, age=14.0, doing="forward and backward of step 12")]
    assert missing(beats) == (
        "rank 3 (node n1, cpu, pipeline stage 0, process 103) does not answer since 14 s: it last was in forward and "
        "backward of step 12; ranks 0-2 waited in gradient reduction of step 12"
    )
    beats = [beat(0), beat(1), beat(2, age=20.0), beat(3, age=20.0)]
    assert missing(beats, {"n1": range(2, 4)}) == f"node n1 (ranks 2-3) does not answer; ranks 0-1 waited in {DOING}"
    assert missing([beat(0, tp_0=4), beat(1, tp_0=4)]) is None
    assert missing([]) is None
    # Rank 1 waits for rank 0 in their group, and rank 3 for rank 1 in theirs: only rank 0 waits for nobody.
    reading = "reading of data of step 12"
    beats = [
        beat(0, doing=reading, tp_0=40, dp_0=7),
        beat(1, tp_0=41, dp_1=7),
        beat(2, tp_2=41, dp_0=8),
        beat(3, tp_2=41, dp_1=8),
    ]
    assert missing(beats) == (
        "rank 0 (node n0, cpu, pipeline stage 0, process 100) is in reading of data of step 12 since 30 s, and has not "
        f"called all_reduce 41 of its tp group, which rank 1 called; ranks 1-3 waited in {DOING}"
    )


def test_a_thread_writes_what_the_rank_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    facts = {"step": 3, "doing": DOING, "device": "cpu", "stage": 1, "called": {"tp@0": (5, "all_reduce")}}
    with heartbeat.beating(lambda: facts):
        assert threading.active_count() == before, "nobody reads its heartbeats"
    for name, value in {HEARTBEATS: str(tmp_path), "RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(heartbeat, "SECONDS", 0.01)
    full, write = iter([True]), Path.write_text

    def write_text(path: Path, text: str) -> int:
        if next(full, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", write_text)
    with heartbeat.beating(lambda: facts):
        assert processes.wait_for(lambda: len(heartbeat.read(tmp_path)) == 1, 10)
        facts["doing"] = "checkpoint of step 4"
        assert processes.wait_for(lambda: heartbeat.read(tmp_path, "n7")[0].doing == "checkpoint of step 4", 10)
    assert threading.active_count() == before, "the thread ends with the run"
    (found,) = heartbeat.read(tmp_path, "n7")
    assert (found.rank, found.host, found.stage, found.called) == (2, "n7", 1, {"tp@0": (5, "all_reduce")})
    assert not found.is_silent
    assert heartbeat.from_plain(asdict(found)) == found
