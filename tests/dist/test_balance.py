"""Objectives of routers: the formula on the whole batch, one curve at every layout, and transformers' own number."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.checkpoint.canonical_tensors import canonical_tensors
from shardwise.config import Config
from shardwise.config.hugging_face import to_hugging_face
from shardwise.config.model import FAMILIES
from shardwise.config.routing import Routing
from shardwise.distributed.mesh import Group, Mesh
from shardwise.layers.balance import Balance, counted
from shardwise.layers.execution import Execution, made_with
from shardwise.layers.experts import Router, experts_of
from shardwise.models.llama import Llama
from shardwise.train.build import build_trainer
from shardwise.train.loss import mean_over_targets
from shardwise.verify.canonical_values import canonical_gradients, gradient_errors, step_with_gradients
from tests.dist.dense import run
from tests.dist.test_experts import CASES, SCALE, SIZES, B, S, batch
from tests.dist.training import make_config, make_data

COEFFICIENTS = {"sequence": 0.05, "batch": 0.07, "pooled": 0.03, "z": 0.002}
SAMPLES = 8
Sections = dict[str, dict[str, Any]]
Step = tuple[float, dict[str, float], dict[str, Tensor]]
"""The loss, each objective, and the gradient of each canonical tensor."""


def coefficients(family: str) -> dict[str, float]:
    return {name: value for name, value in COEFFICIENTS.items() if name != "pooled" or family != "glm4_moe"}


def configuration(family: str, sections: Sections, *, balanced: bool = True) -> Config:
    """Of Qwen3's four blocks the last two, which are a stage of a pipeline of two ranks, have no experts."""
    model = {"family": family, **SIZES, **CASES[family], "vocab_size": 131, "num_hidden_layers": 4}
    model["initializer_range"] = 0.1
    if family == "qwen3_moe":
        model["mlp_only_layers"] = [2, 3]
    train = {"micro_batch": 1, "global_batch": SAMPLES, "steps": 4, **sections.get("train", {})}
    losses = {f"router_{name}_loss": value * balanced for name, value in coefficients(family).items()}
    optimizer = {**losses, **sections.get("optimizer", {})}
    return make_config(**{**sections, "train": train, "model": model, "optimizer": optimizer})


def objectives(routed: Sequence[tuple[Tensor, Tensor]], routing: Routing) -> dict[str, Tensor]:
    """The formulas, on logits `[M, N]` and choices `[M, k]` of the whole batch in each layer."""
    experts, per_token = routing.experts, routing.per_token
    found: dict[str, list[Tensor]] = {"sequence": [], "batch": [], "z": []}
    rows_of_layers, shares_of_layers = [], []
    for logits, chosen in routed:
        shares = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
        shares = shares / shares.sum(-1, keepdim=True)
        rows = F.one_hot(chosen, experts).sum(1).float()
        by_sample = [
            (rows[sample::SAMPLES].mean(0) * shares[sample::SAMPLES].mean(0)).sum() * experts / per_token
            for sample in range(SAMPLES)
        ]
        found["sequence"].append(torch.stack(by_sample).mean())
        found["batch"].append((rows.mean(0) * shares.mean(0)).sum() * experts / per_token)
        found["z"].append((logits.exp().sum(-1).log() ** 2).mean())
        rows_of_layers.append(rows)
        shares_of_layers.append(shares)
    means = {name: torch.stack(values).mean() for name, values in found.items()}
    return means | {"pooled": (torch.cat(rows_of_layers).mean(0) * torch.cat(shares_of_layers).mean(0)).sum() * experts}


@functools.cache
def wanted(family: str) -> Step:
    """By the formulas and autograd, on the whole batch in one forward pass."""
    config = configuration(family, {"train": {"micro_batch": SAMPLES}}, balanced=False)
    trainer = build_trainer(config, Mesh(device="cpu"), make_data(config.model.vocab_size))
    routed: list[tuple[Tensor, Tensor]] = []
    routers = [module for module in trainer.model.modules() if isinstance(module, Router)]
    for router in routers:
        router.register_forward_hook(lambda _module, _inputs, out: routed.append((out[3], out[1])))
    (whole,) = trainer.feed.at(0)
    loss = mean_over_targets(whole.call_of(trainer.model)(), whole.counts_K).sum()
    found = objectives(routed, routers[0].routing)
    terms = [
        found[name] * value * (1 if name == "pooled" else len(routers)) for name, value in coefficients(family).items()
    ]
    (loss + sum(terms)).backward()
    gradients = canonical_gradients(trainer.model, trainer.optimizer)
    return loss.item(), {name: found[name].item() for name in coefficients(family)}, gradients


def step(family: str, sections: Sections, balanced: bool = True) -> Step:
    config = configuration(family, sections, balanced=balanced)
    trainer = build_trainer(config, Mesh(**config.parallel.degrees, device="cpu"), make_data(config.model.vocab_size))
    record, gradients = step_with_gradients(trainer)
    assert record.experts is not None
    return record.loss, dict(record.experts.losses), gradients


def check(found: Sequence[Step], family: str) -> None:
    loss, values, gradients = wanted(family)
    for found_loss, found_values, found_gradients in found:
        print(
            {k: found_values[k] / values[k] - 1 for k in values},
            max(gradient_errors(found_gradients, {name: gradients[name] for name in found_gradients}).values()),
        )
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert found_values == pytest.approx(values, rel=1e-6)
        errors = gradient_errors(found_gradients, {name: gradients[name] for name in found_gradients})
        assert max(errors.values()) < 1e-5
        assert max(error for name, error in errors.items() if name.endswith("gate.weight")) < 1e-6
        assert set(found_gradients) <= set(gradients)


LAYOUTS: dict[str, tuple[int, str, Sections]] = {
    "one process": (1, "qwen3_moe", {}),
    "one process, sigmoid": (1, "glm4_moe", {"train": {"micro_batch": 8}}),
    "micro-batches of 4, full recompute": (1, "qwen3_moe", {"train": {"micro_batch": 4, "recompute": "full"}}),
    "DP 2, EP 2, one micro-batch a rank": (2, "glm4_moe", {"parallel": {"expert": 2}, "train": {"micro_batch": 4}}),
    "TP 2 + SP, CP 2": (
        4,
        "glm4_moe",
        {"parallel": {"tensor": 2, "sequence": True, "context": 2}, "train": {"micro_batch": 2}},
    ),
    "EP 2, PP 2 zbv, ZeRO-2": (
        4,
        "qwen3_moe",
        {"parallel": {"expert": 2, "pipeline": 2, "schedule": "zbv"}, "optimizer": {"zero": 2}},
    ),
    "DP 2, ZeRO-3": (2, "qwen3_moe", {"train": {"micro_batch": 2}, "optimizer": {"zero": 3}}),
    "CP 2": (2, "qwen3_moe", {"parallel": {"context": 2}}),
    "TP 2": (2, "qwen3_moe", {"parallel": {"tensor": 2}, "train": {"micro_batch": 4}}),
    "TP 2 + SP, full recompute": (
        2,
        "qwen3_moe",
        {"parallel": {"tensor": 2, "sequence": True}, "train": {"recompute": "full"}},
    ),
    "PP 2 1f1b": (2, "qwen3_moe", {"parallel": {"pipeline": 2}}),
    "PP 2 interleaved, sigmoid": (2, "glm4_moe", {"parallel": {"pipeline": 2, "schedule": "interleaved"}}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_the_values_and_gradients_of_the_formulas(name: str, ranks: Any) -> None:
    world, family, sections = LAYOUTS[name]
    check(run(ranks, world, step, family, sections), family)
