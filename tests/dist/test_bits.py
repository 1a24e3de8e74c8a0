"""Training with `train.bitwise`: each layout of four ranks gives the very numbers of one process."""

import functools
import itertools
import os
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from shardwise.config import Schedule
from shardwise.train.build import build_trainer
from shardwise.verify.canonical_values import canonical_weights
from tests.dist.cells import EIGHT_RANKS, RANKS, Cell, cells_of, configuration, sweep
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_data
from tests.sweeps import few

STEPS = 2


@dataclass
class Bits:
    """What one rank has of a training.

    Attributes:
        losses, norms: of every step; the norms are those of gradients and of parameters.
        evaluation: loss and perplexity after the last step.
        weights: after the last step, by canonical name; of this rank's stages, on one rank of each.
    """

    losses: list[dict[str, float]]
    norms: list[tuple[float, float]]
    evaluation: tuple[float, float]
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(cell: Cell, backend: str | None = None) -> Bits:
    """Train a cell on this rank, compiled by a backend of torch.compile if one is given."""
    config = configuration(cell)
    if backend is not None:
        torch._dynamo.reset()
        compilation = config.compile.model_copy(update={"enabled": True, "backend": backend})
        config = config.model_copy(update={"compile": compilation})
    mesh = shared_mesh(cell.tensor, cell.pipeline, tuple(config.grains.items()), cell.context, cell.expert)
    data = make_data(config.model.vocab_size, samples=64, pairs="nsp" in config.model.objectives)
    trainer = build_trainer(config, mesh, data)
    records = [trainer.step() for _ in range(STEPS)]
    trainer.optimizer.gathers.wait()
    weights = canonical_weights(trainer.model, optimizer=trainer.optimizer)
    bits = Bits(
        [record.losses or {"loss": record.loss} for record in records],
        [(record.grad_norm, record.param_norm) for record in records],
        trainer.evaluator.held_out(),
    )
    if mesh.replicas.rank == mesh.tp.rank == 0:
        bits.weights = {name: weight.cpu() for name, weight in weights.items()}
    trainer.feed.close()
    return bits


CELLS, SHARED, DIVIDED = (
    [replace(cell, bitwise=True) for cell in cells_of(name)]
    for name in ("bits", "bits of shared samples", "bits of divided experts")
)
LLAMA = Cell("llama", variant=True, bitwise=True, layers=2, batch=4)
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


@pytest.mark.parametrize("cell", few([*CELLS, *SHARED, *DIVIDED, *SCHEDULED], *OFTEN), ids=lambda cell: cell.name)
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
