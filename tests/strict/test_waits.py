"""How often a step makes the host wait for the device, and what it copies."""

from collections import Counter
from collections.abc import Callable

from shardwise.config import Config
from shardwise.testing import RankPool
from tests.dist.checkpoints import make_trainer
from tests.dist.training import make_config
from tests.strict import device

WAITS = {"Trainer.step": 1}
"""By the function that makes the host wait."""


def step(config: Config) -> device.Counters:
    trainer = make_trainer(config)
    trainer.step()  # the first makes the optimizer's state
    device.reset_counters()
    trainer.step()
    return device.counters()


def test_waits_of_a_step(strict: Callable[..., RankPool]) -> None:
    """With 4 micro-batches. A change that takes a wait away takes it from this list too."""
    found = strict(1).run(step, make_config())[0]
    waits = Counter[str]()
    for (_, line), count in found.waits.items():
        waits[line.rpartition(" ")[2]] += count
    assert waits == WAITS, found.waits
    assert set(found.copies) == {"to device", "to host", "on device"}
    assert found.copies["to host"] == (1, 12), "a step copies loss, norms and the number of targets to the host, once"
