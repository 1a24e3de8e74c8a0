"""Sparse models with `train.bitwise`: each layout has the very numbers of one process."""

import copy
import functools
import itertools
from typing import Any

import pytest
import torch

from shardwise.distributed.mesh import Mesh
from shardwise.layers.experts import experts_of
from shardwise.train.build import build_trainer
from shardwise.verify.canonical_values import canonical_weights
from tests.dist.bits import Bits
from tests.dist.dense import run
from tests.dist.test_experts import CASES, configuration
from tests.dist.training import make_data
from tests.sweeps import few

STEPS = 2
LOSSES = {"router_sequence_loss": 0.1, "router_batch_loss": 0.1, "router_z_loss": 0.01}
LAYOUTS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "EP 2 of DP 4, ZeRO-3": (4, {"parallel": {"expert": 2}, "optimizer": {"zero": 3}}),
    "EP 4, ZeRO-2, full recompute": (
        4, {"parallel": {"expert": 4}, "optimizer": {"zero": 2}, "train": {"recompute": "full"}}
    ),
    "EP 2, TP 2 + SP": (
        4, {"parallel": {"expert": 2, "tensor": 2, "sequence": True}, "train": {"global_batch": 4}}
    ),
    "TP 4": (4, {"parallel": {"tensor": 4}}),
    "EP 2, PP 2 zbv": (4, {"parallel": {"expert": 2, "pipeline": 2, "schedule": "zbv"}, "optimizer": {"zero": 1}}),
}  # fmt: skip


def train(family: str, mode: str, sections: dict[str, dict[str, Any]]) -> Bits:
    bits = {"micro_batch": 1, "global_batch": 8, "data_grain": 4, "bitwise": True, "steps": 4}
    train_section = {**bits, **sections.get("train", {})}
    optimizer = {**LOSSES, **sections.get("optimizer", {})}
    config = configuration(
        {"precision": {"mode": mode}, **sections, "train": train_section, "optimizer": optimizer}, family
    )
    mesh = Mesh(**config.parallel.degrees, grains=config.grains, device="cpu")
    trainer = build_trainer(config, mesh, make_data(config.model.vocab_size, samples=64))
    records = [trainer.step() for _ in range(STEPS)]
    trainer.optimizer.gathers.wait()
    weights = canonical_weights(trainer.model, optimizer=trainer.optimizer)
    evaluation = trainer.evaluator.held_out()
    trainer.feed.close()
    return Bits(
        [{"loss": record.loss} for record in records],
        [(record.grad_norm, record.param_norm) for record in records],
        evaluation,
        weights,
    )


@functools.cache
def one_process(family: str, mode: str, batch: int) -> Bits:
    return train(family, mode, {"train": {"global_batch": batch}})


def compare(found: Bits, one: Bits) -> None:
    assert found.losses == one.losses
    assert found.norms == one.norms
    assert found.evaluation == one.evaluation
    differing = [name for name, weight in found.weights.items() if not torch.equal(weight, one.weights[name])]
    assert not differing


MODES = {"glm4_moe": "float32", "olmoe": "mixed", "mixtral": "bfloat16", "qwen3_moe": "float32"}


@pytest.mark.parametrize(("family", "layout"), few(itertools.product(CASES, LAYOUTS), ("olmoe", "EP 2, TP 2 + SP")))
def test_a_layout_has_the_bits_of_one_process(family: str, layout: str, ranks: Any) -> None:
    world, sections = LAYOUTS[layout]
    batch = sections.get("train", {}).get("global_batch", 8)
    for found in run(ranks, world, train, family, MODES[family], sections):
        compare(found, one_process(family, MODES[family], batch))


def use_a_copy() -> str:
    """What a copied layer says, whose parameters are new and have no further gradients."""
    config = configuration({"parallel": {"expert": 2}, "train": {"bitwise": True, "data_grain": 4}}, "olmoe")
    trainer = build_trainer(config, Mesh(**config.parallel.degrees, grains=config.grains, device="cpu"), make_data())
    layer = copy.deepcopy(experts_of(trainer.model)[0])
    try:
        layer(torch.zeros(4, 1, config.model.hidden_size))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_copied_layer_is_refused(ranks: Any) -> None:
    for text in ranks(2).run(use_a_copy):
        assert "was copied, without the gradients that it keeps" in text
