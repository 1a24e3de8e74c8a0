"""The same training on the strict device as on the CPU, in one rank and at the layouts that differ in communication."""

from collections.abc import Callable

import pytest

from shardwise.testing import RankPool
from tests.dist import cells
from tests.dist.cells import Cell, small
from tests.strict import ranks

STEPS = 3
CELLS = small(
    Cell("llama"),
    Cell("llama", tensor=2, sequence=True),
    Cell("gpt", data=2, zero=1),
    Cell("llama", schedule="1f1b", pipeline=2),
)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_losses_are_those_of_the_cpu(cell: Cell, strict: Callable[[int], RankPool]) -> None:
    found = strict(cell.world).run(ranks.losses, cell, STEPS)[0]
    wanted = cells.measure(cell.alone, STEPS).losses
    for step, (a, b) in enumerate(zip(found, wanted, strict=True), start=1):
        assert abs(a - b) <= 1e-6 * abs(b), f"step {step}: loss {a!r} on the strict device, {b!r} on the CPU"
