"""Finds out about this machine without torch: accelerators, memory, usable CPUs."""

import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from shardwise.base.errors import ConfigError


def accelerators(dev: Path = Path("/dev"), sys_root: Path = Path("/sys")) -> tuple[str, int]:
    """The kind and number of the accelerators that this process may use; ("cpu", 0) without any.

    The kinds are "nvidia", "neuron", and torch's own names of all others, such as "xpu".

    The first two are counted by their device files, without those that `CUDA_VISIBLE_DEVICES`,
    `NEURON_RT_VISIBLE_CORES` or `NEURON_RT_NUM_CORES` hide. A torch that was built for CPUs only ("+cpu" in its
    version) can use neither. Torch itself is asked, which takes the time of its import, where such files do not tell: a
    package adds a device to torch, or the system has graphics of AMD or Intel, or is macOS or WSL2.
    """
    gpus = _numbered(dev, "nvidia")
    chips = _numbered(dev, "neuron")
    hints = sys.platform == "darwin" or any((dev / name).exists() for name in ("kfd", "dri", "dxg"))
    build = torch_version().partition("+")[2] if gpus or chips or hints else ""
    if hints and sys.platform != "darwin" and not (dev / "dxg").exists():
        # Any computer with a screen has dev/dri, so the build of torch decides.
        hints = build.startswith(("rocm", "xpu"))
    if gpus and build != "cpu" and (count := _visible_gpus(len(gpus))):
        return "nvidia", count
    if ((hints and build != "cpu") or has_plugin()) and (counted := _counted_by_torch())[1]:
        return counted
    if chips and build != "cpu":
        return "neuron", _neuron_cores(chips, sys_root)
    return "cpu", 0


def torch_type(kind: str) -> str:
    """The name that torch has for a kind of accelerator hardware."""
    return "cuda" if kind == "nvidia" else kind


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes of memory that this process may still allocate; None where the system does not report it.

    That is what the machine has available, or less where a control group limits the process, as a container or a job
    of SLURM does. Pages of files count as available: the system drops them when memory is needed.
    """
    free = [1024 * kilobytes for kilobytes in _numbers(proc / "meminfo", "MemAvailable:").values()]
    for group, limit, usage, pages in _memory_groups(proc / "self/cgroup", cgroups):
        most, used = (_number(group / name) for name in (limit, usage))
        if most is not None and used is not None:
            files = sum(_numbers(group / "memory.stat", *pages).values())
            free.append(max(0, most - used + files))
    return min(free, default=None)


def _memory_groups(membership: Path, cgroups: Path) -> Iterator[tuple[Path, str, str, tuple[str, ...]]]:
    """Yield the control groups of memory that this process is in, with the names of their files.

    The names are those of the limit, of the usage, and of the numbers of `memory.stat` that count pages of files.
    A group's ancestors limit it too. In a container, the group that it sees as the root is at the top of the mount.
    """
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        number, _, entry = line.partition(":")
        controllers, _, path = entry.partition(":")
        # Version 2 of control groups.
        if number == "0" and not controllers:
            top = cgroups
            names = ("memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            # Version 1 of control groups.
            top = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
        else:
            continue
        inner = top / path.lstrip("/")
        for group in (inner, *inner.parents):
            yield group, *names
            if group == top:
                break


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _numbers(path: Path, *names: str) -> dict[str, int]:
    """Return the numbers behind these names, each at the beginning of a line; those that are missing are left out."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii", errors="replace").splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[0] in names and words[1].isdecimal()}


def cpu_count() -> int:
    """CPUs that this process may run on: its affinity mask, not the machine's total."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def bfloat16_unit(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The unit of this x86 processor for bfloat16: `AMX`, `AVX512-BF16`, or "" for none; None where it is not known.

    On one with either, mixed precision trains faster than float32; on others bfloat16 is emulated, and slower
    (docs/precision.md has figures).
    """
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), None)
    if flags is None:
        return None
    if "amx_bf16" in flags:
        return "AMX"
    return "AVX512-BF16" if "avx512_bf16" in flags else ""


