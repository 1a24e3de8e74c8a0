"""Precision modes train alike, and each finer key changes the dtype that it names."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise.config import Config, load_config
from shardwise.data.open_data import prepare_data
from shardwise.distributed import collectives
from shardwise.train.build import build_trainer
from tests.dist.dense import mesh as shared_mesh
from tests.dist.dense import results
from tests.dist.training import make_config, make_data
from tests.sweeps import few

F, B = "float32", "bfloat16"


Losses = Callable[[str], tuple[float, float]]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """By mode, or `fp8`: evaluation loss of `llama2-tiny` with two blocks, before training and after 60 steps."""
    torch.set_num_threads(1)
    cache = tmp_path_factory.mktemp("cache")
    overrides = ["model.num_hidden_layers=2", "train.steps=60", "train.micro_batch=8", "train.eval_batches=4"]
    overrides += ["train.sequence_length=32"]
    modes = {mode: [f"precision.mode={mode}"] for mode in ("float32", "mixed", "bfloat16")}
    modes["fp8"] = ["precision.mode=null", "precision.matmul=fp8"]

    @functools.cache
    def train(mode: str) -> tuple[float, float]:
        config = load_config("llama2-tiny", [*overrides, *modes[mode]])
        trainer = build_trainer(config, shared_mesh(1), prepare_data(config, cache))
        before, _ = trainer.evaluator.held_out()
        for _ in range(config.train.steps):
            trainer.step()
        return before, trainer.evaluator.held_out()[0]

    return train


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bfloat16", "mixed", "fp8"])
def test_mode_reaches_the_loss_of_float32(mode: str, losses: Losses) -> None:
    before, wanted = losses("float32")
    assert wanted < before - 1.0, f"float32 goes from {before} to {wanted} only: too little to compare with"
    _, found = losses(mode)
    assert abs(found - wanted) <= 0.02 * wanted, f"{mode} ends at {found}, float32 at {wanted}: more than 2 % apart"
    assert found != wanted, f"{mode} trains in float32"


def observe(config: Config) -> dict[str, set[str]]:
    """One step on a rank: the dtypes of what is held, and of the values that go over data parallelism.

    Counts of tokens are integers in any precision.
    """
    mesh = shared_mesh(1)
    trainer = build_trainer(config, mesh, make_data(config.model.vocab_size))
    seen: dict[str, set[str]] = {kind: set() for kind in ("reduce_scatter", "all_reduce", "all_gather")}
    plain = {kind: getattr(collectives, f"{kind}_async") for kind in seen}

    def recording(kind: str) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if tensor.is_floating_point():
                seen[kind].add(str(tensor.dtype))
            return plain[kind](tensor, *args, **options)

        return call

    try:
        for kind in seen:
            setattr(collectives, f"{kind}_async", recording(kind))
        trainer.step()
    finally:
        for kind, function in plain.items():
            setattr(collectives, f"{kind}_async", function)
    buckets = trainer.optimizer.buckets
    state = [value for values in trainer.optimizer._inner.state.values() for value in values.values() if value.dim()]
    held = {
        "parameter": {p.dtype for p in trainer.model.parameters()},
        "gradient": {b.gradients.dtype for b in buckets} | {p.grad.dtype for p in trainer.model.parameters()},
        "master": {b.master.dtype for b in buckets},
        "state": {value.dtype for value in state},
    }
    return {kind: {str(dtype) for dtype in found} for kind, found in held.items()} | seen


KEYS: list[tuple[dict[str, str], tuple[str, str, str, str]]] = [
    ({"mode": "float32"}, (F, F, F, F)),
    ({"mode": "mixed"}, (B, F, F, F)),
    ({"mode": "bfloat16"}, (B, B, B, B)),
    ({"mode": "mixed", "gradient": B}, (B, B, F, F)),
    ({"mode": "mixed", "reduce": B}, (B, F, B, F)),
    ({"mode": "mixed", "optimizer": B}, (B, F, F, B)),
    ({"mode": "bfloat16", "optimizer": F}, (B, B, B, F)),
    ({"mode": "bfloat16", "gradient": F}, (B, F, B, B)),
    ({"mode": "float32", "reduce": B}, (F, F, B, F)),
]
"""Keys of `precision`, and the dtypes of parameters, gradients, their reduction and the optimizer."""


@pytest.mark.parametrize("zero", few([0, 1], 1))
def test_each_key_changes_what_it_names(zero: int, ranks: Any) -> None:
    configs = [(make_config(precision=keys, optimizer={"zero": zero}),) for keys, _ in KEYS]
    everyone = ranks(2).run(results, observe, configs)
    for (keys, expected), *of_ranks in zip(KEYS, *everyone, strict=True):
        parameter, gradient, reduce, optimizer = ({f"torch.{dtype}"} for dtype in expected)
        wire = {"reduce_scatter": reduce, "all_reduce": set(), "all_gather": parameter}
        if not zero:
            wire = {"reduce_scatter": set(), "all_reduce": reduce, "all_gather": set()}
        wanted = {"parameter": parameter, "gradient": gradient, "master": optimizer, "state": optimizer, **wire}
        for found in of_ranks:
            assert found == wanted, f"precision {keys}"
