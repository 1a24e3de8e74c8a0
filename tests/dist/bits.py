"""A training with `train.bitwise`, and all numbers of it that no layout may change."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.train.build import build_trainer
from shardwise.verify.canonical_values import canonical_weights
from tests.dist.cells import Cell, configuration
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_data

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
