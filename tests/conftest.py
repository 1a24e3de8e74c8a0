"""Pools of real ranks, started once a session and shared by all tests that need as many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from shardwise.testing import RankPool


class PoolsOnce(LoadFileScheduling):
    """Files by turns, but one worker alone starts the pools of ranks, and one the run that commands look at."""

    def _split_scope(self, nodeid: str) -> str:
        folder = nodeid.split("/")[1]
        together = {"dist": "ranks", "golden": "ranks", "e2e": "commands"}
        return together.get(folder) or super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> PoolsOnce:
    return PoolsOnce(config, log)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    from shardwise.testing import RankPool  # torch, which most tests do without

    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        return pools.setdefault(size, RankPool(size))

    yield pool
    for started in pools.values():
        started.close()
