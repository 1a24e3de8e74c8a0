"""The examination of a machine: devices, network, threads, memory, limits, disk, Python and packages."""

from __future__ import annotations

import os
import platform
import re
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from shardwise import __version__
from shardwise.base.errors import ConfigError, listing
from shardwise.base.files import NoLocksError, cache_root, free_bytes, lock, reason_of
from shardwise.base.hardware import accelerators, available_memory, cpu_count, torch_version
from shardwise.base.units import counted, size
from shardwise.base.yaml_and_json import whole_number
from shardwise.launch.environment import joined, unjoined
from shardwise.launch.external_launchers import task_of

if TYPE_CHECKING:
    from shardwise.base.local_devices import LocalDevice

_LITTLE_DISK = 2 * 2**30
_LITTLE_MEMORY = 2**30
_LITTLE_SHARED = 64 * 2**20  # Docker's default for /dev/shm, in which NCCL's buffers of a few ranks do not fit
_FEW_FILES = 4096  # gloo keeps two sockets for each pair of ranks in each group
_INTERFACE_KEYS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


Status = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Check:
    """The finding of one check of `shardwise doctor`."""

    name: str
    status: Status  # `wrong` if trainings fail here; `warning` if some do, or they are slow
    found: str
    mend: str = ""  # advice; empty if all is well


def check_machine(run_path: Path) -> Iterator[Check]:
    """Check the whole machine, for runs in the folder `run_path`."""
    yield from _check_devices()
    yield from _check_network(os.environ)
    yield _check_threads(os.environ, cpu_count(), _cpu_limit())
    yield _check_memory(available_memory())
    yield from _check_limits()
    yield from _check_folder("run folder", run_path)
    yield from _check_folder("cache", cache_root())
    yield _check_launcher(os.environ)


def _check_devices(dev: Path = Path("/dev")) -> Iterator[Check]:
    from shardwise.base.local_devices import devices_of_machine as list_devices

    listed = list_devices({})
    for problem in listed.problems:
        yield Check(
            "devices", "warning", problem, "ask the vendor's tool (nvidia-smi, neuron-ls), or restart the driver"
        )
    shown = "; ".join(map(_described, listed.devices))
    kind, count = accelerators()
    is_listed = any(device.kind != "cpu" for device in listed.devices)
    has_device_files = any(dev.glob("nvidia[0-9]*")) or any(dev.glob("neuron[0-9]*"))
    if count == 0 and (is_listed or has_device_files):
        torch = torch_version() or "(not installed)"
        problem = f"{shown}: trainings here run on the CPU, as torch {torch} or the environment hides them"
        mend = "install a torch that is built for them, or unset CUDA_VISIBLE_DEVICES or NEURON_RT_VISIBLE_CORES"
        yield Check("devices", "warning", problem, mend)
    else:
        usable = f"{count} × {kind}" if count else "no accelerator, so ranks run on the CPU"
        yield Check("devices", "ok", f"{shown}: {usable}")


def _described(device: LocalDevice) -> str:
    facts = [device.name]
    if device.memory_total_bytes is not None:
        facts.append(size(device.memory_total_bytes))
    if device.cores is not None:
        facts.append(counted(device.cores, "core"))
    return ", ".join([*facts, *device.links])


def _check_network(variables: Mapping[str, str], infiniband: Path = Path("/sys/class/infiniband")) -> Iterator[Check]:
    import psutil

    states = psutil.net_if_stats()
    up = [name for name in psutil.net_if_addrs() if name in states and states[name].isup]
    speeds = {name: f" ({states[name].speed:,} Mbit/s)" if states[name].speed > 0 else "" for name in up}
    yield Check("network", "ok", ", ".join(f"{name}{speeds[name]}" for name in up) or "no interface is up")
    for key in _INTERFACE_KEYS:
        value = variables.get(key, "")
        # NCCL and gloo take beginnings of names; `=` asks NCCL for whole names, and `^` for all others.
        names = [name.strip() for name in value.lstrip("=").split(",") if name.strip()]
        if names and not value.startswith("^") and not any(interface.startswith(tuple(names)) for interface in up):
            yield Check("network", "wrong", f"{key} ({value}) must name an interface that is up", f"unset {key}")
    for port in sorted(infiniband.glob("*/ports/*/state")):
        state = port.read_text(encoding="ascii", errors="replace").strip()
        name = f"{port.parents[2].name} port {port.parent.name}"
        if state.endswith("ACTIVE"):
            yield Check("RDMA", "ok", f"{name} is active")
        else:
            mend = "connect it, or set NCCL_IB_HCA to the ports that are"
            yield Check("RDMA", "warning", f"{name} ({state}) must be active", mend)
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        yield Check(
            "network",
            "warning",
            f"the name of this machine ({host}) leads nowhere: {reason_of(error)}",
            "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface that ranks use",
        )


