"""Sparse models with `train.bitwise`: each layout has the very numbers of one process."""

import copy
import functools
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

STEPS = 2
LOSSES = {"router_sequence_loss": 0.1, "router_batch_loss": 0.1, "router_z_loss": 0.01}
LAYOUTS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "EP 2 of DP 2": (2, {"parallel": {"expert": 2}}),
    "EP 2 of DP 4, ZeRO-3": (4, {"parallel": {"expert": 2}, "optimizer": {"zero": 3}}),
    "EP 4, ZeRO-2, full recompute": (
        4,
        {"parallel": {"expert": 4}, "optimizer": {"zero": 2}, "train": {"recompute": "full"}},
    ),
    "EP 2, TP 2 + SP": (
        4,
        {"parallel": {"expert": 2, "tensor": 2, "sequence": True}, "train": {"global_batch": 4}},
    ),
    "TP 4": (4, {"parallel": {"tensor": 4}}),
    "EP 2, PP 2 zbv, ZeRO-1": (
        4,
        {"parallel": {"expert": 2, "pipeline": 2, "schedule": "zbv"}, "optimizer": {"zero": 1}},
    ),
    "EP 2, PP 2 1f1b, ZeRO-3": (
        4,
        {"parallel": {"expert": 2, "pipeline": 2, "schedule": "1f1b"}, "optimizer": {"zero": 3}},
    ),
}


def train(family: str, mode: str, sections: dict[str, dict[str, Any]], steps: int = STEPS) -> Bits:
    bits = {"micro_batch": 1, "global_batch": 8, "data_grain": 4, "bitwise": True, "steps": max(steps, 4)}
    train_section = {**bits, **sections.get("train", {})}
    optimizer = {**LOSSES, **sections.get("optimizer", {})}
    config = configuration(
        {"precision": {"mode": mode}, **sections, "train": train_section, "optimizer": optimizer}, family
    )
    mesh = Mesh(**config.parallel.degrees, grains=config.grains, device="cpu")
    trainer = build_trainer(config, mesh, make_data(config.model.vocab_size, samples=64))
    records = [trainer.step() for _ in range(steps)]
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
def one_process(family: str, mode: str, steps: int = STEPS, batch: int = 8) -> Bits:
    return train(family, mode, {"train": {"global_batch": batch}}, steps)


def compare(found: Bits, one: Bits) -> None:
    assert found.losses == one.losses
    assert found.norms == one.norms
    assert found.evaluation == one.evaluation
    differing = [name for name, weight in found.weights.items() if not torch.equal(weight, one.weights[name])]
    assert not differing


MODES = {"glm4_moe": "float32", "olmoe": "mixed", "mixtral": "bfloat16", "qwen3_moe": "float32"}
OFTEN = {("olmoe", "EP 2, TP 2 + SP")}
TRAININGS = [
    pytest.param(family, layout, marks=() if (family, layout) in OFTEN else pytest.mark.slow)
    for family in CASES
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("family", "layout"), TRAININGS)
def test_a_layout_has_the_bits_of_one_process(family: str, layout: str, ranks: Any) -> None:
    world, sections = LAYOUTS[layout]
    batch = sections.get("train", {}).get("global_batch", 8)
    for found in run(ranks, world, train, family, MODES[family], sections):
        compare(found, one_process(family, MODES[family], batch=batch))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_steps_have_the_bits_of_one_process(ranks: Any) -> None:
    steps = 200
    one = one_process("olmoe", "float32", steps)
    for name in (
        "EP 2 of DP 4, ZeRO-3",
        "EP 2, TP 2 + SP",
        "EP 2, PP 2 zbv, ZeRO-1",
        "TP 4",
        "EP 4, ZeRO-2, full recompute",
    ):
        world, sections = LAYOUTS[name]
        whole_batch = {**sections, "train": {**sections.get("train", {}), "global_batch": 8}}
        for found in ranks(world).run(train, "olmoe", "float32", whole_batch, steps, timeout=900):
            compare(found, one)


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
