"""The measurements of a calibration, and the device file that follows from them.

Some figures are read off; constants explain the steps.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from shardwise.config import Config, check_layout, load_config
from shardwise.config.pipeline_schedule_specs import DEFAULT_SCHEDULE
from shardwise_plan import device_seconds
from shardwise_plan.device_seconds import DeviceConstants, device_constants
from shardwise_plan.device_specs import (
    CONSTANTS,
    Cluster,
    Device,
    device_yaml,
    load_device,
    parse_device,
    sourced_figure,
)
from shardwise_plan.step_time import step_time

_FITTED = (
    "matmul", "depth", "memory", "fused_attention", "host", "step", "wait", "node", "update", "overlap", "action",
)  # fmt: skip
_FACTORS = (0.5, 0.2, 0.1, 0.03)  # relative changes of a constant that the search tries, from coarse to fine
_PULL = 1e-3
"""Weight of a constant's distance from its start, in squared error: a constant that no step depends on stays there."""
_START = {
    "matmul": 1.0, "depth": 30.0, "memory": 1.0, "step": 2e-3, "wait": 1e-4, "node": 1.0, "update": 1.0, "action": 1e-4,
}  # fmt: skip
"""Starts of constants for which the constants of a similar device are no guide."""
_STEPS_WEIGHT = 3
"""Weight of each miniature beside that of all matrix products together: the planner is asked for steps."""
_LEAST_LATENCY = 1e-7
_MEASURED = "measured"


def measured_device_file(measurements: Measurements, today: datetime.date) -> str:
    """Return the device file that a calibration of this machine gives, with the source of each figure."""
    software = f"torch {measurements.torch}, {measurements.threads} thread(s), {measurements.ranks} rank(s)"
    source = f"{_MEASURED} {today.isoformat()}: {software}"
    values = _values(measurements, source)
    device = parse_device("measured", device_yaml(values), "the measured device")
    constants = _fitted_constants(measurements, device)
    mean_error = _mean(abs, measurements, device, constants)
    fit = f"fitted to {len(measurements.steps)} miniature trainings, mean error {mean_error:.0%}"
    fitted = {f"constants.{name}": sourced_figure(getattr(constants, name), f"{source}; {fit}") for name in _FITTED}
    return device_yaml(values | fitted)


def _figures(measurements: Measurements) -> dict[str, float]:
    """The figures that were measured; those of the link from all-reduces, where there are several ranks.

    A ring over n ranks sends 2·(n-1)/n of the bytes in 2·(n-1) steps. The smallest all-reduce takes hardly more than
    the latencies, and the difference between the largest and the smallest is the time of the bytes.
    """
    figures = {
        "memory_gb": measurements.memory / 1e9,
        "memory_gb_per_second": measurements.copied[0] / measurements.copied[1] / 1e9,
    }
    for dtype, times in measurements.products.items():
        # A product [m, k] × [k, n] takes m·n·k multiplications and as many additions.
        rates = [2 * math.prod(shape) / seconds for shape, seconds in zip(measurements.shapes, times, strict=True)]
        figures[f"{dtype}_tflops"] = max(rates) / 1e12
    if measurements.sums:
        n = measurements.ranks
        _, least = measurements.sums[0]
        size, most = measurements.sums[-1]
        figures["node_link.gb_per_second"] = 2 * size * (n - 1) / n / max(most - least, 1e-9) / 1e9
        figures["node_link.latency_us"] = max(_LEAST_LATENCY, least / (2 * (n - 1))) * 1e6
    return figures


