"""Times of calls on a device, with its clocks beside them."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

import torch

from first_gpu.session import Figures, Session
from shardwise.base.user_code import RAISED
from shardwise.distributed import devices

ROUNDS = 5
_PERIOD = 0.02
"""Seconds between two readings of the clocks."""
_BEYOND_CACHES = 2**28
"""Bytes of inputs that no cache of a device holds."""
Call = Callable[[], object]


class Clocks:
    """Clock, power and temperature of a GPU while a block of code runs, read by a thread; nothing without NVML."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._readings: list[tuple[float, float, float]] = []
        self._ended = threading.Event()
        if device.type != "cuda":
            return
        try:
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
            find = nvml.nvmlDeviceGetHandleByIndex if visible.isdecimal() else nvml.nvmlDeviceGetHandleByUUID
            self._handle = find(int(visible) if visible.isdecimal() else visible)
            self._nvml = nvml
        except RAISED:
            pass  # no library or no driver: the figures stand without clocks

    def __enter__(self) -> Clocks:
        self._thread = threading.Thread(target=self._read, daemon=True)
        if self._nvml is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._nvml is not None:
            self._thread.join()

    def _read(self) -> None:
        nvml = self._nvml
        try:
            while True:
                clock = nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)
                watts = nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000
                celsius = nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU)
                self._readings.append((clock, watts, celsius))
                if self._ended.wait(_PERIOD):
                    return
        except RAISED:
            return

    def figures(self) -> Figures:
        if not self._readings:
            return {}
        clocks, watts, celsius = zip(*self._readings, strict=True)
        return {
            "sm_mhz": median(clocks),
            "sm_mhz_least": min(clocks),
            "watts": round(mean(watts)),
            "celsius": max(celsius),
        }


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
