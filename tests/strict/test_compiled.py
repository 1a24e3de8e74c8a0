"""Compiled training on the strict device: graphs are captured in its own device type and index."""

from collections.abc import Callable

import pytest

from tests.dist.test_compiled_training import GPT_DROPOUT, SEQUENCE, Cell, losses
from tests.dist.training import FACTS, FAMILIES
from tests.rank_pool import Pools, RankPool


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(Cell(FAMILIES["llama"], SEQUENCE), marks=pytest.mark.slow),
        pytest.param(Cell(GPT_DROPOUT, SEQUENCE, dropout="invariant", recompute="full"), marks=pytest.mark.slow),
        pytest.param(Cell(FACTS["qwen3"], SEQUENCE, documents=True, units=3), marks=pytest.mark.slow),
    ],
    ids=["llama", "gpt, invariant dropout, full recompute", "qwen3, documents"],
)
def test_losses_are_those_of_eager_training_on_cpus(
    cell: Cell, strict: Pools, ranks: Callable[[int], RankPool]
) -> None:
    """torch has no compiler for it: captured graphs, forward and backward, run operator by operator."""
    wanted, _ = ranks(2).run(losses, cell, None, 3)[0]
    for found, graphs in strict(2).run(losses, cell, "aot_eager", 3):
        assert found == pytest.approx(wanted, rel=1e-6)
        assert len(graphs) == 2 * cell.units
        assert set(graphs.values()) == {1}
