"""Seconds of single operations on a device: matrix products, passes over memory, collectives and messages.

`DeviceConstants` holds what no data sheet tells. `scripts/fit_planner.py` fits them and writes `constants.json`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from shardwise_plan.device_specs import Device

CONSTANTS = Path(__file__).parent / "constants.json"
# Rows and columns of the tiles that kernels compute, and the part of the largest rate that each reaches.
_TILES = ((256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.55))
# Elements that one processor writes in a second in kernels that compute each address from a tensor's strides. In a step
# of eager blocks on one H200, with 132 processors, such kernels (silu, its gradient, products and addcmul) wrote
# 10.1·10⁹ elements in 32.9 ms: benchmarks/results/first_gpu.md.
_STRIDED_RATE = 2.3e9
# Processors that NCCL's kernels take, one for each channel, as NCCL prints them: on a node with 8 A100
# (NVIDIA/nccl-tests#100), and between nodes with 8 H100 (NVIDIA/nccl#1453).
_CHANNELS_INSIDE = 24
_CHANNELS_BETWEEN = 16
_TREE = 0.85  # bandwidth of NCCL's tree as a part of its ring's; an assumption


@dataclass(frozen=True)
class DeviceConstants:
    """Fitted constants of the formulas that predict seconds on a device."""

    matmul: float  # the part of the best published rate of matrix products that those of a training reach
    # The length of the inner dimension at which a tile is as long in its beginning and end as in its middle.
    depth: float
    memory: float  # the part of the memory's bandwidth that passes over activations reach
    fused_attention: float  # the part of the peak that fused attention reaches in its forward pass
    host: float  # seconds that the host takes to start a kernel
    step: float  # seconds that the host takes beside kernels in a step
    start: float  # seconds before a collective moves its first byte
    # Seconds that a program loses at each message if it waits for it, as its host cannot run ahead; a rank on a CPU
    # loses them at each collective, in place of `start`.
    wait: float
    node: float  # the part of the bandwidth inside a node that collectives reach
    network: float  # the part of the bandwidth between nodes that collectives reach
    update: float  # the part of the memory's bandwidth that the optimizer reaches
    overlap: float  # the part of a backward pass behind which gradients can be reduced
    action: float = 0.0  # seconds that a pipeline's schedule takes beside each pass of a stage


@cache
def shipped_constants() -> DeviceConstants:
    """Return the constants of predicted seconds as they were fitted."""
    return DeviceConstants(**json.loads(CONSTANTS.read_text(encoding="utf-8")))


@cache
def device_constants(device: Device) -> DeviceConstants:
    """Return the fitted constants of predicted seconds, with those that were measured on the device."""
    return replace(shipped_constants(), **dict(device.constants))


@lru_cache(maxsize=2**14)
def matmul(device: Device, c: DeviceConstants, peak: float, m: int, n: int, k: int, batch: int = 1) -> float:
    """Predict the seconds of `batch` products [m, k] × [k, n], which processors or memory limit.

    A product is cut into tiles, and the device's processors compute them in whole waves, a tile each.

    Dimensions that are not multiples of 8 take the padding that kernels need. Batched products have no such kernel for
    rows that are no multiple of 16 bytes, which are 8 elements of 2 bytes: they run at the float32 rate.
    """
    if batch > 1 and device.processors > 1 and (k % 8 or n % 8):
        peak = device.float32
    m8 = -(-m // 8) * 8
    n8 = -(-n // 8) * 8
    rate = peak * device.matmul_share * c.matmul / device.processors
    if device.processors == 1:
        seconds = 2 * batch * m8 * n8 * (k + c.depth) / rate
    else:
        seconds = math.inf
        for rows, columns, share in _TILES:
            tiles = batch * -(-m8 // rows) * -(-n8 // columns)
            waves = -(-tiles // device.processors)
            seconds = min(seconds, waves * (2 * rows * columns * (k + c.depth) / (rate * share)))
    memory_seconds = 2 * batch * (m * k + k * n + m * n) / (device.memory_bandwidth * c.memory)
    return max(seconds, memory_seconds)


def memory_passes(device: Device, c: DeviceConstants, size: float) -> float:
    """Predict the seconds of operations that read and write so many bytes."""
    return size / (device.memory_bandwidth * c.memory)


def strided_passes(device: Device, c: DeviceConstants, elements: float, size: float) -> float:
    """Predict the seconds of kernels over parts of rows: they write so many elements, and move `size` bytes."""
    return max(elements / (device.processors * _STRIDED_RATE), memory_passes(device, c, size))


@dataclass(frozen=True)
class LinkedRanks:
    """Ranks of a collective whose seconds are predicted: their number, and that of those inside a node."""

    ranks: int
    inside: int


def linked_ranks(ranks: int, stride: int, per_node: int) -> LinkedRanks:
    """Return the ranks of a collective whose time is predicted: `stride` apart, on nodes with `per_node` of them."""
    return LinkedRanks(ranks, min(ranks, max(1, per_node // stride)))


def _ring(device: Device, c: DeviceConstants, ranks: LinkedRanks) -> tuple[float, float]:
    """Return the bandwidth of a ring over these ranks, and the latency of its longest step.

    A ring goes through each of its nodes once, and through all network links of the ranks that it has there.
    """
    node = device.node.bandwidth * c.node
    if ranks.inside >= ranks.ranks:
        return node, device.node.latency
    link = device.require_network()
    network = link.bandwidth * c.network * ranks.inside
    if ranks.inside > 1:
        return min(node, network), link.latency
    return network, link.latency


def collective(
    device: Device, c: DeviceConstants, ranks: LinkedRanks, size: float, *, reduces_all: bool = False
) -> float:
    """Predict the seconds of an all-gather or a reduce-scatter of `size` bytes in all, or of an all-reduce.

    A ring sends (n-1)/n of the bytes in n-1 steps, an all-reduce twice. A tree all-reduces in 2·log₂ n steps; NCCL
    builds trees between nodes only.
    """
    n = ranks.ranks
    if n == 1 or size == 0:
        return 0.0
    bandwidth, latency = _ring(device, c, ranks)
    start = c.start if device.is_accelerator else c.wait
    if not reduces_all:
        return start + size * (n - 1) / n / bandwidth + (n - 1) * latency
    ring = 2 * (size * (n - 1) / n / bandwidth + (n - 1) * latency)
    if ranks.inside >= n:
        return start + ring
    tree = 2 * (size / (bandwidth * _TREE) + math.ceil(math.log2(n)) * latency)
    return start + min(ring, tree)


def all_to_all(device: Device, c: DeviceConstants, ranks: LinkedRanks, size: float) -> float:
    """Predict the seconds in which each rank sends `size` bytes, its own part included, to all ranks alike.

    Parts for ranks of its node go over the node's links, and meanwhile those for others over the network.
    """
    n = ranks.ranks
    if n == 1 or size == 0:
        return 0.0
    start = c.start if device.is_accelerator else c.wait
    inside = size * (ranks.inside - 1) / n / (device.node.bandwidth * c.node) + device.node.latency
    if ranks.inside >= n:
        return start + inside
    link = device.require_network()
    return start + max(inside, size * (n - ranks.inside) / n / (link.bandwidth * c.network) + link.latency)


def overlapped(device: Device, ranks: LinkedRanks, seconds: float, exposed: float) -> float:
    """Predict what collectives of so many seconds add to the computation beside them, of which a part is exposed.

    Behind the rest, the computation has fewer processors.
    """
    if not device.is_cuda:
        return exposed
    channels = _CHANNELS_INSIDE if ranks.inside >= ranks.ranks else _CHANNELS_BETWEEN
    return exposed + (seconds - exposed) * channels / device.processors


def message(device: Device, c: DeviceConstants, size: float, *, inside: bool) -> float:
    """Predict the seconds of a message of `size` bytes to another rank, inside a node or between nodes."""
    if inside:
        return size / (device.node.bandwidth * c.node) + device.node.latency
    network = device.require_network()
    return size / (network.bandwidth * c.network) + network.latency
