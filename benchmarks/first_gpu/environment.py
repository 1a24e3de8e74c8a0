"""Which device and which libraries are these, and how fast are a copy and a large matrix product on it?"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable

import torch
from report import environment

from first_gpu.session import Figures, Session
from first_gpu.timing import Nvml, tflops, timed
from shardwise.distributed import devices

TITLE = "The device"
NOTE = "A copy reads and writes each byte once; both are counted."
COLUMNS = "what ms gb_per_second tflops"


def run(session: Session) -> None:
    session.measure({"what": "versions"}, lambda: _versions(session))
    session.measure({"what": "machine"}, lambda: {"machine": environment()})
    session.measure({"what": "copy"}, lambda: _copy(session))
    for dtype in (torch.bfloat16, torch.float32):
        size = session.sizes.square
        labels = {"what": f"{size}³ in {str(dtype).removeprefix('torch.')}"}
        session.measure(labels, lambda dtype=dtype, size=size: _square(session, size, dtype))


def _versions(session: Session) -> Figures:
    found: Figures = {
        "device": devices.name(session.device),
        "memory": devices.total_memory(session.device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    nvml = Nvml(session.device)
    found["most_sm_mhz"] = nvml.ask("nvmlDeviceGetMaxClockInfo", 1)
    found["power_limit_milliwatts"] = nvml.ask("nvmlDeviceGetEnforcedPowerLimit")
    return found | {name: _asked(ask) for name, ask in _QUESTIONS.items()}


def _copy(session: Session) -> Figures:
    size = session.sizes.copied // 4
    source = session.random(size, dtype=torch.float32)
    target = torch.empty_like(source)
    found = timed(session, [lambda: target.copy_(source)], seconds=4 * session.sizes.seconds)
    return found | {"gb_per_second": 2 * source.nbytes / found["ms"] / 1e6}


def _square(session: Session, size: int, dtype: torch.dtype) -> Figures:
    pairs = [(session.random(size, size, dtype=dtype), session.random(size, size, dtype=dtype)) for _ in range(2)]
    out = torch.empty_like(pairs[0][0])
    calls = [lambda a=a, b=b: torch.mm(a, b, out=out) for a, b in pairs]
    found = timed(session, calls, seconds=12 * session.sizes.seconds)
    return found | {"tflops": tflops(2 * size**3, found["ms"])}


def _driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    version = pynvml.nvmlSystemGetDriverVersion()
    return version.decode() if isinstance(version, bytes) else str(version)


_QUESTIONS: dict[str, Callable[[], object]] = {
    "cudnn": torch.backends.cudnn.version,
    "driver": _driver,
    "capability": lambda: ".".join(map(str, torch.cuda.get_device_capability())),
    "processors": lambda: torch.cuda.get_device_properties(0).multi_processor_count,
    "allocator": lambda: os.environ.get("PYTORCH_ALLOC_CONF"),
    "float32_precision": torch.get_float32_matmul_precision,
}


def _asked(ask: Callable[[], object]) -> object:
    """The answer; None where there is none."""
    try:
        return ask()
    except Exception:  # noqa: BLE001  another vendor, or no driver
        return None
