"""Training with `train.bitwise`: each layout of four ranks gives the very numbers of one process."""

import functools
import itertools
import os
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from shardwise.config import Schedule
from tests.dist.bits import Bits, train
from tests.dist.cells import EIGHT_RANKS, RANKS, Cell, sweep
from tests.sweeps import few

LLAMA = Cell("llama", variant=True, bitwise=True, layers=2, batch=4)
DOCUMENTS = Cell("llama", documents=True, mode="mixed", bitwise=True, layers=2)
GPT = Cell("gpt", dropout=True, optimizer="lamb", bitwise=True)
GPT_NEOX = Cell("gpt_neox", mode="bfloat16", bitwise=True, layers=2, batch=4)
BERT = Cell("bert", mode="mixed", bitwise=True)
FP8 = Cell("llama", variant=True, mode="mixed", matmul="fp8", bitwise=True, layers=2)
OLMO2 = Cell("olmo2", optimizer="lamb", bitwise=True, layers=2, batch=4)
MUON = Cell("llama", mode="bfloat16", optimizer="muon", bitwise=True, layers=2, batch=4)
GEMMA3 = Cell("gemma3", documents=True, mode="mixed", bitwise=True, layers=2, batch=4)
CELLS = (
    replace(LLAMA, tensor=4, sequence=True, regathers=True),
    replace(LLAMA, tensor=2, data=2, zero=3),
    replace(DOCUMENTS, tensor=2, sequence=True, data=2, zero=2, recompute="selective", regathers=True),
    replace(GPT, schedule="zbv", pipeline=2, tensor=2),
    replace(GPT_NEOX, tensor=2, data=2, matmul="fp8"),
    replace(FP8, tensor=2, sequence=True, data=2, zero=3),
    replace(BERT, schedule="zbv", pipeline=2, data=2, zero=3),
    replace(OLMO2, tensor=2, sequence=True, data=2, recompute="full"),
    replace(GEMMA3, tensor=2, sequence=True, data=2, recompute="selective"),
    replace(MUON, tensor=2, data=2, zero=1),
)
SHARED = (
    replace(LLAMA, context=2, tensor=2, sequence=True, zero=1, context_grain=4),
    replace(LLAMA, context=4, zero=3, context_grain=4),
    replace(DOCUMENTS, context=2, data=2, zero=2, recompute="selective", context_grain=2),
    replace(GPT, context=2, tensor=2, sequence=True, recompute="full", layers=2, batch=4, context_grain=4),
    replace(GPT_NEOX, schedule="zbv", pipeline=2, context=2, layers=4, context_grain=4),
    replace(OLMO2, tensor=4, context_grain=2),
)
"""With context parallelism, or parts for it."""
SPARSE = Cell("olmoe", mode="mixed", bitwise=True, data_grain=4)
GLM4 = Cell("glm4_moe", bitwise=True, data_grain=4)
DIVIDED = (
    replace(SPARSE, tensor=2, sequence=True, data=2, expert=2, zero=1, layers=2, batch=4, data_grain=2),
    replace(SPARSE, data=4, expert=4, zero=2, recompute="full"),
    replace(GLM4, data=4, expert=2, zero=3),
    replace(GLM4, schedule="zbv", pipeline=2, data=2, expert=2, zero=1, batch=16),
    replace(SPARSE, family="mixtral", mode="bfloat16", data=4, expert=2, zero=1),
    replace(SPARSE, family="qwen3_moe", mode="float32", tensor=4),
)
"""Whose ranks divide experts."""
GROUPS = replace(LLAMA, data_grain=4, layers=4, batch=16)
"""Groups of two micro-batches each, of which a data-parallel rank has several."""
SCHEDULED = (
    replace(GROUPS, data=2),
    *(
        replace(GROUPS, schedule=schedule, pipeline=2, data=2, zero=stage)
        for schedule, stage in zip(get_args(Schedule), (1, 2, 3, 2, 3, 1), strict=True)
    ),
)


@functools.cache
def one_process(cell: Cell) -> Bits:
    """The same training without any parallelism."""
    return train(cell.alone)


def compare(everyone: list[Bits], one: Bits) -> None:
    for rank, found in enumerate(everyone):
        assert found.losses == one.losses, f"losses of rank {rank}"
        assert found.norms == one.norms, f"norms of rank {rank}"
        assert found.evaluation == one.evaluation, f"evaluation of rank {rank}"
        for name, weight in found.weights.items():
            assert torch.equal(weight, one.weights[name]), f"{name} of rank {rank} differs"
    assert set().union(*(found.weights for found in everyone)) == one.weights.keys()


OFTEN = (CELLS[2], CELLS[3], CELLS[-1], SHARED[0], DIVIDED[0])


@pytest.mark.parametrize("cell", few(CELLS + SHARED + DIVIDED + SCHEDULED, *OFTEN), ids=lambda cell: cell.name)
def test_training_has_the_bits_of_one_process(cell: Cell, ranks: Any) -> None:
    compare(ranks(RANKS).run(train, cell), alone(cell, ranks))


def alone(cell: Cell, ranks: Any) -> Bits:
    """The same training in one process; of the ranks' device, where the CPU has other last bits, as of float64."""
    if os.environ.get("STRICT_NEURON_LIKE", "0") == "0":
        return one_process(cell.alone)
    (one,) = ranks(1).run(train, cell.alone)
    return one


def others(count: int) -> list[Cell]:
    """Return drawn cells of four ranks, in all precisions."""
    cells = [cell for cell in sweep(4 * count) if cell.world == RANKS][:count]
    modes = itertools.cycle(("float32", "mixed", "bfloat16"))
    fixed = {"bitwise": True, "overlap": None, "uneven": False, "batch": 16, "context_keys": "gather"}
    grains = [2 * cell.context if cell.context > 1 else None for cell in cells]
    drawn = zip(cells, modes, grains, strict=False)
    return [replace(cell, **fixed, mode=mode, context_grain=grain) for cell, mode, grain in drawn]


@pytest.mark.slow
@pytest.mark.sweep("cell", lambda: others(40))
def test_any_other_training_has_the_bits_of_one_process(cell: Cell, ranks: Any) -> None:
    compare(ranks(RANKS).run(train, cell), train(cell.alone))


@pytest.mark.slow
@pytest.mark.parametrize("cell", EIGHT_RANKS, ids=lambda cell: cell.name)
def test_eight_ranks_that_share_samples_have_the_bits_of_one_process(cell: Cell, ranks: Any) -> None:
    grain = max(4, cell.context)
    cell = replace(cell, bitwise=True, context_grain=grain, context_keys="gather", uneven=False, batch=16)
    compare(ranks(cell.world).run(train, cell), train(cell.alone))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled_training_has_the_bits_of_one_compiled_process(ranks: Any) -> None:
    cell = replace(LLAMA, tensor=2, sequence=True)
    # In a process of its own, too: torch's compiler warns, and here warnings are errors.
    (one,) = ranks(1).run(train, cell.alone, "inductor", timeout=900)
    compare(ranks(2).run(train, cell, "inductor", timeout=900), one)


def test_other_orders_of_sums_have_other_bits(ranks: Any) -> None:
    """Otherwise equal bits would say little: each layout has the tree to thank for them."""
    cell = replace(LLAMA, tensor=2, data=2, zero=1, bitwise=False)
    found = ranks(RANKS).run(train, cell)[0]
    one = one_process(LLAMA.alone)
    assert found.losses[0]["loss"] == pytest.approx(one.losses[0]["loss"], rel=1e-5)
    assert any(not torch.equal(weight, one.weights[name]) for name, weight in found.weights.items())
