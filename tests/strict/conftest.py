"""Ranks on the strict device, which all of its tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.rank_pool import RankPool


_pools: dict[tuple[int, str], RankPool] = {}


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks after the last test of this folder: idle ones take processor time from the tests that follow."""
    if nextitem is None or not nextitem.nodeid.startswith("tests/strict/"):
        _close_pools()


def _close_pools() -> None:
    for pool in _pools.values():
        pool.close()


@pytest.fixture(scope="session")
def strict() -> Iterator[Callable[..., RankPool]]:
    """Pools of ranks by size, as the fixture `ranks` of the CPU, and by what the device is like."""
    from tests.rank_pool import RankPool
    from tests.strict import build, ranks

    if missing := build.missing():
        pytest.skip(f"the strict device is not built here: {missing}")
    build.library()  # before ranks start, which would each build it

    prepare = {"cuda": ranks.prepare, "other": ranks.prepare_unlike_cuda, "neuron": ranks.prepare_like_neuron}

    def pool(size: int, like: str = "cuda") -> RankPool:
        return _pools.setdefault((size, like), RankPool(size, device_type="strict", prepare=prepare[like]))

    yield pool
    _close_pools()
