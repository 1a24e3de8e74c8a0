"""The one place that knows which accelerator there is. Everything else is written against the device it returns."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.errors import ConfigError


def local_device() -> torch.device:
    """This process's device: the accelerator at `LOCAL_RANK`, or the CPU where the machine has none.

    A rank that sees one accelerator takes that: a launcher may show each rank its own.

    Raises:
        ConfigError: several accelerators are here, and `LOCAL_RANK` is missing in a job, or is that of none of them.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    count, place = torch.accelerator.device_count(), os.environ.get("LOCAL_RANK")
    if place is None and count > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"LOCAL_RANK must be set by the launcher, as this machine has several accelerators ({count}): "
            "without it all of its ranks would use the first"
        )
    index = int(place or "0")
    if index >= count > 1:
        raise ConfigError(
            f"LOCAL_RANK ({index}) must be below the number of accelerators ({count}): "
            "two ranks cannot share one; start fewer ranks on this machine"
        )
    index %= count
    torch.accelerator.set_device_index(index)
    return torch.device(torch.accelerator.current_accelerator(check_available=True).type, index)  # type: ignore[union-attr]


def backend(device: torch.device) -> str:
    """The process-group backend of a device: gloo for the CPU, NCCL for CUDA, the accelerator's own elsewhere."""
    return dist.get_default_backend_for_device(device)


def name(device: torch.device) -> str:
    """The device's product name, as its driver gives it; `cpu` for the CPU."""
    if device.type == "cpu":
        return "cpu"
    properties = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(properties(device)) if properties is not None else device.type


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all queued work; a CPU has no queue."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Peak bytes held since the process began: allocated on an accelerator, resident on the CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "Storage size calculation overflowed",  # of a tensor that no memory could hold
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on whichever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _OUT_OF_MEMORY)


def has_fused_adamw(device: torch.device) -> bool:
    """Whether AdamW has a fused kernel there (`torch.optim.AdamW(fused=True)`)."""
    return device.type in ("cpu", "cuda")


@functools.cache
def cpu_prefers_onednn() -> bool:
    """Whether float32 matmuls run faster by oneDNN than by MKL: on x86 processors that are not Intel's."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    vendor = next((line for line in lines if line.startswith("vendor_id")), None)
    return vendor is not None and not vendor.endswith("GenuineIntel")


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, the device's generator starts from `seed`; afterwards it is in its former state."""
    if device.type == "cpu":
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)
        return
    module = torch.get_device_module(device)
    before = module.get_rng_state(device)
    module.manual_seed(seed)
    try:
        yield
    finally:
        module.set_rng_state(before, device)
