"""Objectives of routers: the formula on the whole batch, one curve at every layout, and transformers' own number."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.config import Config
from shardwise.config.model import FAMILIES
from shardwise.config.routing import Routing
from shardwise.distributed.mesh import Group, Mesh
from shardwise.layers.balance import OBJECTIVES, Balance, counted
from shardwise.layers.execution import Execution, made_with
from shardwise.layers.experts import Router, experts_of
from shardwise.models.llama import Llama
from shardwise.train.build import build_trainer
from shardwise.train.mean_loss import mean_over_targets
from shardwise.verify.canonical_values import canonical_gradients, gradient_errors, step_with_gradients
from tests.dist.dense import run
from tests.dist.test_experts import SCALE, SIZES, B, S, batch, theirs_of
from tests.dist.training import SPARSE, Sections, make_config, make_data, named
from tests.sweeps import few

COEFFICIENTS = {"sequence": 0.05, "batch": 0.07, "pooled": 0.03, "z": 0.002}
SAMPLES = 8
Step = tuple[float, dict[str, float], dict[str, Tensor]]
"""The loss, each objective, and the gradient of each canonical tensor."""


def coefficients(family: str) -> dict[str, float]:
    return {name: value for name, value in COEFFICIENTS.items() if name != "pooled" or family != "glm4_moe"}


def configuration(family: str, sections: Sections, *, balanced: bool = True) -> Config:
    """Of Qwen3's four blocks the last two, which are a stage of a pipeline of two ranks, have no experts."""
    model = {**SIZES, **SPARSE[family], "vocab_size": 131, "num_hidden_layers": 4}
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
    [detail] = record.details
    return record.loss, dict(detail.scalars["balance"]), gradients


def check(found: Sequence[Step], family: str) -> None:
    loss, values, gradients = wanted(family)
    for found_loss, found_values, found_gradients in found:
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert found_values == pytest.approx(values, rel=1e-6)
        errors = gradient_errors(found_gradients, {name: gradients[name] for name in found_gradients})
        assert max(errors.values()) < 1e-5
        assert all(error < 1e-6 for name, error in errors.items() if name.endswith("gate.weight"))


@pytest.mark.parametrize(
    ("world", "family", "sections"), named("balance", "one process", "EP 2, full recompute", "TP 2 + SP, CP 2")
)
def test_a_layout_has_formulas_values_and_gradients(world: int, family: str, sections: Sections, ranks: Any) -> None:
    check(run(ranks, world, step, family, sections), family)


def test_objectives_change_neither_the_loss_nor_an_evaluation() -> None:
    """Bit for bit; an evaluation, also one with gradients, adds nothing to the curves."""
    balanced, plain = (
        build_trainer(config, Mesh(device="cpu"), make_data(config.model.vocab_size))
        for config in (configuration("qwen3_moe", {}, balanced=value) for value in (True, False))
    )
    assert balanced.evaluator.held_out() == plain.evaluator.held_out()
    (whole, *_) = plain.feed.at(0)
    gradients = []
    for trainer in (balanced, plain):
        trainer.model.eval()
        trainer.optimizer.zero_grad()
        with trainer.optimizer.local_gradients():
            whole.call_of(trainer.model)().sum().backward()
        gradients.append(canonical_gradients(trainer.model, trainer.optimizer))
        assert not torch.stack([layer.sums for layer in experts_of(trainer.model)])[:, 1:].any()
        trainer.optimizer.zero_grad()
        trainer.model.train()
        for layer in experts_of(trainer.model):
            layer.loads.zero_()
            layer.sums.zero_()
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    records = [trainer.step() for trainer in (balanced, plain)]
    assert records[0].loss == records[1].loss
    assert records[0].details[0].facts["balance_losses"].keys() == COEFFICIENTS.keys()
    assert not records[1].details[0].facts
    # The counts of a step are never those of the next one.
    assert all(layer.losses is not None and layer.losses.rows is None for layer in experts_of(balanced.model))


@pytest.mark.parametrize("family", few(["olmoe", "qwen3_moe", "mixtral"], "qwen3_moe"))
def test_transformers_has_the_same_loss_with_its_balance_term(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family].model_validate(SIZES | SPARSE[family])
    routings = [config.routing(layer) for layer in range(config.num_hidden_layers)]
    layers = len(routings) - routings.count(None)
    experts = config.any_routing.experts
    coefficient = 0.3
    balance = Balance(pooled=coefficient, samples=B, length=S, layers=layers, experts=experts)
    with made_with(Execution(balance=balance)):
        model = Llama(config, Group(), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SCALE if parameter.ndim > 1 else 1.0)
    theirs = theirs_of(model, tmp_path, output_router_logits=True, router_aux_loss_coef=coefficient)
    ids, targets = batch()
    # Its own labels are the ids, which it shifts: the last token has no target.
    out = theirs(ids.t(), labels=ids.t())
    out.loss.backward()
    with pytest.raises(RuntimeError, match="rows of the global batch must be counted before"):
        model(ids, targets)
    with counted(model, balance):
        model(ids, targets)
    unlabelled = torch.cat([ids[1:], torch.full_like(ids[:1], -100)])
    loss = model(ids, unlabelled) / ((S - 1) * B)
    # The gradient of the term is that of `coefficient`, by whatever the loss is divided.
    loss.backward()
    pooled = sum(layer.sums[1 + OBJECTIVES.index("pooled")].item() for layer in experts_of(model))
    assert out.aux_loss.item() == pytest.approx(pooled, rel=1e-6)
    assert loss.item() + coefficient * pooled == pytest.approx(out.loss.item(), rel=1e-6)
    routers = [parameter for name, parameter in theirs.named_parameters() if name.endswith("mlp.gate.weight")]
    for layer, router in zip(experts_of(model), routers, strict=True):
        ours = layer.router.weight.grad
        assert (ours - router.grad).norm() / router.grad.norm() < 1e-5