def _values(measurements: Measurements, source: str) -> dict[str, Any]:
    is_cpu = measurements.type == "cpu"
    alone = "assumption: not measured, as there was one rank"
    link = {"node_link.gb_per_second": sourced_figure(1.0, alone), "node_link.latency_us": sourced_figure(100.0, alone)}
    measured = {name: sourced_figure(value, source) for name, value in _figures(measurements).items()}
    values: dict[str, Any] = {
        "name": "A rank of this machine's CPU" if is_cpu else measurements.device,
        "type": "cpu" if is_cpu else "accelerator",
        "matmul_share": sourced_figure(1.0, "the rates are already those of matrix products"),
        "processors": {"value": measurements.processors, "source": f"torch {measurements.torch}"},
        "devices_per_node": {"value": measurements.ranks, "source": "the ranks that measured"},
        **link,
        **measured,
        "node_link.topology": "switch",
        "network.topology": "rail",
    }
    assumed = "assumption: as within the machine; not measured, as there was one"
    for name in ("gb_per_second", "latency_us"):
        values[f"network.{name}"] = sourced_figure(values[f"node_link.{name}"]["value"], assumed)
    return values


def _fitted_constants(measurements: Measurements, device: Device) -> DeviceConstants:
    similar_device = load_device("cpu" if measurements.type == "cpu" else "h100")
    start = replace(device_constants(similar_device), **_START, host=measurements.launch)

    def badness(tried: DeviceConstants) -> float:
        # Squares: by sizes, a search of one constant at a time would stop early.
        return _mean(lambda log: log * log, measurements, device, tried) + _PULL * _distance(tried, start)

    return _coordinate_search(start, badness)


def _coordinate_search(start: DeviceConstants, badness: Callable[[DeviceConstants], float]) -> DeviceConstants:
    """Return the constants that a coordinate search finds: each in turn is multiplied and divided by a factor."""
    best = start
    least = badness(start)
    for step in _FACTORS:
        improves = True
        while improves:
            improves = False
            for name in _FITTED:
                for factor in (1 + step, 1 / (1 + step)):
                    # A value outside of its range would be refused when the device file is read.
                    low, high = CONSTANTS[name]
                    value = min(max(float(f"{getattr(best, name) * factor:.4g}"), low), high)
                    tried = replace(best, **{name: value})
                    tried_badness = badness(tried)
                    # Smaller gains are not worth further rounds.
                    if tried_badness < least * (1 - 1e-3):
                        best = tried
                        least = tried_badness
                        improves = True
    return best


def _mean(size: Callable[[float], float], measurements: Measurements, device: Device, c: DeviceConstants) -> float:
    """Return the mean size of log(predicted / measured) of miniatures, which count more, and of matrix products."""
    cluster = Cluster(device, 1, measurements.ranks)
    logs = []
    for config, measured in zip(calibration_trainings(measurements.ranks), measurements.steps, strict=True):
        time = step_time(config, check_layout(config, measurements.ranks), cluster, constants=c)
        assert time is not None
        logs.append((float(_STEPS_WEIGHT), math.log(time.total / measured)))
    for (m, n, k), measured in zip(measurements.shapes, measurements.products["float32"], strict=True):
        seconds = device_seconds.matmul(device, c, device.float32, m, n, k)
        logs.append((1 / len(measurements.shapes), math.log((seconds + measurements.launch) / measured)))
    return sum(weight * size(log) for weight, log in logs) / sum(weight for weight, _ in logs)


def _distance(constants: DeviceConstants, start: DeviceConstants) -> float:
    pairs = [(getattr(constants, name), getattr(start, name)) for name in _FITTED]
    # A constant of 0 has no logarithm, and stays at 0 under factors.
    return sum(abs(math.log(value / first)) for value, first in pairs if value > 0 and first > 0) / len(_FITTED)


def measured_rows(measurements: Measurements) -> Sequence[tuple[str, str]]:
    """Return the figures that a calibration measured in short lines."""
    figures = _figures(measurements)
    lines = [
        ("matrix products, float32", f"{figures['float32_tflops']:.3g} TFLOP/s"),
        ("matrix products, bfloat16", f"{figures['bfloat16_tflops']:.3g} TFLOP/s"),
        ("memory, copied", f"{figures['memory_gb_per_second']:.3g} GB/s"),
        ("start of a kernel", f"{measurements.launch * 1e6:.3g} µs"),
    ]
    if measurements.sums:
        rate, latency = (figures[f"node_link.{name}"] for name in ("gb_per_second", "latency_us"))
        lines.append((f"link between {measurements.ranks} ranks", f"{rate:.3g} GB/s, {latency:.3g} µs"))
    return lines


