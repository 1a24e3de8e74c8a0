"""Pools of real ranks, started once a session and shared by all tests that need as many."""

from collections.abc import Callable, Iterator

import pytest

from shardwise.testing import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        return pools.setdefault(size, RankPool(size))

    yield pool
    for started in pools.values():
        started.close()
