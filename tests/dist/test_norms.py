"""Norms and partial gradients of a model that is cut, over every layout."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import LAMB, ColumnParallelLinear, GQAQKVColumnParallelLinear, Mesh, ZeroRedundancyOptimizer
from shardwise.base.errors import ConfigError
from shardwise.config import Config
from shardwise.distributed.placement import placements
from shardwise.models.build import build_model
from shardwise.train.build import _parameter_groups, _require_matches, build_trainer
from shardwise.verify.canonical_values import canonical_gradients, canonical_weights
from tests.dist.checkpoints import make_trainer
from tests.dist.dense import mesh
from tests.dist.dense import mesh as shared_mesh
from tests.dist.dense import run as on_ranks
from tests.dist.training import FAMILIES, cases, make_config, make_data, sizes
from tests.sweeps import few


def cut_norms(sections: dict[str, Any]) -> tuple[list[float], list[float], int]:
    """Norms and what they should be, and the sums of partial gradients over the tensor-parallel ranks."""
    config = make_config(**sections)
    mesh = shared_mesh(config.parallel.tensor)
    trainer = build_trainer(config, mesh, make_data())
    trainer.passes.run(trainer.feed.at(0), step=1)
    before = sum(meter.calls["all_reduce"] for meter in mesh.tp.meters.values())
    found = [float(norm) for norm in trainer.optimizer.norms()]
    sums = sum(meter.calls["all_reduce"] for meter in mesh.tp.meters.values()) - before
    gradients = canonical_gradients(trainer.model, trainer.optimizer)
    weights = canonical_weights(trainer.model)
    wanted = [float(torch.stack([t.norm() for t in of.values()]).norm()) for of in (gradients, weights)]
    trainer.optimizer.zero_grad()
    return found, wanted, sums


CUT = cases("norms")


@pytest.mark.parametrize(("world", "sections", "sums"), few(CUT, CUT[1], CUT[3], CUT[4]))
def test_norms_count_every_element_once(world: int, sections: dict[str, Any], sums: int, ranks: Any) -> None:
    """And partial gradients are summed once a step for each group, however many micro-batches (fault 1)."""
    for found, wanted, counted in ranks(world).run(cut_norms, sections):
        assert found == pytest.approx(wanted, rel=1e-6)
        assert counted == sums


def recorded_norms(every: int | None) -> list[tuple[float, float | None]]:
    """Norms in the records of four steps, of which a reporter logs each `every`th; None: there is no reporter."""
    trainer = make_trainer(make_config(parallel={"tensor": 2}))
    if every is not None:
        trainer.log_every = every
    records = [trainer.step() for _ in range(4)]
    return [(record.grad_norm, record.param_norm) for record in records]


def test_parameters_are_measured_in_logged_steps_and_gradients_alike_in_all(ranks: Any) -> None:
    measured = ranks(2).run(recorded_norms, None)[0]
    wanted = [(gradient, None if step % 2 else parameter) for step, (gradient, parameter) in enumerate(measured, 1)]
    assert ranks(2).run(recorded_norms, 2)[0] == wanted


def short_copied_bias() -> list[float]:
    """K/V biases of one element each, shared by two ranks, closer together than the alignment of parameters."""
    mesh = shared_mesh(4)
    layers = nn.ModuleList(
        GQAQKVColumnParallelLinear(
            4, (4, 2), gather_output=False, head_dim=1, group=mesh.tp, seed=1, names=[f"{i}.{n}" for n in "qkv"]
        )
        for i in range(2)
    )
    optimizer = ZeroRedundancyOptimizer(layers.parameters(), torch.optim.SGD, mesh=mesh)
    for p in layers.parameters():
        p.grad = torch.ones_like(p)
    found = float(optimizer.norms()[0])
    return [found, float(nn.utils.get_total_norm(list(canonical_gradients(layers, optimizer).values())))]


def plain_beside_cut() -> list[float]:
    """A model with plain torch layers beside sharded ones."""
    mesh = shared_mesh(2)
    model = nn.ModuleList([ColumnParallelLinear(8, 12, group=mesh.tp, seed=1, name="cut"), nn.LayerNorm(8)])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), LAMB, mesh=mesh, average=False)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    return [float(optimizer.norms()[0]), math.sqrt(12 * 8 + 12 + 8 + 8)]


@pytest.mark.parametrize("measure", [short_copied_bias, plain_beside_cut])
def test_copies_and_plain_layers_count_once(measure: Callable[[], list[float]], ranks: Any) -> None:
    for found, wanted in ranks(4).run(measure):
        assert found == pytest.approx(wanted, rel=1e-6)


def same_name_twice() -> str:
    mesh = Mesh(pipeline=2, device="cpu")
    layer = ColumnParallelLinear(8, 12, group=mesh.tp, seed=1, name="layers.0")
    with pytest.raises(ValueError, match="must together hold each canonical tensor once") as caught:
        ZeroRedundancyOptimizer(layer.parameters(), LAMB, mesh=mesh).step()
    return str(caught.value)


def test_a_tensor_held_twice_is_an_error_on_every_rank(ranks: Any) -> None:
    for said in ranks(4).run(same_name_twice):
        assert "layers.0.weight of shape (12, 8): 192 of 96 elements" in said
        assert said.endswith("Give mesh=, and each layer a name of its own")


MODEL = sizes(hidden=32, feed_forward=48, heads=4) | FAMILIES["llama"]


def model_of(tensor: int, no_decay: list[str] | None) -> tuple[nn.Module, Config]:
    config = make_config(
        model=MODEL | {"attention_bias": True},
        parallel={"tensor": tensor},
        optimizer={"weight_decay": 0.1, "no_decay": no_decay},
    )
    return build_model(config, mesh(tensor).tp, sequence_parallel=False, dtype=torch.float32), config


def decaying(tensor: int, no_decay: list[str] | None) -> dict[str, float]:
    """Canonical name → weight decay on this rank."""
    model, config = model_of(tensor, no_decay)
    names: dict[Any, list[str]] = {p: [piece.name for piece in record.pieces] for _, p, record in placements(model)}
    return {
        name: float(group["weight_decay"])
        for group in _parameter_groups(model, config.optimizer)
        for parameter in group["params"]
        for name in names[parameter]
    }


@pytest.mark.parametrize("size", [1, 2])
def test_weights_without_decay(ranks: Any, size: int) -> None:
    for no_decay, expected in (
        (None, lambda name: "norm" not in name and not name.endswith("bias")),
        ([], lambda name: True),
        (["model.embed_tokens.weight", "*.bias"], lambda name: "embed" not in name and not name.endswith("bias")),
    ):
        for found in on_ranks(ranks, size, decaying, size, no_decay):
            assert found == {name: 0.1 if expected(name) else 0.0 for name in found}
            assert {"model.norm.weight", "model.embed_tokens.weight"} <= found.keys()


def test_a_pattern_that_splits_a_parameter_is_refused() -> None:
    problem = "no_decay .*must match all or none of .*q_proj.*it matches .*k_proj"
    with pytest.raises(ConfigError, match=problem):
        decaying(1, ["*.k_proj.weight"])


def refused(tensor: int, no_decay: list[str]) -> str:
    """What is said of the patterns on this rank, which holds some of the weights."""
    try:
        _require_matches(no_decay, model_of(tensor, no_decay)[0], mesh(tensor))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("size", [1, 2])
def test_a_pattern_that_matches_nothing_is_refused(ranks: Any, size: int) -> None:
    for found in on_ranks(ranks, size, refused, size, ["*norm.weight", "model.embed_token.weight"]):
        assert found == (
            "optimizer.no_decay (*norm.weight and model.embed_token.weight) must match names of weights, and "
            "model.embed_token.weight matches none; the nearest is model.embed_tokens.weight"
        )
    assert not any(on_ranks(ranks, size, refused, size, ["*norm.weight", "model.embed_tokens.weight"]))