def torch_version() -> str:
    """The version of the installed torch; "" if there is none.

    What follows "+" is its platform, if it has one: "cpu", "cu130", "rocm6.4", "xpu".
    """
    # Costly to import, for a machine without accelerators.
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def has_plugin() -> bool:
    """True if this machine has a package installed that adds a device to torch, which loads it by itself.

    The files are read here since `importlib.metadata` takes a fifth of a dry run's start-up for them.
    """
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    files = (file for folder in sys.path for file in Path(folder).glob("*-info/entry_points.txt"))
    return any(b"[torch.backends]" in file.read_bytes() for file in files)


_COUNT = """
import torch
device = torch.accelerator.current_accelerator(check_available=True)
print(*("cpu", 0) if device is None else (device.type, torch.accelerator.device_count()))
"""


@cache
def _counted_by_torch() -> tuple[str, int]:
    """The kind and number of devices, which torch finds in a process of its own.

    This process must neither import torch nor open a device before its ranks start.
    """
    # A start on a machine without other devices does without it.
    import subprocess

    answer = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False)
    kind, _, count = answer.stdout.strip().rpartition("\n")[2].rpartition(" ")
    return (kind, int(count)) if answer.returncode == 0 and kind and count.isdecimal() else ("cpu", 0)


def _numbered(dev: Path, prefix: str) -> list[int]:
    """The numbers N of the device files `prefix`N, sorted; control files such as nvidiactl do not count."""
    matches = (re.fullmatch(rf"{prefix}(\d+)", path.name) for path in dev.glob(f"{prefix}*"))
    return sorted(int(match[1]) for match in matches if match)


def _visible_gpus(present: int) -> int:
    """The number of GPUs that `CUDA_VISIBLE_DEVICES` shows. As in CUDA, the list ends at its first invalid entry."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    count = 0
    for entry in (part.strip() for part in visible.split(",")):
        names_a_device = int(entry) < present if entry.isdecimal() else entry.startswith(("GPU-", "MIG-"))
        if not names_a_device:
            break
        count += 1
    return count


def _neuron_cores(chips: list[int], sys_root: Path) -> int:
    """The number of logical NeuronCores, each of which is one rank.

    The driver lists a chip's physical cores under /sys; Trainium2 joins two into a logical core unless
    `NEURON_LOGICAL_NC_CONFIG` says otherwise. Drivers that do not list them are older than Trainium2, and a Trainium1
    chip has 2 cores.
    """
    if cores := visible_neuron_cores():
        return len(cores)
    if number := _setting("NEURON_RT_NUM_CORES", r"[1-9]\d*", "a number of cores"):
        return int(number)
    physical = 0
    for chip in chips:
        listed = sys_root / f"devices/virtual/neuron_device/neuron{chip}/core_count"
        physical += int(listed.read_text()) if listed.is_file() else 2
    cores_per_chip = physical // len(chips)
    default = "2" if cores_per_chip == 8 else "1"
    joined = _setting("NEURON_LOGICAL_NC_CONFIG", "[12]", "1, or 2 to join two cores")
    return physical // int(joined or default)


def visible_neuron_cores() -> list[int]:
    """The numbers that `NEURON_RT_VISIBLE_CORES` names, such as "0-3,8"; ConfigError if it is no such list."""
    listed = _setting("NEURON_RT_VISIBLE_CORES", r"\d+(-\d+)?(,\d+(-\d+)?)*", "a list of cores, such as 0-3,8")
    spans = [part.split("-") for part in listed.split(",") if part]
    return [core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)]


def _setting(name: str, pattern: str, meaning: str) -> str:
    """The value of an environment variable; empty if it is not set. Raises ConfigError: it does not fit the pattern."""
    value = os.environ.get(name, "")
    if value and not re.fullmatch(pattern, value):
        raise ConfigError(f"{name} ({value}) must be {meaning}: change it, or unset it")
    return value
