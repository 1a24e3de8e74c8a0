"""The layout of buckets: their sizes, the parameters of each, and their offsets. The planner uses it without torch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

ALIGNMENT = 32
"""Elements to which each parameter's start in a bucket is aligned; a bucket is padded to this times its slices.

Kernels read aligned memory by wide loads: 32 elements are 128 bytes of float32, and 64 of bfloat16.
"""

LIMBS = 30
"""Numbers of 64 bits that an exact sum of squares takes on its way between ranks (`optim/exact_sums.py`)."""

_CHUNKS = 4  # chunks of matrices of a small model, so that its sends too are hidden behind work
_CHUNK_ELEMENTS = 1 << 24  # most elements of a rank's matrices in a chunk, unless a matrix has more

LATENCY_BYTES = {"accelerator": 2**20, "cpu": 2**17}
"""Bytes that a link carries in the time that a message takes to begin: latency times bandwidth.

Between accelerators this is 5 µs at 200 GB/s, or 20 µs at 50 GB/s; between CPU ranks, over gloo, 100 µs at 1.3 GB/s.
"""
_LEAST_BYTES = 2**20  # floor for small models, whose smaller buckets would only cost the host more calls

ROUNDING_CHUNK_ELEMENTS_CPU = 2**17
"""Elements that stochastic rounding updates in float32 at once on a CPU: they stay in its caches.

A multiple of `ALIGNMENT`: the CPU's vectorized kernels compute the last elements of an odd length
in another way, and the result of an element must not depend on its place.
"""

ROUNDING_CHUNK_ELEMENTS_ACCELERATOR = 2**22
"""Elements of the same on an accelerator, where short kernels would wait for the host: about 250 MiB for a moment."""


class UnitPlace(NamedTuple):
    """The place of a parameter by which buckets are laid out; `unit`: number of its embedding, block or head."""

    stage: int
    unit: int


FIRST_PLACE = UnitPlace(0, 0)


def bucket_bytes(gradients: float, ranks: int, *, accelerator: bool) -> float:
    """Return the size of the optimizer's buckets in bytes, which hides most of the reductions behind the backward pass.

    A ring over n ranks reduces b bytes in `(n - 1)·(l + b / (n·w))`: n - 1 messages of latency l, and bandwidth w. The
    last bucket of a backward pass of G bytes hides behind nothing, and its bytes cost `(n - 1)·b / (n·w)`. The latency
    of all G/b buckets costs `(n - 1)·l·G / b`. The sum of both is least at `b = √(G·n·l·w)`. The latency and the
    bandwidth are fixed figures for each kind of link and no measurements, so that two starts of a training have the
    same buckets and the same sums.

    Args:
        gradients: bytes of gradients that the buckets hold together.
        ranks: n, the number of ranks that reduce them.
        accelerator: True if the ranks compute on accelerators.
    """
    at_once = LATENCY_BYTES["accelerator" if accelerator else "cpu"]
    return max(_LEAST_BYTES, math.sqrt(gradients * ranks * at_once))


def packed(sizes: Iterable[tuple[Hashable, int, int]], cap_bytes: float) -> list[list[int]]:
    """Return the indices of the parameters of each bucket, in the order in which the buckets are begun.

    Buckets are filled from the last parameter to the first, because a backward pass completes gradients in about this
    order: the reduction of the first bucket starts long before the backward pass ends. A parameter larger than
    `cap_bytes` has a bucket to itself. A bucket ends with its unit, unless it is small: ZeRO-3 gathers whole buckets
    for a unit, and the buckets are the same at every stage, so that sums of norms are too.

    Args:
        sizes: (kind, bytes of the gradient, unit) of each parameter, in the order of the model. Only parameters of one
            kind share a bucket.
        cap_bytes: bytes of gradients that a bucket holds at most.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int, int]] = {}
    for index, (kind, size, unit) in reversed(list(enumerate(sizes))):
        bucket, used, unit_before = open_buckets.get(kind, ([], 0, unit))
        ends_with_unit = unit != unit_before and used >= _LEAST_BYTES
        if not bucket or used + size > cap_bytes or ends_with_unit:
            bucket = []
            used = 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[kind] = (bucket, used + size, unit)
    return buckets


def offsets_and_length(elements: Sequence[int], slices: int) -> tuple[list[int], int]:
    """Return the offset of each parameter in an optimizer's bucket, and its length, a multiple of `slices`."""
    *offsets, end = accumulate((_aligned(size, ALIGNMENT) for size in elements), initial=0)
    return offsets, _aligned(end, ALIGNMENT * slices)


def matrix_chunk_elements(elements: int, ranks: int) -> int:
    """Return the elements of matrices that Muon sends at once from each rank, of so many on all ranks of a stage."""
    return min(_CHUNK_ELEMENTS, -(-elements // (_CHUNKS * ranks)))


def rounding_chunk_elements(accelerator: bool) -> int:
    """Return the elements that stochastic rounding updates in float32 at once."""
    return ROUNDING_CHUNK_ELEMENTS_ACCELERATOR if accelerator else ROUNDING_CHUNK_ELEMENTS_CPU


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of a bucket's dense parameter from the slowest to the fastest in memory.

    A dimension of size 1 stays at its place, since its stride is arbitrary and changes nothing.
    """
    dims_with_stride = [dim for dim, size in enumerate(shape) if size != 1]
    by_stride = iter(sorted(dims_with_stride, key=lambda dim: -strides[dim]))
    return tuple(next(by_stride) if size != 1 else dim for dim, size in enumerate(shape))


def inverse_order(order: Sequence[int]) -> tuple[int, ...]:
    """Return the inverse of a bucket's `memory_order`: the place of each dimension in `order`."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _aligned(elements: int, to: int) -> int:
    return -(-elements // to) * to
