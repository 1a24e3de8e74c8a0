"""GPT2-XL's heads and vocabulary, which no number of ranks divides, under ZeRO."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config import Config, config_from, load_config
from shardwise.data.open_data import prepare
from shardwise.models.parameter_counts import parameter_count
from shardwise.train.build import build_trainer
from shardwise.verify.canonical_values import canonical_weights
from tests.dist.dense import mesh as shared_mesh

ODD = {"num_attention_heads": 25, "hidden_size": 50, "intermediate_size": 200, "num_hidden_layers": 2}


def odd_config(zero: int) -> Config:
    """GPT2-XL's own heads, vocabulary and positions; fewer layers and narrower heads."""
    own = load_config("gpt2-xl").model.model_dump()
    return config_from(
        {
            "model": own | ODD | {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
            "train": {"steps": 4, "global_batch": 12, "micro_batch": 1, "sequence_length": 16},
            "optimizer": {"lr": 1e-3, "zero": zero},
            "precision": {"mode": "float32"},
            "data": {"dataset": "tiny"},
        }
    )


def train_odd(zero: int, cache: Path) -> tuple[list[float], dict[str, tuple[int, ...]], dict[str, int]]:
    """Losses, the shapes of the canonical tensors, and the bytes of the optimizer's state on this rank."""
    torch.set_num_threads(1)
    # The tokens of a small vocabulary: 50,257 would want more text than the tiny corpus has.
    data = prepare(load_config("gpt2-xl-tiny"), cache)
    trainer = build_trainer(odd_config(zero), shared_mesh(1), data)
    losses = [trainer.step().loss for _ in range(4)]
    shapes = {name: tuple(tensor.shape) for name, tensor in canonical_weights(trainer.model).items()}
    return losses, shapes, trainer.optimizer.state_bytes()


def test_odd_heads_and_an_odd_vocabulary_train_under_zero(ranks: Any, tmp_path: Path) -> None:
    """At four ranks, which divide neither; padding is no parameter, and no size is rounded."""
    wanted, _, whole = train_odd(0, tmp_path)
    everyone = ranks(4).run(train_odd, 1, tmp_path)
    losses, shapes, _ = everyone[0]
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert shapes["transformer.wte.weight"] == (50257, 50)
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (50, 150)
    parameters = parameter_count(odd_config(1).model)
    assert parameters == sum(math.prod(shape) for shape in shapes.values())
    held = sum(rank["state"] - rank["padding"] for _, _, rank in everyone)
    assert held == whole["state"] - whole["padding"] == 8 * parameters, "two float32 moments a parameter, over all"
