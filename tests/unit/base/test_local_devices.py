"""The devices of this machine, as a library in NVML's place, a program in neuron-ls's place, and the system tell."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardwise.base.local_devices import DeviceProcess, LocalDevice, devices_of_machine
from shardwise.runs.folder import RunLock
from shardwise_watch.run import RunView, live_ranks_by_process
from tests import monitor_runs
from tests.monitor_runs import GIB, Mesh, Start, write_run

RANKS = {4711: DeviceProcess(4711, "gpt3", 0), 4712: DeviceProcess(4712, "gpt3", 1)}
NEURON_LS = """[
    {"instance_type": "trn2.48xlarge", "instance_id": "i-0dcf246b9a7d5f066", "neuron_device": 1, "bdf": "0000:e3:00.0",
     "cpu_affinity": "48-95,144-191", "numa_node": "1", "connected_to": [13, 0], "nc_count": 4,
     "logical_neuroncore_config": 2, "memory_size": 103079215104, "neuroncore_ids": [4, 5, 6, 7],
     "neuron_processes": []},
    {"instance_type": "trn2.48xlarge", "instance_id": "i-0dcf246b9a7d5f066", "neuron_device": 0, "bdf": "0000:e1:00.0",
     "cpu_affinity": "48-95,144-191", "numa_node": "1", "connected_to": [12, 1], "nc_count": 4,
     "logical_neuroncore_config": 2, "memory_size": 103079215104, "neuroncore_ids": [0, 1, 2, 3],
     "neuron_processes": [{"pid": 4711, "command": "python train.py", "neuron_runtime_version": "2.34.10"},
                          {"pid": 99, "command": "", "neuron_runtime_version": "2.34.10"}]}
]"""
"""As the tool prints it on a machine with Trainium2."""


class NVMLError(Exception):
    pass


def nvml(*, lost: int | None = None, links: int = 2) -> ModuleType:
    """A module with what `pynvml` has of two GPUs, of which the second supports little."""
    module: Any = ModuleType("pynvml")
    module.NVMLError, module.NVML_NVLINK_MAX_LINKS = NVMLError, 4

    def handle(index: int) -> int:
        if index == lost:
            raise NVMLError("GPU is lost")
        return index

    def only_of_the_first(value: Any) -> Any:
        def answer(handle: int, *_: object) -> Any:
            if handle:
                raise NVMLError("Not Supported")
            return value

        return answer

    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetCount = lambda: 2
    module.nvmlDeviceGetHandleByIndex = handle
    module.nvmlDeviceGetName = lambda _: "NVIDIA H100 80GB HBM3"
    module.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=(handle + 1) * GIB, total=80 * GIB)
    module.nvmlDeviceGetUtilizationRates = only_of_the_first(SimpleNamespace(gpu=93, memory=40))
    processes = [SimpleNamespace(pid=4712, usedGpuMemory=GIB), SimpleNamespace(pid=99, usedGpuMemory=None)]
    module.nvmlDeviceGetComputeRunningProcesses = only_of_the_first(processes)
    module.nvmlDeviceGetNvLinkState = lambda handle, link: handle == 0 and link < links
    module.nvmlDeviceGetCurrPcieLinkGeneration = lambda _: 5
    module.nvmlDeviceGetCurrPcieLinkWidth = lambda _: 16
    return module


@pytest.fixture(autouse=True)
def _no_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with the driver's file alone."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "nvidiactl").touch()


def found_by(library: ModuleType, monkeypatch: pytest.MonkeyPatch, at: Path, ranks: Any = RANKS) -> Any:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return devices_of_machine(ranks, dev=at, sys_root=at)


def neuron_ls(tmp_path: Path, script: str) -> None:
    (tmp_path / "bin").mkdir(exist_ok=True)
    program = tmp_path / "bin/neuron-ls"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_gpus_by_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_by(nvml(), monkeypatch, tmp_path)
    name, total, processes = "NVIDIA H100 80GB HBM3", 80 * GIB, (RANKS[4712], DeviceProcess(99))
    assert found.devices == [
        LocalDevice("nvidia", 0, name, None, GIB, total, 0.93, ("2 NVLinks",), processes),
        LocalDevice("nvidia", 1, name, None, 2 * GIB, total, None, ("PCIe 5 x16",)),
    ]
    assert found.problems == []
    found = found_by(nvml(lost=0), monkeypatch, tmp_path)
    assert [device.index for device in found.devices] == [1]
    assert found.problems == ["NVML does not tell of GPU 0, which may have failed: nvidia-smi says why"]


def test_chips_by_neuron_ls(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").unlink()
    neuron_ls(tmp_path, f'[ "$1" = -j ] && /bin/cat <<END\n{NEURON_LS}\nEND')
    driver = tmp_path / "devices/virtual/neuron_device/neuron0"
    for core, used in enumerate((3, 4)):
        usage = driver / f"neuron_core{core}/stats/memory_usage/device_mem"
        usage.mkdir(parents=True)
        (usage / "present").write_text(f"{used * GIB}\n")
    (driver / "info/architecture").mkdir(parents=True)
    (driver / "info/architecture/device_name").write_text("Trainium2\n")
    found = devices_of_machine(RANKS, dev=tmp_path, sys_root=tmp_path)
    total = 96 * GIB
    link = ("NeuronLink to 12, 1",)
    processes = (RANKS[4711], DeviceProcess(99))
    assert found.devices == [
        LocalDevice("neuron", 0, "Trainium2", 4, 7 * GIB, total, None, link, processes),
        LocalDevice("neuron", 1, "trn2.48xlarge", 4, None, total, None, ("NeuronLink to 13, 0",)),
    ]


def test_processes_are_ranks_of_runs_that_go_on_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "node-000")
    own = os.getpid()
    monkeypatch.setattr(monitor_runs, "FIRST_PID", own)
    path = write_run(tmp_path / "run", [Start(0, 3, None)], mesh=Mesh(1, 2, 1, 2), steps=9)
    ended = write_run(tmp_path / "ended", [Start(0, 3)], mesh=Mesh(1, 2, 1, 2))
    assert live_ranks_by_process([RunView(path, all_steps=False)]) == {}, (
        "it was killed, and its process may be another program's"
    )
    with RunLock(path):
        found = live_ranks_by_process([RunView(path, all_steps=False), RunView(ended, all_steps=False)])
    assert found == {own: DeviceProcess(own, "run", 0)}