def _check_threads(variables: Mapping[str, str], cpus: int, limit: float | None) -> Check:
    """Check the threads of a rank on `cpus` CPUs, of which its container may use `limit` at once; None: all."""
    value = variables.get("OMP_NUM_THREADS")
    usable = cpus if limit is None else min(cpus, max(1, int(limit)))
    cpus_text = counted(cpus, "CPU")
    if limit is not None and limit < cpus:
        cpus_text += f", limited to {limit:g} by cgroup"
    fix = f"set OMP_NUM_THREADS to the CPUs of a rank, at most {usable}"
    if value is None:
        if usable < cpus:
            problem = f"{cpus_text}: each rank would start a thread on every CPU"
            return Check("threads", "warning", problem, fix)
        return Check("threads", "ok", f"{cpus_text}; the ranks share them, as OMP_NUM_THREADS is not set")
    threads = whole_number(value)
    if not threads:
        return Check("threads", "warning", f"OMP_NUM_THREADS ({value!r}) must be a whole number above 0", fix)
    if threads > usable:
        return Check("threads", "warning", f"OMP_NUM_THREADS ({value}) must be at most the CPUs ({usable})", fix)
    return Check("threads", "ok", f"{cpus_text}; OMP_NUM_THREADS {value}")


def _cpu_limit() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _check_memory(free: int | None) -> Check:
    if free is None:
        return Check("memory", "ok", "the system does not tell how much is free")
    if free < _LITTLE_MEMORY:
        mend = "end other processes, or choose a machine with more"
        return Check("memory", "warning", f"free memory ({size(free)}) must be at least {size(_LITTLE_MEMORY)}", mend)
    return Check("memory", "ok", f"{size(free)} free")


def _check_limits() -> Iterator[Check]:
    """Check open files, and on machines with accelerators the shared memory that NCCL uses."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A limit of -1 stands for none.
    if 0 <= most < _FEW_FILES:
        mend = f"raise it: ulimit -Hn {_FEW_FILES}, or LimitNOFILE of the service"
        yield Check(
            "open files", "warning", f"the limit ({most:,}) must be at least {_FEW_FILES:,} for many ranks", mend
        )
    else:
        yield Check("open files", "ok", "no limit" if most < 0 else f"up to {most:,}")
    shared = Path("/dev/shm")
    if accelerators()[1] and shared.is_dir() and free_bytes(shared) < _LITTLE_SHARED:
        problem = f"{shared} ({size(free_bytes(shared))} free) must have at least {size(_LITTLE_SHARED)} for NCCL"
        yield Check("shared memory", "wrong", problem, "start the container with --shm-size=1g or --ipc=host")


def _check_folder(name: str, folder: Path) -> Iterator[Check]:
    """Check a folder in which runs write: a file is written to the disk, locked and removed. Nothing stays there."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".shardwise-doctor-") as file:
            file.write(b"x" * 2**16)
            file.flush()
            # A disk that is full, or behind a network, may refuse the bytes only now.
            os.fsync(file.fileno())
            try:
                lock(file.fileno(), wait=False)
            except NoLocksError:
                problem = f"the disk of {folder} has no locks: a second run in one folder is not refused"
                yield Check(name, "warning", problem, "start one run in a folder, or choose another disk by --run-dir")
    except OSError as error:
        setting = "--run-dir" if name == "run folder" else "SHARDWISE_CACHE"
        mend = f"make it writable, or choose another by {setting}"
        yield Check(name, "wrong", f"{folder} cannot be written: {reason_of(error)}", mend)
        return
    free = free_bytes(existing)
    if free < _LITTLE_DISK:
        problem = f"free disk space under {folder} ({size(free)}) must be at least {size(_LITTLE_DISK)}"
        yield Check(name, "warning", problem, "make room: `shardwise checkpoint prune` removes old checkpoints")
    else:
        yield Check(name, "ok", f"{folder} can be written, {size(free)} free")


