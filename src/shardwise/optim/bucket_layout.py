"""Buckets: which parameters share one flat tensor, and at which offsets."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

ALIGNMENT = 32
"""Elements to which each parameter's start in a bucket is aligned; a bucket is padded to this times its slices."""

LATENCY_BYTES = {"accelerator": 2**20, "cpu": 2**17}
"""Bytes that a link carries in the time that a message takes to begin: latency times bandwidth.

Between accelerators this is 5 µs at 200 GB/s, or 20 µs at 50 GB/s; between CPU ranks, over gloo, 100 µs at 1.3 GB/s.
"""
_LEAST = 2**20


def bucket_bytes(gradients: float, ranks: int, *, accelerator: bool) -> float:
    """Bytes of the buckets that let the least of their reductions be seen.

    A ring over n ranks reduces b bytes in `(n - 1)·(l + b / (n·w))`: n - 1 messages of latency l, and bandwidth w. The
    last bucket of a backward pass of G bytes runs behind nothing, and all G/b of them pay the latency. The sum is least
    at `b = √(G·n·l·w)`. The latency and the bandwidth are fixed figures for each kind of link and no measurements, so
    that two starts of a training have the same buckets and the same sums.

    Args:
        gradients: bytes of gradients that the buckets hold together.
        ranks: those that reduce them.
        accelerator: whether these are accelerators.
    """
    at_once = LATENCY_BYTES["accelerator" if accelerator else "cpu"]
    return max(_LEAST, math.sqrt(gradients * ranks * at_once))


def packed(sizes: Iterable[tuple[Hashable, int]], cap_bytes: float) -> list[list[int]]:
    """Indices of the parameters of each bucket, in the order in which the buckets are begun.

    Buckets are filled from the last parameter to the first, because a backward pass completes gradients in about this
    order: the reduction of the first bucket starts long before the backward pass ends. A parameter larger than
    `cap_bytes` has a bucket to itself.

    Args:
        sizes: (kind, bytes of the gradient) of each parameter, in the order of the model. Only parameters of one kind
            share a bucket.
        cap_bytes: bytes of gradients that a bucket holds at most.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for index, (kind, size) in reversed(list(enumerate(sizes))):
        bucket, used = open_buckets.get(kind, ([], 0))
        if not bucket or used + size > cap_bytes:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[kind] = (bucket, used + size)
    return buckets


def offsets_and_length(elements: Sequence[int], slices: int) -> tuple[list[int], int]:
    """The offset of each parameter in a bucket, and the bucket's length, a multiple of `slices`."""
    offsets, end = [], 0
    for size in elements:
        offsets.append(end)
        end += _aligned(size, ALIGNMENT)
    return offsets, _aligned(end, ALIGNMENT * slices)


def _aligned(elements: int, to: int) -> int:
    return -(-elements // to) * to
