"""Times of calls on a device, with its clocks beside them."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import torch

from first_gpu.session import Figures, Session
from shardwise.base.errors import RAISED
from shardwise.distributed import devices

ROUNDS = 5
_PERIOD = 0.03
"""Seconds between two readings of the clocks."""
_BEYOND_CACHES = 2**28
"""Bytes of inputs that no cache of a device holds."""
Call = Callable[[], object]


class Nvml:
    """Questions to the driver about a GPU; the answer is None without a GPU, a library or an answer."""

    def __init__(self, device: torch.device) -> None:
        self._library: Any = None
        if device.type != "cuda":
            return
        with suppress(*RAISED):
            library: Any = importlib.import_module("pynvml")
            library.nvmlInit()
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
            by_index = visible.isdecimal()
            find = library.nvmlDeviceGetHandleByIndex if by_index else library.nvmlDeviceGetHandleByUUID
            self._handle = find(int(visible) if by_index else visible)
            self._library = library

    def ask(self, name: str, *arguments: int) -> float | None:
        with suppress(*RAISED):
            return float(getattr(self._library, name)(self._handle, *arguments))
        return None

    def clock(self) -> float | None:
        return self.ask("nvmlDeviceGetClockInfo", 1)  # 1: of the multiprocessors, in MHz

    def watts(self) -> float | None:
        milliwatts = self.ask("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1000

    def celsius(self) -> float | None:
        return self.ask("nvmlDeviceGetTemperature", 0)  # 0: of the GPU


class Clocks:
    """Clock, power and temperature of a GPU while a block of code runs, read by a thread."""

    def __init__(self, device: torch.device) -> None:
        self._nvml = Nvml(device)
        self._readings: list[tuple[float | None, ...]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Clocks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._ended.is_set():
            self._readings.append((self._nvml.clock(), self._nvml.watts(), self._nvml.celsius()))
            self._ended.wait(_PERIOD)

    def figures(self) -> Figures:
        figures: Figures = {}
        for name, readings in zip(("sm_mhz", "watts", "celsius"), zip(*self._readings, strict=True), strict=True):
            known = [reading for reading in readings if reading is not None]
            if known:
                figures |= {name: round(median(known)), f"{name}_least": min(known), f"{name}_most": max(known)}
        return figures


def timed(session: Session, calls: Sequence[Call], *, seconds: float | None = None) -> Figures:
    """The median time of a call in milliseconds, its spread over rounds, and the clocks.

    The calls take turns. Each has inputs of its own (`copies`), so that no cache keeps them.
    """
    seconds = session.sizes.seconds if seconds is None else seconds
    for call in calls:
        call()
    once = _elapsed(session, calls, 1) / len(calls)
    passes = max(1, round(seconds / ROUNDS / max(once, 1e-6) / len(calls)))
    with Clocks(session.device) as clocks:
        times = [_elapsed(session, calls, passes) / passes / len(calls) for _ in range(ROUNDS)]
    middle = median(times)
    return {"ms": 1000 * middle, "spread": (max(times) - min(times)) / middle, **clocks.figures()}


def _elapsed(session: Session, calls: Sequence[Call], passes: int) -> float:
    devices.synchronize(session.device)
    start = time.perf_counter()
    for _ in range(passes):
        for call in calls:
            call()
    devices.synchronize(session.device)
    return time.perf_counter() - start


def host_ms(session: Session, call: Call) -> float:
    """The median time in milliseconds in which the host starts a call's work on an idle device."""
    times = []
    for _ in range(ROUNDS):
        devices.synchronize(session.device)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    devices.synchronize(session.device)
    return 1000 * median(times)


def copies(nbytes: int) -> int:
    """The number of copies of inputs of so many bytes that together no cache of a device holds."""
    return min(8, max(1, -(-_BEYOND_CACHES // nbytes)))


def tflops(flops: float, ms: float) -> float:
    return flops / ms / 1e9
