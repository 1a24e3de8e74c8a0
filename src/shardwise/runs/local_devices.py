"""The devices of this machine, as the vendor's own tool tells of them: NVML, neuron-ls, or the system for its CPU."""

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
from shardwise.runs.run import Run

_NEURON_LS = "/opt/aws/neuron/bin/neuron-ls"
"""Where it is installed; a login shell alone has its folder in PATH."""
_NEURON_SECONDS = 10.0
_NO_DRIVER = ("LibraryNotFound", "DriverNotLoaded", "NoData")


@dataclass(frozen=True)
class Process:
    """A process that uses a device; `run` and `rank` where it is a rank of a run that is known."""

    pid: int
    run: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Device:
    """A device of this machine; what its tool does not tell is None.

    Attributes:
        cores: of a chip or a CPU.
        memory_bytes: in use.
        utilization: 0 to 1; of a CPU the load of the last minute over its cores.
        links: to other devices, as text.
    """

    kind: Literal["nvidia", "neuron", "cpu"]
    index: int
    name: str
    cores: int | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization: float | None = None
    links: tuple[str, ...] = ()
    processes: tuple[Process, ...] = ()


@dataclass
class Found:
    """What `devices` found, and why it found no more: `problems` are sentences."""

    devices: list[Device] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


Owners = dict[int, Process]
"""The ranks of this machine by their process."""


def owners(runs: Iterable[Run]) -> Owners:
    """The ranks on this machine of those runs that go on."""
    host, found = platform.node(), {}
    for run in runs:
        if run.state in ("starting", "running", "silent"):
            for view in run.ranks():
                if view.host == host and view.pid is not None and _exists(view.pid):
                    found[view.pid] = Process(view.pid, run.name, view.rank)
    return found


def devices(ranks: Owners, *, dev: Path = Path("/dev"), sys_root: Path = Path("/sys")) -> Found:
    """The accelerators of this machine; where there is none, its CPU."""
    found = Found()
    if any(dev.glob("nvidia*")) or (dev / "dxg").exists():
        _nvidia(found, ranks)
    program = shutil.which("neuron-ls") or shutil.which(_NEURON_LS)
    if program is not None:
        _neuron(found, ranks, program, sys_root)
    if not found.devices:
        found.devices.append(_cpu(ranks))
    return found


def _nvidia(found: Found, ranks: Owners) -> None:
    import pynvml  # type: ignore[import-untyped]  # costly to import, for machines with a driver alone

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if not type(error).__name__.endswith(_NO_DRIVER):
            found.problems.append(f"NVML does not tell of this machine's GPUs: {error}")
        return

    def ask(name: str, *arguments: Any) -> Any:
        """What NVML answers; None where the device does not support the question, or has been lost."""
        try:
            return getattr(pynvml, name)(*arguments)
        except pynvml.NVMLError:
            return None

    try:
        handles = [ask("nvmlDeviceGetHandleByIndex", index) for index in range(ask("nvmlDeviceGetCount") or 0)]
        alive = [(index, handle) for index, handle in enumerate(handles) if handle is not None]
        places = {_bus(ask("nvmlDeviceGetPciInfo", handle)): index for index, handle in alive}
        for index, handle in enumerate(handles):
            if handle is None:
                found.problems.append(f"NVML does not tell of GPU {index}, which may have failed: nvidia-smi says why")
                continue
            memory, rates = ask("nvmlDeviceGetMemoryInfo", handle), ask("nvmlDeviceGetUtilizationRates", handle)
            processes = ask("nvmlDeviceGetComputeRunningProcesses", handle) or []
            found.devices.append(
                Device(
                    "nvidia",
                    index,
                    str(ask("nvmlDeviceGetName", handle) or "GPU"),
                    memory_bytes=None if memory is None else int(memory.used),
                    memory_total_bytes=None if memory is None else int(memory.total),
                    utilization=None if rates is None else rates.gpu / 100,
                    links=_nvidia_links(ask, handle, places, getattr(pynvml, "NVML_NVLINK_MAX_LINKS", 0)),
                    processes=_known((process.pid for process in processes), ranks),
                )
            )
    finally:
        ask("nvmlShutdown")


