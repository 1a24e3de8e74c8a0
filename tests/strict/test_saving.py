"""Checkpoints on the strict device: what is saved has arrived on the host, and a resumed training goes on the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config import Config
from shardwise.train.generation import Sampler, generate
from tests.dist.checkpoints import canonical_state, load, make_trainer, run, save, step_folder
from tests.dist.training import make_config
from tests.rank_pool import RankPool
from tests.strict.ranks import default_device

Strict = Callable[..., RankPool]
BEFORE, AFTER = 2, 2


@pytest.mark.parametrize(
    ("layout", "precision", "others"),
    [
        ({"tensor": 2, "sequence": True}, "float32", [{}, {"pipeline": 2, "schedule": "1f1b"}]),
        ({}, "mixed", []),
    ],
    ids=["TP 2 and sequence parallelism", "DP 2, mixed"],
)
def test_a_resumed_training_goes_on_the_same(
    layout: dict[str, object], precision: str, others: list[dict[str, object]], strict: Strict, tmp_path: Path
) -> None:
    """Bit by bit at the same layout, and with the same losses at the others."""
    config = make_config(parallel=layout, precision={"mode": precision}, optimizer={"zero": 1})
    whole, _ = strict(2).run(run, config, BEFORE, AFTER, None, str(tmp_path))
    assert whole.saved[0].problem is None, whole.saved[0].problem
    resumed, _ = strict(2).run(run, config, AFTER, 0, step_folder(tmp_path, BEFORE), None)
    assert resumed.losses == whole.losses[BEFORE:]
    for kind, tensors in whole.at_end.items():
        for name, tensor in tensors.items():
            assert torch.equal(resumed.state[kind][name], tensor), f"{kind} of {name} differs at the end"
    for other in others:
        config = make_config(parallel=other, optimizer={"zero": 1})
        resumed, _ = strict(2).run(run, config, AFTER, 0, step_folder(tmp_path, BEFORE), None)
        assert resumed.losses == pytest.approx(whole.losses[BEFORE:], rel=1e-6), f"at {other or 'DP 2'}"


def train_save_load(config: Config, root: str, default: bool) -> tuple[list[float], list[int]]:
    """Losses of a training that is saved and goes on from there, and tokens drawn, with torch's default device."""
    with default_device(default):
        trainer = make_trainer(config)
        losses = [trainer.step().loss for _ in range(BEFORE)]
        assert save(trainer, root)[0].problem is None
        resumed = make_trainer(config)
        load(resumed, step_folder(root, BEFORE))
        losses += [resumed.step().loss, resumed.evaluate()[0]]
        canonical_state(trainer)
        written = [*generate(trainer.model, trainer.mesh, [5, 3, 8], 3, Sampler(top_p=0.9), parallel=config.parallel)]
    return losses, written


@pytest.mark.parametrize(
    ("optimizer", "layout"), [("adamw", {}), ("lamb", {"pipeline": 2, "schedule": "1f1b"})], ids=["alone", "PP 2"]
)
def test_torchs_default_device_changes_nothing(
    optimizer: str, layout: dict[str, Any], strict: Strict, tmp_path: Path
) -> None:
    config = make_config(optimizer={"name": optimizer}, parallel=layout)
    wanted, found = (
        strict(layout.get("pipeline", 1)).run(train_save_load, config, str(tmp_path / str(default)), default)
        for default in (False, True)
    )
    assert found == wanted
