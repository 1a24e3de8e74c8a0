"""Copies that drift apart are found, bit by bit, and named with the ranks at fault."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.base.errors import RunError
from shardwise.models.build import build_model
from shardwise.train import build, trainer
from shardwise.train.model_checks import check_replicas
from shardwise.train.observers import build_observers, run_observers
from shardwise.train.trainer import Trainer
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_config, make_data

NORM = "norm.weight"
QKV = "layers.0.self_attn.qkv.weight"


def flip(tensor: torch.Tensor, position: int, bit: int) -> None:
    """Change one bit of one element, in place."""
    integer = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.detach().view(integer).view(-1)[position] ^= 1 << bit


def drift(tensor: int, dtype: torch.dtype, changes: dict[int, tuple[str, int, int]]) -> str | None:
    """Flip (parameter, element, bit) on the ranks given; what the check says on this rank."""
    mesh = shared_mesh(tensor)
    model = build_model(make_config(), mesh.tp, sequence_parallel=tensor > 1, device=mesh.device, dtype=dtype)
    check_replicas(model, mesh, 1)
    if mesh.world.rank in changes:
        name, element, bit = changes[mesh.world.rank]
        flip(dict(model.named_parameters())[name], element, bit)
    try:
        check_replicas(model, mesh, 5)
    except RunError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("world", "tensor", "dtype", "change", "wanted"),
    [
        # The lowest bit of a data-parallel copy's last element; an odd rank out among four is named by majority.
        (2, 1, torch.float32, {1: ("embed_tokens.weight", 131 * 64 - 1, 0)}, ("embed_tokens.weight", "[1]", "0")),
        (4, 1, torch.bfloat16, {0: (NORM, 3, 12)}, (NORM, "[0]", "1")),
        # A replicated norm on one tensor-parallel rank: its data-parallel peer differs too.
        (4, 2, torch.float32, {3: ("layers.1.input_layernorm.weight", 5, 7)}, ("input_layernorm.weight", "[3]", "1")),
        # Four ranks share two K/V heads: rank 1 has the copy of rank 0's. Local rows: 16 of Q, 8 of K, 8 of V.
        (4, 4, torch.float32, {1: (QKV, 16 * 64, 3)}, ("self_attn.k_proj.weight", "[1]", "0")),
    ],
)
def test_one_flipped_bit_is_found(
    world: int, tensor: int, dtype: torch.dtype, change: dict[int, Any], wanted: tuple[str, str, str], ranks: Any
) -> None:
    texts = set(ranks(world).run(drift, tensor, dtype, change))
    assert len(texts) == 1, "every rank must stop, with the same text"
    text = texts.pop()
    assert text is not None, "not found"
    name, odd, usual = wanted
    assert text.startswith("step 5: ")
    assert name in text
    assert f"on ranks {odd} differs from rank {usual}" in text


def test_what_is_not_copied_may_differ(ranks: Any) -> None:
    """Q rows, MLP columns and vocabulary rows belong to one tensor-parallel rank each."""
    for name, element in ((QKV, 0), ("layers.0.mlp.down_proj.weight", 5), ("lm_head.weight", 0)):
        assert ranks(4).run(drift, 4, torch.float32, {1: (name, element, 3)}) == [None] * 4


def test_a_run_compares_every_few_steps_and_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    monkeypatch.setattr(trainer, "check_replicas", lambda _model, _mesh, step, _optimizer: compared.append(step))
    config = make_config(log={"drift_every": 2}, train={"stop_after": 5, "eval_every": 0})
    run(build.build_trainer(config, shared_mesh(1), make_data()))
    assert compared == [0, 2, 4, 5]


def run(trained: Trainer) -> None:
    """A run that records and saves nothing."""
    reporter: Any = SimpleNamespace(step=lambda _: None)
    unsaved: Any = SimpleNamespace(flags=None, stopped_by=None, state_hashes=None, after_step=lambda *_: None)
    observers = build_observers(trained, reporter, unsaved, None)
    trained.run(partial(run_observers, observers), unsaved, lambda _: nullcontext())


def drifted_start(step: int) -> str | None:
    """Train after `step` steps where the last of four ranks has another bit in the part that rank 1 owns too."""
    config = make_config(parallel={"replicate": 2}, optimizer={"zero": 3}, log={"drift_every": 0})
    trained = build.build_trainer(config, shared_mesh(1), make_data())
    trained.progress.step = step
    if trained.mesh.world.rank == 3:
        flip(next(bucket for bucket in trained.optimizer.buckets if bucket.frees_values).shard, 0, 0)
    try:
        run(trained)
    except RunError as error:
        return str(error)
    return None


@pytest.mark.parametrize("step", [0, 7])
def test_ranks_that_begin_with_other_weights_take_no_step(step: int, ranks: Any) -> None:
    """Copies of parts that ZeRO-3 keeps, also where a run makes no other comparison."""
    (text,) = set(ranks(4).run(drifted_start, step))
    assert text.startswith(f"step {step}: ")
    assert "on ranks [3] differs from rank 1" in text
