"""Which GPU's use a rank records, and how the start of its file tells where a slow one is."""

import platform
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from shardwise.train import rank_file
from shardwise.train.straggler import Straggler
from tests.unit.train.test_report import lines, record, reporter


@pytest.mark.parametrize(
    ("visible", "local_rank", "gpu"),
    [("", 1, 1), ("4,6", 1, 6), ("3", 2, 3), ("GPU-0aa, GPU-1bb", 1, "GPU-1bb"), ("GPU-0aa", 0, "GPU-0aa")],
)
def test_nvml_is_asked_for_the_gpu_that_the_rank_sees(
    visible: str, local_rank: int, gpu: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a launcher shows each rank its own one alone, and where it names them by UUID."""
    nvml = ModuleType("pynvml")
    vars(nvml).update(
        nvmlInit=lambda: None,
        NVMLError=OSError,
        nvmlDeviceGetHandleByIndex=lambda index: {0: 10, 1: 11, 3: 13, 6: 16}[index],
        nvmlDeviceGetHandleByUUID={"GPU-0aa": 20, "GPU-1bb": 21}.get,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=handle),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(rank_file, "_local_rank", lambda: local_rank)
    made, _ = reporter(tmp_path, device_name="NVIDIA H100 80GB HBM3")
    with made:
        made.start()
        made.step(record(1))
    handle = 10 + gpu if isinstance(gpu, int) else {"GPU-0aa": 20, "GPU-1bb": 21}[gpu]
    assert lines(tmp_path / "run/ranks/rank-0000.jsonl")[1]["device_utilization"] == handle / 100


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