def _nvidia_links(ask: Callable[..., Any], handle: Any, places: dict[str, int], most: int) -> tuple[str, ...]:
    """How many NVLinks go to each other GPU, or to a switch; without any, what PCIe link it has."""
    ends: dict[str, int] = {}
    for link in range(most):
        if ask("nvmlDeviceGetNvLinkState", handle, link):
            other = places.get(_bus(ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)))
            end = "a switch" if other is None else f"GPU {other}"
            ends[end] = ends.get(end, 0) + 1
    if ends:
        return tuple(f"{count} NVLink{'s' * (count > 1)} to {end}" for end, count in ends.items())
    generation = ask("nvmlDeviceGetCurrPcieLinkGeneration", handle)
    width = ask("nvmlDeviceGetCurrPcieLinkWidth", handle)
    return () if generation is None or width is None else (f"PCIe {generation} x{width}",)


def _bus(pci: Any) -> str:
    """Where a device is on the PCI bus; NVML writes the domain with 4 or 8 digits."""
    if pci is None:
        return ""
    bus = pci.busId
    text = bus.decode() if isinstance(bus, bytes) else str(bus)
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _neuron(found: Found, ranks: Owners, program: str, sys_root: Path) -> None:
    import subprocess  # costly to import, for machines with the program alone

    try:
        done = subprocess.run([program, "-j"], capture_output=True, text=True, timeout=_NEURON_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        found.problems.append(f"{program} does not tell of this machine's chips: {error}")
        return
    if done.returncode and not done.stdout.strip():
        return  # as it ends where there is no chip
    try:
        chips = [_chip(fields, ranks, sys_root) for fields in json.loads(done.stdout)]
    except (ValueError, TypeError, KeyError, AttributeError):
        found.problems.append(f"{program} -j must print a list of devices in JSON, and prints {done.stdout[:40]!r}")
        return
    found.devices.extend(sorted(chips, key=lambda chip: chip.index))


def _chip(fields: dict[str, Any], ranks: Owners, sys_root: Path) -> Device:
    """A chip of AWS, with what its driver shows of its memory."""
    index = int(fields["neuron_device"])
    driver = sys_root / f"devices/virtual/neuron_device/neuron{index}"
    used = [_count(path) for path in driver.glob("neuron_core*/stats/memory_usage/device_mem/present")]
    known = [count for count in used if count is not None]
    name = _text(driver / "info/architecture/device_name") or fields.get("instance_type") or "Neuron device"
    others = fields.get("connected_to") or []
    return Device(
        "neuron",
        index,
        str(name),
        cores=int(fields["nc_count"]) // int(fields.get("logical_neuroncore_config") or 1),
        memory_bytes=sum(known) if known else None,
        memory_total_bytes=int(fields["memory_size"]),
        links=(f"NeuronLink to {', '.join(map(str, others))}",) if others else (),
        processes=_known((process["pid"] for process in fields.get("neuron_processes") or []), ranks),
    )


def _cpu(ranks: Owners) -> Device:
    cores, free = cpu_count(), available_memory()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        "cpu",
        0,
        _cpu_name() or platform.machine(),
        cores=cores,
        memory_bytes=None if free is None else total - free,
        memory_total_bytes=total,
        utilization=min(1.0, os.getloadavg()[0] / cores),
        processes=tuple(sorted(ranks.values(), key=lambda process: (process.run or "", process.rank or 0))),
    )


def _cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    lines = _text(cpuinfo).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _known(pids: Iterable[int], ranks: Owners) -> tuple[Process, ...]:
    return tuple(ranks.get(int(pid), Process(int(pid))) for pid in pids)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _count(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None
