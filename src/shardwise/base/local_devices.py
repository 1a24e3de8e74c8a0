"""The devices of this machine, by the vendor's own tool: NVML, neuron-ls, or the system for its CPU."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardwise.base.hardware import available_memory, cpu_count

_NEURON_LS = "/opt/aws/neuron/bin/neuron-ls"  # path of the program; only a login shell has its folder in PATH
_NEURON_SECONDS = 10.0
_NO_DRIVER = ("LibraryNotFound", "DriverNotLoaded", "NoData")
"""Ends of the names of NVML's errors on a machine without GPUs, such as one with the library alone."""


@dataclass(frozen=True)
class DeviceProcess:
    """A process that uses a device of this machine; `run` and `rank` are None unless it is a rank of a known run."""

    pid: int
    run: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class LocalDevice:
    """A device of this machine, with the runs that use it. A fact that its tool does not report is None."""

    kind: Literal["nvidia", "neuron", "cpu"]
    index: int
    name: str
    cores: int | None = None  # cores of a chip or a CPU
    memory_bytes: int | None = None  # memory in use
    memory_total_bytes: int | None = None
    utilization: float | None = None  # share from 0 to 1; for a CPU the load of the last minute divided by its cores
    links: tuple[str, ...] = ()  # links to other devices, as text
    processes: tuple[DeviceProcess, ...] = ()


@dataclass
class DeviceList:
    """The devices of this machine's hardware, and `problems`: sentences on those that could not be asked."""

    devices: list[LocalDevice] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


Owners = dict[int, DeviceProcess]
"""The ranks of this machine by their process id."""


def devices_of_machine(ranks: Owners, *, dev: Path = Path("/dev"), sys_root: Path = Path("/sys")) -> DeviceList:
    """Detect the accelerators of this machine, with the runs whose ranks use them; the CPU if there is none."""
    found_devices = DeviceList()
    # dxg is the GPU of Windows, in WSL.
    if any(dev.glob("nvidia*")) or (dev / "dxg").exists():
        _nvidia(found_devices, ranks)
    program = shutil.which("neuron-ls") or shutil.which(_NEURON_LS)
    if program is not None:
        _neuron(found_devices, ranks, program, sys_root)
    if not found_devices.devices:
        found_devices.devices.append(_cpu(ranks))
    return found_devices


def _nvidia(found_devices: DeviceList, ranks: Owners) -> None:
    import pynvml  # type: ignore[import-untyped]  # costly to import, for machines with a driver alone

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if not type(error).__name__.endswith(_NO_DRIVER):
            found_devices.problems.append(f"NVML does not tell of this machine's GPUs: {error}")
        return

    def ask(name: str, *arguments: Any) -> Any:
        """Call a function of NVML; None if the device does not support the question, or has been lost."""
        try:
            return getattr(pynvml, name)(*arguments)
        except pynvml.NVMLError:
            return None

    try:
        handles = [ask("nvmlDeviceGetHandleByIndex", index) for index in range(ask("nvmlDeviceGetCount") or 0)]
        # Some releases of pynvml lack the constant; then links are not told.
        most_links = getattr(pynvml, "NVML_NVLINK_MAX_LINKS", 0)
        for index, handle in enumerate(handles):
            if handle is None:
                found_devices.problems.append(
                    f"NVML does not tell of GPU {index}, which may have failed: nvidia-smi says why"
                )
                continue
            found_devices.devices.append(_gpu(ask, index, handle, _nvidia_links(ask, handle, most_links), ranks))
    finally:
        ask("nvmlShutdown")


def _gpu(ask: Callable[..., Any], index: int, handle: Any, links: tuple[str, ...], ranks: Owners) -> LocalDevice:
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    rates = ask("nvmlDeviceGetUtilizationRates", handle)
    processes = ask("nvmlDeviceGetComputeRunningProcesses", handle) or []
    return LocalDevice(
        "nvidia",
        index,
        str(ask("nvmlDeviceGetName", handle) or "GPU"),
        memory_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        utilization=None if rates is None else rates.gpu / 100,
        links=links,
        processes=_known((process.pid for process in processes), ranks),
    )


def _nvidia_links(ask: Callable[..., Any], handle: Any, most_links: int) -> tuple[str, ...]:
    count = sum(bool(ask("nvmlDeviceGetNvLinkState", handle, link)) for link in range(most_links))
    if count:
        return (f"{count} NVLink{'s' * (count > 1)}",)
    generation = ask("nvmlDeviceGetCurrPcieLinkGeneration", handle)
    width = ask("nvmlDeviceGetCurrPcieLinkWidth", handle)
    return () if generation is None or width is None else (f"PCIe {generation} x{width}",)


def _neuron(found_devices: DeviceList, ranks: Owners, program: str, sys_root: Path) -> None:
    # Costly to import, for machines with the program alone.
    import subprocess

    try:
        done = subprocess.run([program, "-j"], capture_output=True, text=True, timeout=_NEURON_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        found_devices.problems.append(f"{program} does not tell of this machine's chips: {error}")
        return
    if done.returncode and not done.stdout.strip():
        # neuron-ls ends so on a machine without a chip.
        return
    try:
        chips = [_chip(fields, ranks, sys_root) for fields in json.loads(done.stdout)]
    except (ValueError, TypeError, KeyError, AttributeError):
        found_devices.problems.append(
            f"{program} -j must print a list of devices in JSON, and prints {done.stdout[:40]!r}"
        )
        return
    found_devices.devices.extend(sorted(chips, key=lambda chip: chip.index))


def _chip(fields: dict[str, Any], ranks: Owners, sys_root: Path) -> LocalDevice:
    index = int(fields["neuron_device"])
    driver = sys_root / f"devices/virtual/neuron_device/neuron{index}"
    counts = [_count(path) for path in driver.glob("neuron_core*/stats/memory_usage/device_mem/present")]
    known_counts = [count for count in counts if count is not None]
    name = _text(driver / "info/architecture/device_name") or fields.get("instance_type") or "Neuron device"
    neighbours = fields.get("connected_to") or []
    return LocalDevice(
        "neuron",
        index,
        str(name),
        # Logical cores, each of which is the device of a rank.
        cores=int(fields["nc_count"]),
        memory_bytes=sum(known_counts) if known_counts else None,
        memory_total_bytes=int(fields["memory_size"]),
        links=(f"NeuronLink to {', '.join(map(str, neighbours))}",) if neighbours else (),
        processes=_known((process["pid"] for process in fields.get("neuron_processes") or []), ranks),
    )


def _cpu(ranks: Owners) -> LocalDevice:
    cores = cpu_count()
    free = available_memory()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return LocalDevice(
        "cpu",
        0,
        _cpu_name() or platform.machine(),
        cores=cores,
        memory_bytes=None if free is None else total - free,
        memory_total_bytes=total,
        utilization=min(1.0, os.getloadavg()[0] / cores),
        processes=tuple(sorted(ranks.values(), key=lambda process: (process.run or "", process.rank or 0))),
    )


def _cpu_name() -> str:
    lines = _text(Path("/proc/cpuinfo")).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _known(pids: Iterable[int], ranks: Owners) -> tuple[DeviceProcess, ...]:
    return tuple(ranks.get(int(pid), DeviceProcess(int(pid))) for pid in pids)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _count(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None
