import errno
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from shardwise.launch import heartbeat
from shardwise.launch.environment import HEARTBEATS
from shardwise.launch.heartbeat import Beat, missing
from tests.e2e import processes

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
