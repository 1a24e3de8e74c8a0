"""The sample at the end of a run, which a stop of any rank cuts short."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise_use.generation import _SampleText, draw_sample
from tests.dist.checkpoints import make_trainer
from tests.dist.dense import run as on_ranks
from tests.dist.training import make_config, make_data

BYTES = 257
"""A vocabulary of every byte and the end of a document."""


def sample(tokenizer: Path, tensor: int, zero: int, asked: bool) -> _SampleText:
    """Of an untrained model; `asked`: the last rank alone is asked to stop, once 2 of the 6 tokens are drawn."""
    config = make_config(
        model={"vocab_size": BYTES}, parallel={"tensor": tensor}, optimizer={"zero": zero}, log={"sample_tokens": 6}
    )
    trainer = make_trainer(config)
    world = trainer.mesh.world
    answers = iter([None, None, None, "SIGUSR1"] if asked and world.rank == world.size - 1 else [])
    data = replace(make_data(), tokenizer_path=tokenizer)
    optimizer = trainer.optimizer
    with optimizer.gathered(all_units=False):
        return draw_sample(
            config, trainer.model, trainer.mesh, data, lambda: next(answers, None), in_step=optimizer.gathers_in_passes
        )


@pytest.mark.parametrize(("tensor", "zero"), [(1, 1), (2, 1), (1, 3)], ids=["DP 2", "TP 2", "DP 2 with ZeRO-3"])
def test_a_stop_is_obeyed_while_the_sample_is_drawn(tensor: int, zero: int, ranks: Any, tmp_path: Path) -> None:
    train_tokenizer(["a b"], BYTES, "bytes").save(tmp_path)
    stopped = on_ranks(ranks, 2, sample, tmp_path, tensor, zero, True)
    assert stopped == [_SampleText(None, "SIGUSR1")] * 2
    drawn = on_ranks(ranks, 2, sample, tmp_path, tensor, zero, False)
    texts = [each.text is not None for each in drawn]
    assert texts == [True, tensor == 2], "replica 0 draws"
    assert [each.stopped_by for each in drawn] == [None, None]
