"""The model of docs/own-model.md: what holds for a shipped family at any layout holds for it."""

import functools
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.config import Config
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.placement import placements
from shardwise.verify.canonical_values import gradient_errors
from tests.dist import dense
from tests.dist.training import make_config, train
from tests.e2e.test_own_model import OPTIONAL, blocks

SIZES = {
    "vocab_size": 131,  # odd: the vocabulary is padded when it is cut
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def training(name: str, tensor: int, sequence: bool) -> Config:
    return make_config(
        model={"family": "examples.own_model.sharded:Decoder", **SIZES},
        parallel={"tensor": tensor, "sequence": sequence},
        optimizer={"name": name},
    )


@functools.cache
def alone(name: str) -> Any:
    return train(training(name, 1, False))


@pytest.mark.parametrize(
    ("tensor", "sequence"),
    [
        pytest.param(2, False, id="tp2-dp2", marks=pytest.mark.slow),
        pytest.param(2, True, id="tp2-dp2-sp"),
        pytest.param(4, True, id="tp4-sp", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["adamw", pytest.param("lamb", marks=pytest.mark.slow)])
def test_every_layout_trains_alike(name: str, tensor: int, sequence: bool, ranks: Any) -> None:
    found, *_ = ranks(4).run(train, training(name, tensor, sequence))
    wanted = alone(name)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-5)
    assert found.evaluation == pytest.approx(wanted.evaluation, rel=1e-5)
    assert all(torch.equal(found.weights[key], wanted.weights[key]) for key in wanted.weights), "at step 0"
    assert max(gradient_errors(found.gradients, wanted.gradients).values()) <= 1e-5
    assert wanted.losses[-1] < wanted.losses[0]


def page_module() -> ModuleType:
    (code,) = (block for block in blocks("python", OPTIONAL) if "class Scale" in block)
    module = ModuleType("page")
    exec(compile(code, "own-model.md", "exec"), module.__dict__)
    return module


def scaled(tensor: int) -> tuple[list[tuple[str, bool]], float]:
    mesh: Mesh = dense.mesh(tensor)
    model = nn.ModuleDict({"scale": page_module().Scale(4, mesh.tp, sequence_parallel=tensor > 1)})
    pieces = [(piece.name, piece.partial) for _, _, record in placements(model) for piece in record.pieces]
    return pieces, float(model["scale"](torch.ones(3, 2, 4)).sum().detach())


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_parameter_of_ones_own_says_what_it_is(tensor: int, ranks: Any) -> None:
    for found in dense.run(ranks, tensor, scaled, tensor):
        assert found == ([("scale.weight", tensor > 1)], 24.0)
