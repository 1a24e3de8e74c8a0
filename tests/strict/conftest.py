"""Ranks on the strict device, which all of its tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.rank_pool import RankPool


_pools: dict[tuple[int, bool], RankPool] = {}


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
    """Pools of ranks by size, as the fixture `ranks` of the CPU, and by whether the device is like CUDA."""
    from tests.rank_pool import RankPool
    from tests.strict import build, ranks

    if missing := build.missing():
        pytest.skip(f"the strict device is not built here: {missing}")
    build.library()  # before ranks start, which would each build it

    def pool(size: int, like_cuda: bool = True) -> RankPool:
        prepare = ranks.prepare if like_cuda else ranks.prepare_unlike_cuda
        return _pools.setdefault((size, like_cuda), RankPool(size, device_type="strict", prepare=prepare))

    yield pool
    _close_pools()
