"""What ranks measure of their steps: the parts of a step sum to it, and a slow rank is named."""

import time
from typing import Any

import pytest
import torch

from shardwise.config import check_layout
from shardwise.data.formats.prepared_data import random_tokens
from shardwise.distributed import collectives
from shardwise.estimates.communication import step_transfers, wire_bytes
from shardwise.train.build import build_trainer
from shardwise.train.step_meters import STRAGGLER_STEPS
from shardwise.train.step_record import SMOOTHED_STEPS, StepRecord
from tests.dist.checkpoints import make_trainer
from tests.dist.dense import mesh
from tests.dist.test_checkpoint import config_of
from tests.dist.training import make_config, sizes

LAYOUTS: dict[str, dict[str, Any]] = {"TP 2 × DP 2": {"tensor": 2}, "PP 2 × DP 2": {"parallel": {"pipeline": 2}}}
SLOW = 3


def measured(layout: dict[str, Any], steps: int, slow: bool) -> tuple[list[StepRecord], float]:
    """The records of this rank, and the sum of its pauses.

    With `slow` rank 3 pauses before each forward pass, so that its own work takes several times what it does without,
    however busy the machine is. Between the steps the ranks wait for rank 3, as in an evaluation.
    """
    trainer = make_trainer(config_of(**layout))
    paused, seconds = 0.0, 0.02
    if slow and trainer.mesh.world.rank == SLOW:

        def pause(*_: object) -> None:
            nonlocal paused
            start = time.perf_counter()
            time.sleep(seconds)
            paused += time.perf_counter() - start

        parts = trainer.model.children() if trainer.pipeline is not None else [trainer.model]
        for part in parts:
            part.register_forward_pre_hook(pause)
    records = []
    for _ in range(steps):
        before = paused
        records.append(trainer.step(list))
        if trainer.mesh.world.rank == SLOW:
            time.sleep(0.02)
        collectives.all_reduce_(torch.ones(1000), trainer.mesh.world)
        seconds = max(0.02, 3 * ((records[-1].work_seconds or 0.0) - (paused - before)))
    return records, paused


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slow_rank_is_named_and_not_those_that_wait_for_it(layout: str, ranks: Any) -> None:
    results = ranks(4).run(measured, LAYOUTS[layout], STRAGGLER_STEPS + 4, True)
    for rank, (records, paused) in enumerate(results):
        for record in records:
            assert sum(record.split.values()) == pytest.approx(record.seconds, rel=1e-6), f"rank {rank}: {record.split}"
            assert min(record.split.values()) >= 0.0, record.split
            assert (record.work_seconds or 0.0) > 0.0, "waits between the steps are no part of them"
        sent = [record.communication_bytes for record in records]
        assert sent[1:] == sent[:-1], "each step sends the same, whatever is sent between"
        assert sum(sent[0].values()) > 0
        chosen = config_of(**LAYOUTS[layout])
        place = rank // 2 if chosen.parallel.pipeline > 1 else 0
        expected = wire_bytes(step_transfers(chosen, check_layout(chosen, 4), pipeline_rank=place)) or {}
        messages = expected.get(("pp", "send"), 0.0)
        assert (messages > 0) == (chosen.parallel.pipeline > 1)
        assert 0 <= sent[0].get("pp", 0) - messages < 1000, "messages between stages, and a few numbers of the step"
        own = sum(record.work_seconds or 0.0 for record in records)
        assert (paused > 0) == (rank == SLOW)
        assert own > paused, "its pauses are its own work"
    named = [records[-1].straggler for records, _ in results]
    assert all(one == named[0] for one in named)
    assert named[0].rank == SLOW
    assert named[0].relative > 1.5


def test_a_stage_of_other_data_is_no_loss_spike() -> None:
    begin = SMOOTHED_STEPS + 2
    data = {"mixture": {"web": {"dataset": "tiny", "weight": 1.0}}, "stages": [{"at": begin, "weights": {"web": 2.0}}]}
    config = make_config(
        model=sizes(131, 16, 16, layers=1, heads=2) | {"family": "gpt"},
        train={"steps": 2 * begin + 1, "eval_every": 0, "micro_batch": 8},
        data=data,
        optimizer={"lr": 1e-5},
    )
    trainer = build_trainer(config, mesh(1), random_tokens(config.model.vocab_size))
    records = [trainer.step() for _ in range(begin)]
    assert [record.step for record in records if record.loss_spike is not None] == [begin - 1, begin]
    # As if the stage before had been easier.
    trainer.progress.losses.extend([loss / 2 for loss in trainer.progress.losses])
    records = [trainer.step() for _ in range(begin)]
    assert records[0].mean_loss == pytest.approx(records[0].loss)
    assert [record.step for record in records if record.loss_spike is not None] == [2 * begin - 1, 2 * begin]
    assert max(abs(record.loss_spike or 0.0) for record in records) < 6
