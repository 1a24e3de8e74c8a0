"""The curve by points, which `recipes --from` tells, has at every step the rate of Megatron-LM's scheduler."""

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from shardwise.config import OptimizerConfig
from shardwise.optim.learning_rate import learning_rate

STEPS, WARMUP, END, BATCH = 20, 5, 15, 8


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_points_have_the_rates_of_the_maker(style: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.param_groups[0] |= {"max_lr": 1.0, "min_lr": 0.1, "wd_mult": 1.0, "lr_mult": 1.0}
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.1,
        lr_warmup_steps=WARMUP * BATCH,
        lr_decay_steps=END * BATCH,
        lr_decay_style=style,
        start_wd=0,
        end_wd=0,
        wd_incr_steps=STEPS,
        wd_incr_style="constant",
    )
    theirs = []
    for _ in range(STEPS):
        theirs.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=BATCH)
    points = [{"at": 1, "factor": 0}, {"at": WARMUP + 1, "factor": 1}, {"at": END + 1, "factor": 0.1, "shape": style}]
    ours = OptimizerConfig.model_validate({"lr": 1.0, "schedule": "points", "points": points})
    assert [learning_rate(ours, STEPS, step) for step in range(1, STEPS + 1)] == pytest.approx(theirs, rel=1e-9)
