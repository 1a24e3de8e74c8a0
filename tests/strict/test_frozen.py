"""Ranks that have nothing to train take part in norms and checkpoints, with tensors of their device."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardwise import Mesh, ZeroRedundancyOptimizer
from shardwise.config import Config, Precision
from shardwise.distributed.placement import placements
from shardwise.train import build
from shardwise.train.build import build_optimizer
from shardwise.train.trainer import Trainer
from tests.dist.checkpoints import load, make_trainer, save, step_folder
from tests.dist.training import make_config
from tests.rank_pool import Pools

STAGES = (("model.embed_tokens.", "model.layers.0."), ("model.layers.1.", "model.norm.", "lm_head."))
"""How the names of their parameters start."""
EVERYTHING = ("",)
PIPELINE = {"pipeline": 2, "schedule": "1f1b"}


def trainer_of(config: Config, frozen: tuple[str, ...]) -> Trainer:
    """A trainer of a model in which the parameters whose names start so are frozen."""

    def make_optimizer(config: Config, precision: Precision, model: nn.Module, mesh: Mesh) -> ZeroRedundancyOptimizer:
        for _, p, record in placements(model):
            p.requires_grad_(not record.pieces[0].name.startswith(frozen))
        return build_optimizer(config, precision, model, mesh)

    with mock.patch.object(build, "build_optimizer", make_optimizer):
        return make_trainer(config)


def train(config: Config, frozen: tuple[str, ...], root: str | None) -> list[tuple[float, float]]:
    """Losses and gradient norms of a training; with `root` it goes on from its first checkpoint."""
    trainer = trainer_of(config, frozen)
    records = [trainer.step()]
    if root is not None:
        assert save(trainer, root)[0].problem is None
        trainer = trainer_of(config, frozen)
        load(trainer, step_folder(root, 1))
    records += [trainer.step(), trainer.step()]
    return [(record.loss, record.grad_norm) for record in records]


@pytest.mark.parametrize(("optimizer", "stage"), [pytest.param("adamw", 0, marks=pytest.mark.slow), ("lamb", 1)])
def test_a_frozen_stage(optimizer: str, stage: int, strict: Pools, tmp_path: Path) -> None:
    """As one process trains the same model."""
    method, frozen = {"name": optimizer, "max_norm": 0.1}, STAGES[stage]
    wanted = train(make_config(optimizer=method), frozen, None)
    found = strict(2).run(train, make_config(optimizer=method, parallel=PIPELINE), frozen, str(tmp_path))
    assert found == [[pytest.approx(step, rel=1e-6) for step in wanted]] * 2


def update_nothing(config: Config, root: str) -> tuple[float, int]:
    """The gradient norm of a model that is frozen as a whole, and the step of its checkpoint."""
    first, second = trainer_of(config, EVERYTHING), trainer_of(config, EVERYTHING)
    norm = first.optimizer.clip_grad_norm_(1.0).item()
    first.optimizer.step()
    first.progress.step = 1
    assert save(first, root)[0].problem is None
    load(second, step_folder(root, 1))
    return norm, second.progress.step


@pytest.mark.parametrize("parallel", [{}, PIPELINE], ids=["DP 2", "PP 2"])
def test_all_is_frozen(parallel: dict[str, Any], strict: Pools, tmp_path: Path) -> None:
    assert strict(2).run(update_nothing, make_config(parallel=parallel), str(tmp_path)) == [(0.0, 1)] * 2


def own_loop(frozen: tuple[int, ...], options: dict[str, Any]) -> tuple[float, float, int]:
    """Norms of gradient and weights, and the updates, in a loop that gives its optimizer what is trained alone."""
    mesh = Mesh(pipeline=2)
    model = nn.Linear(4, 1, device=mesh.device)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    trained = [] if mesh.pp.rank in frozen else [*model.parameters()]
    optimizer = ZeroRedundancyOptimizer([{"params": trained}], torch.optim.AdamW, mesh=mesh, **options)
    model(torch.zeros(2, 4, device=mesh.device)).sum().backward()
    gradient_norm, parameter_norm = (norm.item() for norm in optimizer.norms())
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return gradient_norm, parameter_norm, optimizer.steps


@pytest.mark.parametrize("options", [{}, {"rounding": "stochastic", "optimizer_dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize(
    ("frozen", "wanted"), [((1,), (2.0, 2.0, 1)), ((0, 1), (0.0, 0.0, 1))], ids=["one rank", "all ranks"]
)
def test_a_loop_whose_optimizer_has_no_parameters(
    frozen: tuple[int, ...], wanted: tuple[float, float, int], options: dict[str, Any], strict: Pools
) -> None:
    assert strict(2).run(own_loop, frozen, options) == [wanted] * 2
