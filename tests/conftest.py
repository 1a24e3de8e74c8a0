"""Pools of real ranks, started once a session and shared by all tests that need as many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from shardwise.testing import RankPool


class OneWorkerForRanks(LoadFileScheduling):
    """Files by turns, but of two workers one runs everything that starts ranks, which would wait for others' turns."""

    def _split_scope(self, nodeid: str) -> str:
        return "ranks" if nodeid.split("/")[1] in ("dist", "golden", "e2e") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneWorkerForRanks:
    return OneWorkerForRanks(config, log)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    from shardwise.testing import RankPool  # torch, which most tests do without

    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        return pools.setdefault(size, RankPool(size))

    yield pool
    for started in pools.values():
        started.close()
