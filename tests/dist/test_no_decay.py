"""optimizer.no_decay names the weights that do not decay; without it they are biases and norms."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.config import Config
from shardwise.distributed.placement import placements
from shardwise.models.build import build_model
from shardwise.train.build import _parameter_groups, _require_matches
from tests.dist.dense import mesh
from tests.dist.dense import run as on_ranks
from tests.dist.training import FAMILIES, make_config, sizes

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
