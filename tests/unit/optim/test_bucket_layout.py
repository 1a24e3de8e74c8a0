"""Sizes of buckets by themselves; how they are packed is held by the tests of the optimizer and of the costs."""

import pytest

from shardwise.optim.bucket_layout import bucket_bytes

MIB = 2**20


def seen(gradients: float, ranks: int, size: float, latency: float, bandwidth: float) -> float:
    """Seconds of a backward pass's reductions that nothing hides: each one's messages, and the whole last one."""
    return (ranks - 1) * (gradients / size * latency + size / (ranks * bandwidth))


def test_the_size_is_the_one_with_the_least_to_see() -> None:
    for gradients, ranks in [(50 * MIB, 2), (500 * MIB, 64), (4000 * MIB, 8)]:
        size = bucket_bytes(gradients, ranks, accelerator=True)
        bandwidth = 200e9
        link = (2**20 / bandwidth, bandwidth)
        least = seen(gradients, ranks, size, *link)
        assert all(seen(gradients, ranks, size * factor, *link) > least for factor in (0.5, 0.9, 1.1, 2.0))
    assert bucket_bytes(400 * MIB, 4, accelerator=True) == 40 * MIB
    assert bucket_bytes(400 * MIB, 4, accelerator=False) == pytest.approx(40 * MIB / 8**0.5)
    assert bucket_bytes(0.1 * MIB, 4, accelerator=False) == MIB
