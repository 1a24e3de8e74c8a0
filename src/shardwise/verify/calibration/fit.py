"""From what was measured to a device file: figures that are read off, and constants that explain the steps."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.planner import device_seconds
from shardwise.planner.device_seconds import Constants, constants_of
from shardwise.planner.device_specs import CONSTANTS, Cluster, Device, dump, figure, load_device, parse_device
from shardwise.planner.step_time import step_time
from shardwise.verify.calibration.probes import Found, probes

_FITTED = (
    "matmul", "depth", "memory", "fused_attention", "host", "step", "wait", "node", "update", "overlap", "action",
)  # fmt: skip
_STEPS = (0.5, 0.2, 0.1, 0.03)
_PULL = 1e-3  # of a constant's distance from where it starts, in squared error: what no step tells stays there
_START = {
    "matmul": 1.0,
    "depth": 30.0,
    "memory": 1.0,
    "step": 2e-3,
    "wait": 1e-4,
    "node": 1.0,
    "update": 1.0,
    "action": 1e-4,
}
_STEPS_WEIGHT = 3  # of the miniatures beside the matrix products
_LATENCY = 1e-7
_MEASURED = "measured"


def device_file(found: Found, today: datetime.date) -> str:
    """The YAML text of this machine's device, with the source of each figure."""
    source = f"{_MEASURED} {today.isoformat()}: torch {found.torch}, {found.threads} thread(s), {found.ranks} rank(s)"
    figures = _figures(found)
    values = _values(figures, source, found)
    device = parse_device("measured", dump(values), "the measured device")
    constants = fitted_constants(found, device)
    off = error(found, device, constants)
    steps = "; ".join((source, f"fitted to {len(found.steps)} miniature trainings, mean error {off:.0%}", *found.fewer))
    values["constants"] = {one: figure(getattr(constants, one), steps) for one in _FITTED}
    return dump(values)


def _figures(found: Found) -> dict[str, float]:
    rates_ = {dtype: max(2 * math.prod(shape) / seconds for shape, seconds in zip(found.shapes, times, strict=True))
              for dtype, times in found.products.items()}  # fmt: skip
    return {
        "memory_gb": found.memory / 1e9,
        "memory_gb_per_second": found.copied[0] / found.copied[1] / 1e9,
        "bfloat16_tflops": rates_["bfloat16"] / 1e12,
        "float32_tflops": rates_["float32"] / 1e12,
        "matmul_share": 1.0,
    }


def _link(found: Found) -> tuple[float, float] | None:
    """Bandwidth in GB/s and latency in µs of a ring's step, from all-reduces; None on one rank.

    A ring sends 2·(n-1)/n of the bytes in 2·(n-1) steps.
    """
    if not found.sums:
        return None
    n = found.ranks
    (_, least), (size, most) = found.sums[0], found.sums[-1]
    latency = max(_LATENCY, least / (2 * (n - 1)))
    bandwidth = 2 * size * (n - 1) / n / max(most - least, 1e-9)
    return bandwidth / 1e9, latency * 1e6


def _values(figures: Mapping[str, float], source: str, found: Found) -> dict[str, Any]:
    link, alone = _link(found), "assumption: not measured, as there was one rank"
    bandwidth, latency = link or (1.0, 100.0)
    of_link = f"{source}; all-reduces of {len(found.sums)} sizes" if link else alone
    between = "assumption: as within the machine; not measured, as there was one"
    return {
        "name": found.device if found.type != "cpu" else "A rank of this machine's CPU",
        "type": "cpu" if found.type == "cpu" else "accelerator",
        **{one: figure(value, source) for one, value in figures.items() if one != "matmul_share"},
        "matmul_share": figure(1.0, "the rates above are already those of matrix products"),
        "processors": {"value": found.processors, "source": f"torch {found.torch}"},
        "devices_per_node": {"value": found.ranks, "source": "the ranks that measured"},
        "node_link": {
            "gb_per_second": figure(bandwidth, of_link), "latency_us": figure(latency, of_link), "topology": "switch",
        },
        "network": {
            "gb_per_second": figure(bandwidth, between), "latency_us": figure(latency, between), "topology": "rail",
        },
    }  # fmt: skip


def fitted_constants(found: Found, device: Device) -> Constants:
    """Those that predict the steps and matrix products best, from a start that single operations give."""
    start = replace(constants_of(load_device("cpu" if found.type == "cpu" else "h100")), **_START, host=found.launch)
    return searched(start, lambda c: _mean_square(found, device, c) + _PULL * _distance(c, start))


def searched(start: Constants, badness: Callable[[Constants], float]) -> Constants:
    """The constants that a coordinate search finds: each in turn is multiplied and divided by a factor."""
    best, least = start, badness(start)
    for step in _STEPS:
        improves = True
        while improves:
            improves = False
            for name in _FITTED:
                for factor in (1 + step, 1 / (1 + step)):
                    low, high = CONSTANTS[name]
                    value = min(max(float(f"{getattr(best, name) * factor:.4g}"), low), high)
                    tried = replace(best, **{name: value})
                    bad = badness(tried)
                    if bad < least * (1 - 1e-3):
                        best, least, improves = tried, bad, True
    return best


def error(found: Found, device: Device, constants: Constants) -> float:
    """The mean of |log(predicted / measured)| of the miniatures, which count more, and of the matrix products."""
    logs = _logs(found, device, constants)
    return sum(weight * abs(log) for weight, log in logs) / sum(weight for weight, _ in logs)


def _mean_square(found: Found, device: Device, constants: Constants) -> float:
    """As `error`, of squares: a search one constant at a time stops early where sizes are added up."""
    logs = _logs(found, device, constants)
    return sum(weight * log * log for weight, log in logs) / sum(weight for weight, _ in logs)


def _logs(found: Found, device: Device, constants: Constants) -> list[tuple[float, float]]:
    """(weight, log(predicted / measured)) of all that was measured."""
    on, logs = Cluster(device, 1, found.ranks), []
    for probe, measured in zip(probes(found.ranks), found.steps, strict=True):
        time = step_time(probe.config(), probe.layout(found.ranks), on, constants=constants)
        assert time is not None
        logs.append((float(_STEPS_WEIGHT), math.log(time.total / measured)))
    for (m, n, k), measured in zip(found.shapes, found.products["float32"], strict=True):
        seconds = device_seconds.matmul(device, constants, device.float32, m, n, k)
        logs.append((1 / len(found.shapes), math.log((seconds + found.launch) / measured)))
    return logs


def _distance(constants: Constants, start: Constants) -> float:
    ratios = [(getattr(constants, one), getattr(start, one)) for one in _FITTED]
    return sum(abs(math.log(a / b)) for a, b in ratios if a > 0 and b > 0) / len(_FITTED)


def rows(found: Found) -> Sequence[tuple[str, str]]:
    """What was measured, in short lines."""
    figures, link = _figures(found), _link(found)
    lines = [
        ("matrix products, float32", f"{figures['float32_tflops']:.3g} TFLOP/s"),
        ("matrix products, bfloat16", f"{figures['bfloat16_tflops']:.3g} TFLOP/s"),
        ("memory, copied", f"{figures['memory_gb_per_second']:.3g} GB/s"),
        ("start of a kernel", f"{found.launch * 1e6:.3g} µs"),
    ]
    if link is not None:
        lines.append((f"link between {found.ranks} ranks", f"{link[0]:.3g} GB/s, {link[1]:.3g} µs"))
    return [*lines, *(("time was short", one) for one in found.fewer)]
