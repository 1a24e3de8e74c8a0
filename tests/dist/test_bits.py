"""Training with `train.bitwise`: each layout of four ranks gives the very numbers of one process."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.train.build import build_trainer
from shardwise.verify.canonical_values import canonical_weights
from tests.dist.cells import RANKS, Cell, configuration
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_data

STEPS = 3
LLAMA = Cell("llama", variant=True, bitwise=True, layers=2, batch=4)
DOCUMENTS = Cell("llama", documents=True, mode="mixed", bitwise=True, layers=2)
GPT = Cell("gpt", dropout=True, optimizer="lamb", bitwise=True)
GPT_NEOX = Cell("gpt_neox", mode="bfloat16", bitwise=True, layers=2, batch=4)
BERT = Cell("bert", mode="mixed", bitwise=True)
OLMO2 = Cell("olmo2", optimizer="lamb", bitwise=True, layers=2, batch=4)
CELLS = (
    replace(LLAMA, tensor=4, sequence=True),
    replace(LLAMA, tensor=2, data=2, zero=1),
    replace(LLAMA, schedule="1f1b", pipeline=2, tensor=2, sequence=True),
    replace(DOCUMENTS, tensor=2, sequence=True, data=2, zero=1),
    replace(DOCUMENTS, data=4),
    replace(GPT, schedule="zbv", pipeline=2, tensor=2),
    replace(GPT, data=4, zero=1, recompute="full"),
    replace(GPT_NEOX, tensor=4),
    replace(BERT, schedule="zbv", pipeline=2, data=2, zero=1),
    replace(OLMO2, tensor=2, sequence=True, data=2, recompute="full"),
)


@dataclass
class Bits:
    """What one rank has of a training.

    Attributes:
        losses, norms: of every step; the norms are those of gradients and of parameters.
        evaluation: losses after the last step.
        weights: after the last step, by canonical name; of this rank's stages, on one rank of each.
    """

    losses: list[dict[str, float]]
    norms: list[tuple[float, float]]
    evaluation: dict[str, float]
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(cell: Cell) -> Bits:
    """Train a cell on this rank."""
    config = configuration(cell)
    mesh = shared_mesh(cell.tensor, cell.pipeline, tuple(config.grains.items()))
    data = make_data(config.model.vocab_size, samples=64, pairs="nsp" in config.model.objectives)
    trainer = build_trainer(config, mesh, data)
    records = [trainer.step() for _ in range(STEPS)]
    trainer.optimizer.gathers.wait()
    weights = canonical_weights(trainer.model)
    bits = Bits(
        [record.losses or {"loss": record.loss} for record in records],
        [(record.grad_norm, record.param_norm) for record in records],
        trainer.evaluate(),
    )
    if mesh.dp.rank == mesh.tp.rank == 0:
        bits.weights = {name: weight.cpu() for name, weight in weights.items()}
    trainer.feed.close()
    return bits


@functools.cache
def one_process(cell: Cell) -> Bits:
    """The same training without any parallelism."""
    return train(cell.alone)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_training_has_the_bits_of_one_process(cell: Cell, ranks: Any) -> None:
    everyone: list[Bits] = ranks(RANKS).run(train, cell)
    one = one_process(cell.alone)
    for rank, found in enumerate(everyone):
        assert found.losses == one.losses, f"losses of rank {rank}"
        assert found.norms == one.norms, f"norms of rank {rank}"
        assert found.evaluation == one.evaluation, f"evaluation of rank {rank}"
        for name, weight in found.weights.items():
            assert torch.equal(weight, one.weights[name]), f"{name} of rank {rank} differs"
    assert set().union(*(found.weights for found in everyone)) == one.weights.keys()


def test_other_orders_of_sums_have_other_bits(ranks: Any) -> None:
    """Otherwise equal bits would say little: each layout has the tree to thank for them."""
    cell = replace(LLAMA, tensor=2, data=2, zero=1, bitwise=False)
    found = ranks(RANKS).run(train, cell)[0]
    one = one_process(LLAMA.alone)
    assert found.losses[0]["loss"] == pytest.approx(one.losses[0]["loss"], rel=1e-5)
    assert any(not torch.equal(weight, one.weights[name]) for name, weight in found.weights.items())
