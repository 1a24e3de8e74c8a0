"""Progress that a Hugging Face Trainer saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise.checkpoint.storage.root import Root
from shardwise_use.importing.hugging_face import ForeignModel, open_hugging_face
from shardwise_use.importing.trainer import with_progress
from tests.hugging_face import CASES, make


def opened(folder: Path) -> ForeignModel:
    return with_progress(open_hugging_face(Root.of(folder)), folder)


def moments(found: ForeignModel, state: str) -> dict[str, torch.Tensor]:
    assert found.progress is not None
    return {
        tensor.name: torch.frombuffer(bytearray(b"".join(tensor.read())), dtype=torch.float32).view(tensor.shape)
        for tensor in found.progress.states
        if tensor.state == state
    }


def save(case: str, folder: Path, groups: int = 2, **arguments: Any) -> Any:
    """What the Trainer would have saved after three steps, with a moment of each weight that tells which it is of."""
    from transformers import Trainer, TrainingArguments

    options = {"output_dir": str(folder), "report_to": [], "use_cpu": True, "max_steps": 9, "learning_rate": 1e-3}
    trainer = Trainer(model=make(case), args=TrainingArguments(**options | arguments))
    optimizer = trainer.create_optimizer()
    scheduler = trainer.create_scheduler(9, optimizer)
    trainer.lr_scheduler = scheduler
    for _ in range(3):
        # Without gradients nothing is updated.
        optimizer.step()
        scheduler.step()
    if groups == 1:
        optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            value = parameter.detach().clone()
            optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": value, "exp_avg_sq": value**2}
    trainer.state.global_step, trainer.state.max_steps, trainer.state.train_batch_size = 3, 9, 8
    trainer._save_checkpoint(trainer.model, None)
    saved = folder / "checkpoint-3"
    torch.save(optimizer.state_dict(), saved / "optimizer.pt")
    return saved


@pytest.mark.parametrize("case", CASES)
def test_moments_are_those_of_their_weights(tmp_path: Path, case: str) -> None:
    """Of every family, the two groups of the Trainer and a single one."""
    for groups in (2, 1):
        folder = save(case, tmp_path / str(groups), groups)
        found, wanted = opened(folder), load_file(folder / "model.safetensors")
        for state, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
            have = moments(found, state)
            assert have.keys() == {name for name in wanted if not name.endswith("e_score_correction_bias")}
            differing = [name for name, moment in have.items() if not torch.equal(moment, wanted[name] ** power)]
            assert not differing, differing
