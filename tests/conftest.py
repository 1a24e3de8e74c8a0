"""Pools of real ranks, started once a session and shared by all tests that need as many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shardwise.testing import RankPool


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks at this hook, too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of two workers, one runs everything that starts ranks, which would wait for those of a second such test."""
    starts_ranks = ("dist", "golden", "e2e")
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in starts_ranks:
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    from shardwise.testing import RankPool  # torch, which most tests do without

    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        return pools.setdefault(size, RankPool(size))

    yield pool
    for started in pools.values():
        started.close()
