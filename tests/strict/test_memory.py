"""The memory estimate for accelerators against the strict device's allocator, which counts bytes as they are asked for.

The allocator of CUDA rounds each block up to 512 bytes, which the estimate leaves out.
"""

import itertools
from collections import Counter
from typing import Any

import pytest

from shardwise.config import Config, check_layout
from shardwise.estimates.memory import memory_by_rank
from shardwise.optim.bucket_layout import ROUNDING_CHUNK_ELEMENTS_ACCELERATOR
from tests.dist.checkpoints import make_trainer
from tests.dist.test_memory import RECOMPUTE, configuration
from tests.dist.training import FAMILIES, Sections, make_config, named
from tests.rank_pool import Pools, RankPool
from tests.strict import device
from tests.strict.ranks import default_device, step_peak
from tests.sweeps import few

TOLERANCE = 0.02
OFTEN = {
    ("llama", None, "none", "float32"),
    ("gpt", "invariant", "full", "mixed"),
    ("llama", "fast", "selective", "bfloat16"),
    ("bert", None, "full", "bfloat16"),
}
"""Each finds another part of the estimate: norms and loss, masks and tied weights, stochastic rounding."""
MODES = ("float32", "mixed", "bfloat16")
CELLS = few(itertools.product(FAMILIES, (None, "fast", "invariant"), RECOMPUTE, MODES), *OFTEN)
WAITS = {"StepMeters.read": 1}
"""By the function that makes the host wait."""
CELLS.append(pytest.param("llama", None, "none", "mixed, bfloat16 moments", id="bfloat16 moments"))


def compare(
    ranks: RankPool, world: int, model: str, dropout: str | None, recompute: str, mode: str, **sections: Any
) -> None:
    train = {"global_batch": 2 * world}
    mode, rounds, _ = mode.partition(", bfloat16 moments")
    precision = {"mode": mode, "moments": "bfloat16" if rounds else None}
    config = configuration(model, dropout, 1, recompute, precision=precision, train=train, **sections)
    layout = check_layout(config, world)
    wanted = memory_by_rank(config, layout, accelerator=True)
    # The numbers for stochastic rounding, which do not grow with the model, would make a difference look small.
    constant = 4 * ROUNDING_CHUNK_ELEMENTS_ACCELERATOR if mode == "bfloat16" or rounds else 0
    for rank, (pipeline_rank, found) in enumerate(ranks.run(step_peak, config)):
        estimate = wanted[pipeline_rank].total
        off = (estimate - constant) / (found - constant) - 1
        said = f"rank {rank}: allocated {found:,}, cost has {estimate:,} ({off:+.2%})"
        print(said)
        assert abs(off) <= TOLERANCE, said


@pytest.mark.parametrize(("model", "dropout", "recompute", "mode"), CELLS)
def test_a_device_allocates_the_cost(model: str, dropout: str | None, recompute: str, mode: str, strict: Pools) -> None:
    compare(strict(1), 1, model, dropout, recompute, mode)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("model", ["llama", "bert"])
@pytest.mark.parametrize(("world", "parallel", "zero"), named("layouts of memory"))
def test_layouts(world: int, parallel: dict[str, Any], zero: int, model: str, recompute: str, strict: Pools) -> None:
    sections = {"parallel": parallel, "optimizer": {"zero": zero}}
    compare(strict(world), world, model, None, recompute, "mixed", **sections)


def step(config: Config, default: bool) -> device.Counters:
    """Of the second step, as the first makes the optimizer's state. default: whether this is torch's default device.

    The parts of both steps are measured, as in steps that are logged.
    """
    with default_device(default):
        trainer = make_trainer(config)
        begin = trainer.meters.clock.begin
        trainer.meters.clock.begin = lambda **_: begin(measures=True)
        trainer.step()
        device.reset_counters()
        record = trainer.step()
    found = device.counters()
    assert record.split["forward"] > 0
    return found


@pytest.mark.parametrize("default", few([False, True], False))
@pytest.mark.parametrize(
    ("world", "sections"),
    named("waits", "invariant dropout, full recompute", "TP 2 and sequence parallelism", "PP 2", "DP 2 with ZeRO-3"),
)
def test_waits_of_a_step(world: int, sections: Sections, default: bool, strict: Pools) -> None:
    """Once on each rank, whatever the number of micro-batches."""
    for rank, found in enumerate(strict(world).run(step, make_config(**sections), default)):
        waits = Counter[str]()
        for (_, line), count in found.waits.items():
            waits[line.rpartition(" ")[2]] += count
        assert waits == WAITS, f"rank {rank}: {found.waits}"
        assert set(found.copies) == {"to device", "to host", "on device"}
        number, size = found.copies["to host"]
        assert (number, size) == (1, 12), "a step copies loss and norms to the host, once"
