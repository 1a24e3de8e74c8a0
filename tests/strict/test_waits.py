"""How often a step makes the host wait for the device, and what it copies."""

from collections import Counter

import pytest

from shardwise.config import Config
from tests.dist.checkpoints import make_trainer
from tests.dist.training import make_config
from tests.rank_pool import Pools
from tests.strict import device
from tests.strict.ranks import default_device

WAITS = {"StepMeters.read": 1}
"""By the function that makes the host wait."""


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


@pytest.mark.parametrize(
    "default", [pytest.param(False, id=""), pytest.param(True, id="default device", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("world", "sections"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (1, {"model": {"attention_dropout": 0.1}, "train": {"dropout_mode": "invariant", "recompute": "full"}}),
        (2, {"parallel": {"tensor": 2, "sequence": True}}),
        (2, {"parallel": {"pipeline": 2, "schedule": "1f1b"}}),
        pytest.param(2, {"optimizer": {"zero": 1}}, marks=pytest.mark.slow),
        (2, {"optimizer": {"zero": 3}}),
    ],
    ids=[
        "one rank",
        "invariant dropout, full recompute",
        "TP 2 and sequence parallelism",
        "PP 2",
        "DP 2 with ZeRO-1",
        "DP 2 with ZeRO-3",
    ],
)
def test_waits_of_a_step(world: int, sections: dict[str, dict[str, object]], default: bool, strict: Pools) -> None:
    """Once on each rank, whatever the number of micro-batches."""
    for rank, found in enumerate(strict(world).run(step, make_config(**sections), default)):
        waits = Counter[str]()
        for (_, line), count in found.waits.items():
            waits[line.rpartition(" ")[2]] += count
        assert waits == WAITS, f"rank {rank}: {found.waits}"
        assert set(found.copies) == {"to device", "to host", "on device"}
        number, size = found.copies["to host"]
        assert (number, size) == (1, 12), "a step copies loss and norms to the host, once"
