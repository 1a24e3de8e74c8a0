"""Experts that get all tokens, one, or none: training at layouts is that of one process, and idle experts decay."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.config import Config
from shardwise.distributed.mesh import Mesh
from shardwise.layers.experts import Experts
from shardwise.train.build import build_trainer
from shardwise.verify.canonical_values import canonical_weights, gradient_errors, step_with_gradients
from tests.dist.dense import run
from tests.dist.test_experts import SIZES
from tests.dist.training import SPARSE, make_config, make_data
from tests.sweeps import few

LR, DECAY = 1e-2, 0.1
STEPS = 3


def configuration(family: str, sections: dict[str, dict[str, Any]], length: int, per_token: int) -> Config:
    train = {"micro_batch": 1, "global_batch": 4, "steps": STEPS, "sequence_length": length}
    optimizer = {"lr": LR, "min_lr": LR, "warmup_steps": 0, "schedule": "constant", "weight_decay": DECAY}
    return make_config(
        model={**SIZES, **SPARSE[family], "num_hidden_layers": 4, "num_experts_per_tok": per_token},
        **{**sections, "train": train | sections.get("train", {}), "optimizer": optimizer | sections["optimizer"]},
    )


def first(per_token: int, scores: Tensor) -> Tensor:
    return torch.arange(per_token, device=scores.device).expand(len(scores), per_token)


Found = tuple[list[float], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


def train(family: str, sections: dict[str, dict[str, Any]], length: int, per_token: int) -> Found:
    """Losses, the first step's gradients, and the weights before and after; all tokens have the first experts."""
    config = configuration(family, sections, length, per_token)
    mesh = Mesh(**config.parallel.degrees, device="cpu")
    trainer = build_trainer(config, mesh, make_data(config.model.vocab_size))
    for layer in trainer.model.modules():
        if isinstance(layer, Experts):
            layer.router.choose = functools.partial(first, per_token)
    before = canonical_weights(trainer.model, mesh.pp, optimizer=trainer.optimizer)
    record, gradients = step_with_gradients(trainer)
    losses = [record.loss, *(trainer.step().loss for _ in range(STEPS - 1))]
    after = canonical_weights(trainer.model, mesh.pp, optimizer=trainer.optimizer)
    return losses, gradients, before, after


@functools.cache
def alone(family: str, optimizer: str, length: int, per_token: int) -> Found:
    return train(family, {"optimizer": {"name": optimizer}}, length, per_token)


ONE = "EP 4, ZeRO-2, all tokens at one expert"
LAYOUTS: dict[str, tuple[str, str, int, dict[str, dict[str, Any]]]] = {
    ONE: ("olmoe", "adamw", 16, {"parallel": {"expert": 4}, "optimizer": {"zero": 2}}),
    "EP 2, ZeRO-3": ("glm4_moe", "adamw", 16, {"parallel": {"expert": 2}, "optimizer": {"zero": 3}}),
    "EP 2, PP 2, ZeRO-3, Muon": (
        "glm4_moe", "muon", 16,
        {"parallel": {"expert": 2, "pipeline": 2, "schedule": "zbv"}, "optimizer": {"zero": 3}},
    ),
    "EP 4 of CP 2": ("mixtral", "adamw", 16, {"parallel": {"expert": 4, "context": 2}, "optimizer": {}}),
    "one token on each rank": ("olmoe", "adamw", 1, {"parallel": {"expert": 4}, "optimizer": {"zero": 1}}),
}  # fmt: skip


@pytest.mark.parametrize("name", few(LAYOUTS, ONE))
def test_experts_without_a_token_decay_as_in_one_process(name: str, ranks: Any) -> None:
    family, optimizer, length, sections = LAYOUTS[name]
    per_token = 1 if name == ONE else 2
    sections = sections | {"optimizer": sections["optimizer"] | {"name": optimizer}}
    losses, gradients, before, after = alone(family, optimizer, length, per_token)
    idle = [weight for weight in before if any(f".experts.{number}." in weight for number in (3, 7))]
    assert idle
    everyone = run(ranks, 4, train, family, sections, length, per_token)
    found_gradients = functools.reduce(lambda all_, one: all_ | one[1], everyone, dict[str, Tensor]())
    for found, _, _, found_after in everyone:
        assert found == pytest.approx(losses, rel=1e-5)
        assert max(gradient_errors(found_gradients, gradients).values()) < 1e-5
        for weight in idle:
            assert not found_gradients[weight].any()
            decayed = before[weight] * (1 - LR * DECAY) ** STEPS
            torch.testing.assert_close(found_after[weight], decayed, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(after[weight], decayed, rtol=1e-5, atol=1e-7)
        assert all(math.isfinite(float(weight.sum())) for weight in found_after.values())
