"""The learning rate of each step: warmup, decay and a constant end, as a pure function of the step."""

from __future__ import annotations

import math

from shardwise.config import Config


def learning_rate(config: Config, step: int) -> float:
    """Return the rate of optimizer step `step` (from 1): linear warmup to `lr`, decay to `min_lr`, then constant.

    Warmup step s of w has `lr · s / w`, so step w has `lr`; without warmup, step 1 has. The last `constant_steps`
    steps have `min_lr`; without them, the step after the run's last would be the first at `min_lr`. So no step has a
    rate of 0. With progress p from 0 at the peak to 1 at the first step at `min_lr`, the decay is
    `min_lr + (lr - min_lr) · f(p)`: `1 - p` linear, `(1 + cos πp) / 2` cosine, 1 constant.
    """
    o = config.optimizer
    if step < o.warmup_steps:
        return o.lr * step / o.warmup_steps
    peak = max(1, o.warmup_steps)
    first_at_minimum = config.train.steps - o.constant_steps + 1
    progress = min(1.0, (step - peak) / (first_at_minimum - peak))
    shape = {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2, "constant": 1.0}[o.schedule]
    return o.min_lr + (o.lr - o.min_lr) * shape
