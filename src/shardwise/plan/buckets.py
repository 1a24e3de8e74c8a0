"""Buckets: which parameters share one flat tensor, and at which offsets."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

ALIGNMENT = 32
"""Elements to which each parameter's start in a bucket is aligned; a bucket is padded to this times its slices."""


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
