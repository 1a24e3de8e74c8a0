"""Time and memory of a process, as every section measures them."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

__all__ = ["PeakMemory", "interleaved", "median", "slowest"]


class PeakMemory:
    """Peak resident bytes above where the process stands now (Linux).

    What was freed but is still held by the allocator is given back first, so that it is part of neither number.
    """

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
        self._start = _status("VmRSS")

    def above(self) -> int:
        return _status("VmHWM") - self._start


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 1,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each call in each round, the calls taking turns; `before` runs ahead of each, untimed."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(warmup + rounds):
        for name, call in calls.items():
            before()
            start = time.perf_counter()
            call()
            taken = time.perf_counter() - start
            if number >= warmup:
                seconds[name].append(taken)
    return seconds


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """By name, the median over rounds of the slowest rank's seconds."""
    return {name: median([max(times) for times in zip(*(r[name] for r in ranks), strict=True)]) for name in ranks[0]}