def _check_launcher(variables: Mapping[str, str]) -> Check:
    problem = unjoined(variables)
    place_in_job = joined(variables)
    if problem is not None:
        mend = "unset RANK and WORLD_SIZE, which a launcher sets for its ranks"
        return Check("launcher", "wrong", problem, mend)
    if place_in_job is not None:
        return Check("launcher", "ok", f"this is rank {place_in_job.rank} of {place_in_job.world}")
    try:
        task = task_of(variables)
    except ConfigError as error:
        return Check("launcher", "wrong", str(error), "start it as the message says, or unset these variables")
    if task is not None:
        return Check("launcher", "ok", "this is one of several tasks of srun or mpirun, which `shardwise train` joins")
    return Check("launcher", "ok", "none: `shardwise train` starts the local ranks itself")


_EXTRA = re.compile(r"""extra == ['"]([^'"]+)""")
_FOR_DEVELOPERS = "dev"
_TORCH = "install a torch for this machine's devices: https://pytorch.org/get-started/locally"


def check_software(
    requires: Callable[[str], list[str] | None] = metadata.requires, version: Callable[[str], str] = metadata.version
) -> Iterator[Check]:
    """Verify the versions of Python and of packages on this machine.

    Args:
        requires: returns the requirements of a distribution, as `importlib.metadata.requires` does.
        version: returns its version, as `importlib.metadata.version` does.
    """
    try:
        requirements = [Requirement(text) for text in requires("shardwise") or []]
    except metadata.PackageNotFoundError:
        problem = f"shardwise {__version__} is imported from a folder, and which versions it needs is not known"
        yield Check("packages", "warning", problem, "pip install shardwise, or pip install -e . in its source")
        return
    python = platform.python_version()
    supported = SpecifierSet(metadata.metadata("shardwise")["Requires-Python"])
    if python in supported:
        yield Check("python", "ok", f"{python}, of {supported}")
    else:
        yield Check("python", "wrong", f"{python} must be {supported}", "make an environment with a Python that is")
    well: dict[str, list[str]] = {"torch": [], "packages": []}
    missing: dict[str, list[str]] = {}
    for requirement in requirements:
        extras = _EXTRA.findall(str(requirement.marker))
        if _FOR_DEVELOPERS in extras or not (extras or requirement.marker is None or requirement.marker.evaluate()):
            continue
        try:
            present = version(requirement.name)
        except metadata.PackageNotFoundError:
            present = ""
        for name in [f"[{extra}]" for extra in extras] or ["torch" if requirement.name == "torch" else "packages"]:
            group = well.setdefault(name, [])
            if present and requirement.specifier.contains(present, prereleases=True):
                group.append(f"{requirement.name} {present}")
            elif present or not extras:
                found = f"{requirement.name} ({present or 'not installed'}) must be {requirement.specifier or 'there'}"
                mend = _TORCH if name == "torch" else f"pip install '{requirement.name}{requirement.specifier}'"
                yield Check(name, "warning" if extras else "wrong", found, mend)
            else:
                missing.setdefault(name, []).append(requirement.name)
    for name, group in well.items():
        # Another package may have brought a part of an extra.
        lacking = f"{listing(missing[name])} " if group and name in missing else ""
        optional = f"{lacking}not installed, which is optional: pip install 'shardwise{name}'"
        if name in missing or group:
            yield Check(name, "ok", optional if name in missing else ", ".join(group))
