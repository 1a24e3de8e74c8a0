"""A config of torchtitan becomes a recipe with the model and, at every step, the rate of torchtitan."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan.components.optimizer")

from torchtitan.components.optimizer import LRSchedulersContainer

from shardwise.config import config_from_sections
from shardwise.optim.learning_rate import learning_rate
from shardwise_use.porting.recipes import recipe_of

STEPS, LR = 60, 3e-3
OURS = Path(__file__).parents[2] / "unit" / "use" / "others" / "titan.json"
"""What torchtitan 0.3.0 saved of its debug model."""


@pytest.mark.parametrize("decay_type", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize("decay_ratio", [None, 0.25])
def test_every_step_has_the_rate_of_the_maker(decay_type: Any, decay_ratio: float | None, tmp_path: Path) -> None:
    scheduler = LRSchedulersContainer.Config(
        warmup_steps=7, decay_ratio=decay_ratio, decay_type=decay_type, min_lr_factor=0.1
    )
    saved = json.loads(OURS.read_text(encoding="utf-8"))
    saved["training"]["steps"] = STEPS
    saved["optimizer"]["param_groups"][0]["optimizer_kwargs"]["lr"] = LR
    saved["lr_scheduler"] = scheduler.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(saved), encoding="utf-8")
    made = recipe_of(str(tmp_path / "config.json"))
    assert made.problems == []
    config = config_from_sections(made.sections)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedulers = scheduler.build(optimizers=[optimizer], training_steps=STEPS)
    theirs = []
    for _ in range(STEPS):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedulers.step()
    ours = [learning_rate(config.optimizer, STEPS, step) for step in range(1, STEPS + 1)]
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-15)
