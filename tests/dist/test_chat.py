"""Conversations have the same losses at every layout: each global batch has its own number of targets."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.config import Config
from shardwise.data.formats.chat import _PreparedChat
from shardwise.data.formats.prepared_data import make_batches
from shardwise.data.samples.chat_batches import Conversations
from shardwise.train.build import build_trainer
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_config
from tests.sweeps import few
from tests.unit.data.samples.small_batches import chats

STEPS = 4
# Ranks, then the degrees and the micro-batch of each layout.
LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "tp2": (2, {"tensor": 2}, 8),
    "tp2-sp": (2, {"tensor": 2, "sequence": True}, 4),
    "dp2": (2, {}, 1),
    "dp4": (4, {}, 2),
    "dp2-tp2": (4, {"tensor": 2}, 2),
    "dp2-pp2": (4, {"pipeline": 2}, 2),
}


def settings(parallel: dict[str, Any], micro_batch: int) -> Config:
    return make_config(
        model={"max_position_embeddings": 64},
        parallel=parallel,
        train={"global_batch": 8, "micro_batch": micro_batch, "sequence_length": 20, "eval_every": 4},
        data={"path": "chat.jsonl", "format": "chat"},
    )


def prepared() -> _PreparedChat:
    """Conversations of tokens that repeat, in whose batches the numbers of targets differ."""
    parts = {}
    for number, part in enumerate(("train", "eval", "test")):
        found = chats(60, seed=number, longest=24)
        parts[part] = Conversations(found.tokens * 7 % 131, found.bounds, found.answers)
    return _PreparedChat(Path(), "test", "test", parts)


def losses(config: Config) -> list[float]:
    """The losses before, in and after some steps, and the norms of their gradients."""
    trainer = build_trainer(config, shared_mesh(config.parallel.tensor, config.parallel.pipeline), prepared())
    before = trainer.evaluator.held_out()
    records = [trainer.step() for _ in range(STEPS)]
    return [
        *before,
        *(record.loss for record in records),
        *(r.grad_norm for r in records),
        *trainer.evaluator.held_out(),
    ]


def test_the_batches_count_differently() -> None:
    config = settings({}, 2)
    batches = make_batches(config, prepared(), "train")
    assert batches is not None
    counts = [int(batch.counts[0]) for batch in batches.local_batch(0, 8, 0, 1, 2)]
    assert len(set(counts)) > 1


OFTEN = ("tp2-sp",)


@pytest.mark.parametrize("name", few(LAYOUTS, *OFTEN))
def test_losses_are_those_of_one_process(name: str, ranks: Any) -> None:
    world, parallel, micro_batch = LAYOUTS[name]
    wanted = losses(settings({}, 8))
    for found in ranks(world).run(losses, settings(parallel, micro_batch)):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
