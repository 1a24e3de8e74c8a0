"""The learning rate of each step, as a pure function of the step; `config/learning_rate_specs.py` lists schedules.

A curve is a list of points, each a step with its rate, and shapes of the ways between them. Before the first point the
rate is that of the first, after the last one that of the last.

The warmup rises from 0 at step 0, so that step s of w has `lr · s / w`; without warmup, step 1 has `lr`. The last
`constant_steps` steps have `min_lr`; without them, the step after the run's last would be the first at `min_lr`. So no
step of a schedule with a warmup has a rate of 0 unless `min_lr` is 0 there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.config.learning_rate_specs import LEARNING_RATES
from shardwise.config.optimizer import DecayShape, OptimizerConfig


@dataclass(frozen=True)
class RateAtStep:
    """A point of an optimizer's schedule: the learning rate at a step, and the shape of the way to it."""

    step: int
    rate: float
    shape: DecayShape = "linear"


def learning_rate(settings: OptimizerConfig, steps: int, step: int) -> float:
    """Return the learning rate of optimizer step `step` (from 1) of a run of `steps` steps."""
    return LEARNING_RATES[settings.schedule].rate(settings, steps, step)


def decaying(settings: OptimizerConfig, steps: int, step: int) -> float:
    """Compute the learning rate of a step with `linear` and `cosine`: it decays from the end of the warmup on."""
    shape: DecayShape = "cosine" if settings.schedule == "cosine" else "linear"
    end = RateAtStep(steps - settings.constant_steps + 1, settings.min_lr, shape)
    return rate_at([*_warmup(settings), end], step)


def constant(settings: OptimizerConfig, steps: int, step: int) -> float:
    """Compute the learning rate of a step with `constant`: it stays at `lr`."""
    return rate_at(_warmup(settings), step)


def warmup_stable_decay(settings: OptimizerConfig, steps: int, step: int) -> float:
    """Compute the learning rate of a step with `wsd`: `lr`, but for the last `decay_steps` (arXiv:2404.06395)."""
    points = _warmup(settings)
    if settings.decay_steps:
        first_at_minimum = steps - settings.constant_steps + 1
        points.append(RateAtStep(first_at_minimum - 1 - settings.decay_steps, settings.lr))
        points.append(RateAtStep(first_at_minimum, settings.min_lr, settings.decay_shape))
    return rate_at(points, step)


def by_points(settings: OptimizerConfig, steps: int, step: int) -> float:
    """Compute the learning rate of a step with `points`, the user's curve."""
    return rate_at([RateAtStep(point.at, settings.lr * point.factor, point.shape) for point in settings.points], step)


def _warmup(settings: OptimizerConfig) -> list[RateAtStep]:
    peak = RateAtStep(max(1, settings.warmup_steps), settings.lr)
    return [RateAtStep(0, 0.0), peak] if settings.warmup_steps else [peak]


def rate_at(points: Sequence[RateAtStep], step: int) -> float:
    """Compute the learning rate of a step between the points of a curve.

    With part p of the way between two points, from 0 to 1, the rate is `end + (start - end) · f(p)`: `f` is `1 - p`
    linear, `(1 + cos πp) / 2` cosine, `1 - √p` sqrt (arXiv:2405.18392).
    """
    start = points[0]
    for end in points:
        if step < end.step:
            break
        start = end
    else:
        return start.rate
    if end is start:
        return end.rate
    done, steps = step - start.step, end.step - start.step
    if start.rate == 0 and end.shape == "linear":
        return end.rate * done / steps
    part = done / steps
    shape = {"linear": 1 - part, "cosine": (1 + math.cos(math.pi * part)) / 2, "sqrt": 1 - math.sqrt(part)}[end.shape]
    return end.rate + (start.rate - end.rate) * shape


def learning_rate_change_text(settings: OptimizerConfig, steps: int, former_steps: int, step: int) -> str | None:
    """Return a note on the learning rates of a schedule whose end a resume has moved; None if they are as before.

    Args:
        former_steps: `train.steps` before the run was resumed.
        step: the last step that is done.
    """

    def rates(total: int) -> list[float]:
        return [learning_rate(settings, total, number) for number in (step + 1, min(steps, former_steps))]

    (rate, *at_end), (former_rate, *former_at_end) = rates(steps), rates(former_steps)
    if rate == former_rate and at_end == former_at_end:
        return None
    changed = f"{rate:.2e} in place of {former_rate:.2e}" if rate != former_rate else f"{rate:.2e}, as before"
    return (
        f"the {settings.schedule} schedule ends at step {steps:,} in place of {former_steps:,}, so that step "
        f"{step + 1:,} has {changed}"
    )
