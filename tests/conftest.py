"""Pools of real ranks, started once a session and shared by all tests that need as many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shardwise.testing import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    from shardwise.testing import RankPool  # torch, which most tests do without

    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        return pools.setdefault(size, RankPool(size))

    yield pool
    for started in pools.values():
        started.close()
