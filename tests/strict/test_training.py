"""The same training on the strict device as on the CPU."""

import pytest
import torch

from tests.dist import cells
from tests.dist import test_bits as bits
from tests.dist.cells import Cell, small
from tests.rank_pool import Pools
from tests.strict import ranks
from tests.sweeps import few

STEPS = 3
CELLS = small(
    Cell("llama"),
    Cell("llama", tensor=2, sequence=True),
    Cell("llama", tensor=2, sequence=True, overlap="pieces"),
    Cell("gpt", data=2, zero=1),
    Cell("llama", schedule="1f1b", pipeline=2),
    Cell("llama", tensor=2, sequence=True, matmul="fp8"),
)
OFTEN = (CELLS[1], CELLS[3], CELLS[4])


def compare(found: list[float], wanted: list[float], tolerance: float = 1e-6) -> None:
    for step, (a, b) in enumerate(zip(found, wanted, strict=True), start=1):
        assert abs(a - b) <= tolerance * abs(b), f"step {step}: loss {a!r} on the strict device, {b!r} on the CPU"


@pytest.mark.parametrize("cell", few(CELLS, *OFTEN), ids=lambda cell: cell.name)
def test_losses_are_those_of_the_cpu(cell: Cell, strict: Pools) -> None:
    found = strict(cell.world).run(ranks.losses, cell, STEPS)[0]
    compare(found, cells.measure(cell.alone, STEPS).losses)


def test_an_accelerator_unlike_cuda_trains_the_same(strict: Pools) -> None:
    cell = CELLS[1]
    compare(strict(2, "other").run(ranks.losses, cell, STEPS)[0], cells.measure(cell.alone, STEPS).losses)


def test_bitwise_layouts_have_the_bits_of_one_device(strict: Pools) -> None:
    (cell,) = small(Cell("llama", tensor=2, sequence=True, mode="mixed", bitwise=True))
    (one,) = strict(1).run(bits.train, cell.alone)
    for rank, found in enumerate(strict(2).run(bits.train, cell)):
        assert (found.losses, found.norms, found.evaluation) == (one.losses, one.norms, one.evaluation), f"rank {rank}"
        for name, weight in found.weights.items():
            assert torch.equal(weight, one.weights[name]), name


def test_mixed_precision_is_near_that_of_the_cpu(strict: Pools) -> None:
    """Another kernel of attention rounds to bfloat16 at other places."""
    (cell,) = small(Cell("llama", tensor=2, sequence=True, mode="mixed"))
    compare(strict(2).run(ranks.losses, cell, STEPS)[0], cells.measure(cell.alone, STEPS).losses, 5e-4)
