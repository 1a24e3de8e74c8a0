"""Each combination of schedule, recompute, tying and dropout mode trains like one process."""

import functools
import itertools
from typing import Any, get_args

import pytest
import torch

from shardwise.config import Config, DropoutMode, Recompute, Schedule
from shardwise.train.build import build_trainer
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_config, make_data

STEPS = 4
CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": ("none", *get_args(Schedule)),
    "recompute": get_args(Recompute),
    "tying": ("untied", "tied"),
    "dropout": ("none", *get_args(DropoutMode)),
}
"""Schedule `none`: no pipeline."""
MODEL: dict[str, Any] = {
    "family": "gpt", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 16,
}  # fmt: skip
Cell = tuple[str, str, str]
"""Recompute, tying, dropout."""


def config_of(schedule: str, cell: Cell) -> Config:
    recompute, tying, dropout = cell
    probability = 0.0 if dropout == "none" else 0.1
    pipelined = {"pipeline": 2, "schedule": schedule} if schedule != "none" else {}
    mode = {} if dropout == "none" else {"dropout_mode": dropout}
    return make_config(
        model=MODEL
        | {"tie_word_embeddings": tying == "tied"}
        | dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop", "ffn_dropout"), probability),
        parallel=pipelined,
        train={"recompute": recompute, "micro_batch": 1 if pipelined else 2, "global_batch": 8, **mode},
    )


def losses(configs: list[Config]) -> list[list[float]]:
    found = []
    for config in configs:
        mesh = shared_mesh(1, config.parallel.pipeline)
        trainer = build_trainer(config, mesh, make_data(length=16))
        found.append([trainer.step().loss for _ in range(STEPS)])
    return found


@functools.cache
def alone(tying: str, dropout: str) -> list[float]:
    torch.set_num_threads(1)
    return losses([config_of("none", ("none", tying, dropout))])[0]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", CHOICES["schedule"])
def test_each_combination_trains_like_one_process(schedule: str, ranks: Any) -> None:
    """Masks that no layout changes give one process's losses, others those of the same layout without recompute."""
    here = list(itertools.product(*(CHOICES[name] for name in ("recompute", "tying", "dropout"))))
    wanted = dict.fromkeys([*here, *(("none", tying, dropout) for _, tying, dropout in here)])
    size = 1 if schedule == "none" else 2
    ran = dict(zip(wanted, ranks(size).run(losses, [config_of(schedule, cell) for cell in wanted])[0], strict=True))
    for cell in here:
        _, tying, dropout = cell
        found = ran[cell]
        assert found == ran["none", tying, dropout], f"{schedule}, {cell}: recompute changes the losses"
        if dropout != "fast":
            assert found == pytest.approx(alone(tying, dropout), rel=1e-5), f"{schedule}, {cell}"
