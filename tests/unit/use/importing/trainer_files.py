"""Checkpoints of a Hugging Face Trainer, by the Trainer's own functions."""

from pathlib import Path
from typing import Any

import torch

from tests.hugging_face import make


def save(case: str, folder: Path, groups: int = 2, **arguments: Any) -> Path:
    """What a Trainer saves after 3 of 9 steps: `checkpoint-3`, with moments that tell of which weight they are."""
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
