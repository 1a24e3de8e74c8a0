"""What reaches the ranks is what one process reads, whoever reads it, however far ahead."""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.base.errors import DataError
from shardwise.config import Config
from shardwise.data.formats.prepared_data import make_batches
from shardwise.data.samples.batch import Batch
from shardwise.data.samples.causal import TokenBatches
from shardwise.distributed.mesh import Mesh
from shardwise.train.feed import Feed
from shardwise.train.mean_loss import MicroBatch
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import FAMILIES, make_config, make_data, sizes

STEPS = 3
Rows = list[dict[str, np.ndarray]]
"""The inputs of each micro-batch."""


@dataclass
class Read:
    """What one rank got, by step; and how often it read a batch itself."""

    dp_rank: int
    steps: list[list[dict[str, np.ndarray]]]
    evaluation: list[list[dict[str, np.ndarray]]]
    reads: int


def on_host(micro_batches: list[MicroBatch]) -> Rows:
    return [
        {name: tensor.numpy().copy() for name, tensor in each.inputs.items()}
        | {"counts": each.counts_K.numpy().copy(), "samples": each.samples}
        for each in micro_batches
    ]


def by_hand(batches: list[Batch]) -> Rows:
    return [{**batch.inputs, "counts": batch.counts, "samples": batch.samples} for batch in batches]


def feed_of(config: Config, mesh: Mesh) -> tuple[Feed, Any, Any]:
    data = make_data(config.model.vocab_size, pairs="nsp" in config.model.objectives)
    train, evaluation = (make_batches(config, data, part) for part in ("train", "eval"))
    return Feed(config, mesh, train, evaluation), train, evaluation


def read(config: Config) -> Read:
    mesh, size = shared_mesh(config.parallel.tensor, config.parallel.pipeline), config.train.global_batch
    feed, train, evaluation = feed_of(config, mesh)
    reads, plain = [], train.local_batch
    train.local_batch = lambda *arguments: (reads.append(arguments[0]), plain(*arguments))[1]
    steps = [on_host(feed.at(5 + step * size, following=STEPS - step - 1)) for step in range(STEPS)]
    held_out = [on_host(found) for found in feed.evaluation(evaluation, 2)] if evaluation is not None else []
    feed.close()
    return Read(mesh.dp.rank, steps, held_out, len(reads))


@pytest.mark.parametrize(("family", "workers"), [("llama", 3), ("bert", 1)])
def test_every_rank_gets_what_one_process_reads(family: str, workers: int, ranks: Any) -> None:
    config = make_config(
        model=sizes(131, 16, 16, layers=1, heads=2) | FAMILIES[family],
        parallel={"tensor": 2},
        train={"global_batch": 8, "micro_batch": 2},
        data={"workers": workers},
    )
    _, batches, evaluation = feed_of(config, Mesh(device="cpu"))
    found: list[Read] = ranks(4).run(read, config)
    for rank, one in enumerate(found):
        for step, micro_batches in enumerate(one.steps):
            wanted = by_hand(batches.local_batch(5 + 8 * step, 8, one.dp_rank, 2, 2))
            assert len(wanted) == 2
            np.testing.assert_equal(micro_batches, wanted, f"rank {rank}, step {step}")
        wanted = by_hand(list(evaluation.eval_batches(config.train.eval_batches, 8, one.dp_rank, 2, 2)))
        np.testing.assert_equal([each for at_once in one.evaluation for each in at_once], wanted, f"rank {rank}")
    assert [one.reads for one in found] == [STEPS, 0, STEPS, 0], "one rank of each group reads, and nothing twice"


class Slow(TokenBatches):
    """Holds every batch back until it is let go."""

    def __init__(self) -> None:
        super().__init__(np.arange(16 * 64 + 1, dtype=np.int32), 16, 0)
        self.asked: list[int] = []
        self.go = threading.Semaphore(0)

    def local_batch(self, consumed: int, *layout: int) -> list[Batch]:
        self.asked.append(consumed)
        assert self.go.acquire(timeout=30)
        return super().local_batch(consumed, *layout)


def test_as_many_batches_are_read_ahead_as_there_are_workers_and_none_beyond_the_end() -> None:
    batches = Slow()
    config = make_config(data={"workers": 2}, train={"global_batch": 4, "micro_batch": 4})
    feed = Feed(config, Mesh(device="cpu"), batches, None)
    for _ in range(10):
        batches.go.release()
    feed.at(0, following=3)
    feed.at(4, following=2)
    feed.at(8, following=1)
    feed.at(12, following=0)
    assert sorted(batches.asked) == [0, 4, 8, 12], "each global batch is read once, and none after the last"
    feed.at(0)
    assert batches.asked[-1] == 0, "another position than that read ahead is read anew"
    feed.close()


class Broken(TokenBatches):
    def local_batch(self, consumed: int, *layout: int) -> list[Batch]:
        if consumed:
            raise DataError("row 7 is broken")
        return super().local_batch(consumed, *layout)


def test_an_error_of_a_reading_thread_comes_with_the_step_that_needs_the_batch() -> None:
    config = make_config(train={"global_batch": 4, "micro_batch": 4})
    feed = Feed(config, Mesh(device="cpu"), Broken(np.arange(1025, dtype=np.int32), 16, 0), None)
    assert torch.equal(feed.at(0, following=5)[0].counts_K, torch.tensor([64]))
    with pytest.raises(DataError, match="row 7 is broken"):
        feed.at(4, following=4)
    feed.close()


def test_a_position_that_nobody_expected_is_read_anew() -> None:
    """As after batches that are left out."""
    config = make_config(data={"workers": 2})
    batches = make_batches(config, make_data(), "train")
    ahead, anew = (Feed(config, shared_mesh(1), batches, None) for _ in range(2))
    ahead.at(0, following=3)
    np.testing.assert_equal(on_host(ahead.at(24)), on_host(anew.at(24)))
    ahead.close()
    anew.close()
