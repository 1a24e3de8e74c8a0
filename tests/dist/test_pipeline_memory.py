"""What a step through a pipeline holds at its peak, tensor by tensor, against `cost`."""

from typing import Any

import pytest

from shardwise.config import Config, check_layout
from shardwise.estimates.memory import memory_by_rank
from shardwise.train.build import build_trainer
from tests.dist.dense import mesh as shared_mesh
from tests.dist.test_memory import DROPOUT, SIZES, LiveTensors
from tests.dist.training import FAMILIES, make_config, make_data
from tests.sweeps import few

TOLERANCE = 0.04
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev")


def measure_step(config: Config) -> tuple[int, int]:
    """The pipeline rank, and its bytes at the peak of a step that is not the first."""
    mesh = shared_mesh(config.parallel.tensor, config.parallel.pipeline)
    length, pairs = config.train.sequence_length, "nsp" in config.model.objectives
    data = make_data(config.model.vocab_size, length=length, pairs=pairs)
    with LiveTensors() as live:
        trainer = build_trainer(config, mesh, data)
        trainer.step()
        live.peak = 0
        trainer.step()
    return mesh.pp.rank, live.peak


CASES = [
    *(("gpt", "none", 0.0, 2, schedule) for schedule in SCHEDULES),
    *(("llama", "full", 0.0, 2, schedule) for schedule in SCHEDULES),
    *(("bert", "selective", 0.1, 4, schedule) for schedule in SCHEDULES),
]


@pytest.mark.parametrize(
    ("model", "recompute", "dropout", "degree", "schedule"),
    few(CASES, *(("gpt", "none", 0.0, 2, schedule) for schedule in ("1f1b", "zbv"))),
)
def test_a_step_of_a_pipeline_holds_what_cost_has(
    model: str, recompute: str, dropout: float, degree: int, schedule: str, ranks: Any
) -> None:
    sizes = SIZES | FAMILIES[model] | dict.fromkeys(DROPOUT[model], dropout)
    config = make_config(
        model=sizes | {"num_hidden_layers": max(2 * degree, SIZES["num_hidden_layers"])},
        parallel={"pipeline": degree, "schedule": schedule},
        train={"micro_batch": 2, "global_batch": 8 * degree, "sequence_length": 64, "recompute": recompute},
    )
    memory = memory_by_rank(config, check_layout(config, degree))
    for rank, peak in ranks(degree).run(measure_step, config):
        off = memory[rank].total / peak - 1
        assert abs(off) <= TOLERANCE, f"rank {rank}: held {peak:,}, cost has {memory[rank].total:,} ({off:+.1%})"
