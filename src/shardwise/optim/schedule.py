"""Learning-rate schedules as a pure function of the step."""

from __future__ import annotations

import math

from shardwise.config import Config


def learning_rate(config: Config, step: int) -> float:
    """The rate of optimizer step `step` (from 1): linear warmup to `lr`, then decay to `min_lr` at the last step.

    Warmup step s of w has `lr · s / w`. With progress p from 0 at the end of the warmup to 1 at `train.steps`, the
    decay is `min_lr + (lr - min_lr) · f(p)`: `1 - p` linear, `(1 + cos πp) / 2` cosine, 1 constant.
    """
    o = config.optimizer
    if step <= o.warmup_steps:
        return o.lr * step / o.warmup_steps
    progress = min(1.0, (step - o.warmup_steps) / max(1, config.train.steps - o.warmup_steps))
    shape = {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2, "constant": 1.0}[o.schedule]
    return o.min_lr + (o.lr - o.min_lr) * shape
