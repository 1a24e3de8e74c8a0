"""What a rank records of its device, and how the start of its file tells where a slow one is."""

import platform
from pathlib import Path

import pytest

from shardwise.train.step_record import Straggler
from tests.unit.train.test_report import lines, record, reporter


def test_the_use_of_the_gpu_is_recorded_where_a_library_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = reporter(tmp_path)
    with made:
        made.start()
        made.step(record(1))
        monkeypatch.setattr("torch.cuda.utilization", lambda: 25)
        made.step(record(2))
    _, unknown, known = lines(tmp_path / "run/ranks/rank-0000.jsonl")
    assert "device_utilization" not in unknown
    assert known["device_utilization"] == 0.25


def test_a_spike_and_a_slow_rank_are_warned_of_once(tmp_path: Path) -> None:
    other, _ = reporter(tmp_path, rank=3)
    with other:
        other.start()
    made, stream = reporter(tmp_path)
    slow, equal = Straggler(3, 2.5, 2.0), Straggler(3, 1.1, 1.0)
    with made:
        made.start()
        for step, (spike, straggler) in enumerate([(7.0, slow), (8.0, slow), (0.0, equal), (0.0, slow)], 1):
            made.step(record(step, loss_spike=spike, straggler=straggler))
    events = lines(tmp_path / "run/metrics.jsonl")
    told = [event["text"].split(":")[0] for event in events if event["event"] == "warning"]
    place = f"rank 3 ({platform.node()}, cpu, stage 0) is slow"
    assert told == ["step 1", place, place], "again only once it had ended"
    assert "step 1: the loss" in stream.getvalue()
    assert "7 standard deviations above the mean of the 20 steps before" in stream.getvalue()
    work = (
        "is slow: its own work, without waiting, takes 2.5 times that of the fastest rank of its stage, and 2.0 times"
    )
    assert f"{work} what its own fastest 20 steps took" in stream.getvalue()