PRODUCTS = ((64, 64, 64), (128, 256, 64), (128, 64, 256), (512, 256, 256), (512, 512, 512), (1024, 1024, 1024))
"""Matrix products [m, k] × [k, n] as (m, n, k): from those of a miniature to those that reach the largest rate."""
LARGE_PRODUCTS = ((4096, 4096, 1024), (4096, 4096, 4096), (8192, 8192, 8192))
"""Further products on an accelerator, whose largest rate smaller ones do not reach."""
_GPT = ("model.hidden_size=96", "model.intermediate_size=384", "train.sequence_length=32")
_LLAMA = ("model.hidden_size=96", "model.intermediate_size=256", "train.sequence_length=32")
_FIXED = ("optimizer.zero=1", "train.global_batch=16", "train.eval_every=0", "train.steps=100000")
_ONE_RANK = ("parallel.tensor=1", "parallel.pipeline=1", "parallel.sequence=false")
_WIDE = ("model.hidden_size=256", "model.intermediate_size=704")
_SCHEDULE = f"parallel.schedule={DEFAULT_SCHEDULE}"


@cache
def calibration_trainings(world: int) -> tuple[Config, ...]:
    """Return the miniature trainings that a calibration times on `world` ranks: shipped recipes with other sizes.

    They have two families, two depths and widths, and a cut along each axis.
    """
    two, four, six = (f"model.num_hidden_layers={layers}" for layers in (2, 4, 6))
    of_two, of_four = (f"train.micro_batch={samples}" for samples in (2, 4))
    miniatures = [
        ("llama2-tiny", *_ONE_RANK, *_LLAMA, two, of_four),
        ("llama2-tiny", *_ONE_RANK, *_LLAMA, six, of_two),
        ("llama2-tiny", *_ONE_RANK, *_WIDE, four, of_four, "train.sequence_length=64", "train.recompute=full"),
        ("gpt3-tiny", *_ONE_RANK, *_GPT, six, of_four, "optimizer.zero=0"),
    ]
    if world % 2 == 0:
        tensor = ("parallel.tensor=2", "parallel.pipeline=1")
        pipeline = ("parallel.tensor=1", "parallel.pipeline=2", "parallel.sequence=false", _SCHEDULE)
        miniatures += [
            ("llama2-tiny", *_LLAMA, *tensor, six, of_four),
            ("gpt3-tiny", *_GPT, *tensor, "parallel.sequence=true", four),
            ("llama2-tiny", *_LLAMA, *pipeline, six, of_two),
            ("gpt3-tiny", *_GPT, *pipeline, four, of_four),
        ]
    return tuple(load_config(recipe, [*_FIXED, *keys]) for recipe, *keys in miniatures)


def undisturbed_seconds(seconds: Sequence[float]) -> float:
    """Return the first decile of the durations of a measurement: other work on a machine can only make them longer."""
    return sorted(seconds)[(len(seconds) - 1) // 10]


@dataclass(frozen=True)
class Measurements:
    """Figures of a calibration that the ranks measured together, in seconds and bytes."""

    device: str
    type: str  # torch's name of its kind
    torch: str
    threads: int  # threads of torch on each rank
    ranks: int
    memory: float  # bytes of one device
    processors: int  # units of a device that each take a tile of a matrix product
    shapes: Sequence[Sequence[int]]  # (m, n, k) of the matrix products
    products: Mapping[str, Sequence[float]]  # seconds of each of `shapes`, by dtype
    copied: Sequence[float]  # bytes that a copy reads and writes, and its seconds
    launch: float  # seconds from the start of a kernel to that of the next
    sums: Sequence[Sequence[float]]  # (bytes, seconds) of all-reduces over all ranks; none on one rank
    steps: Sequence[float]  # seconds of a step of each of `calibration_trainings`
