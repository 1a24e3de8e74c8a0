"""The learning rate of each step, as a pure function of the step.

A schedule is a list of points, each a step with its rate, and shapes of the ways between them. Before the first point
the rate is that of the first, after the last one that of the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.config import Config
from shardwise.config.optimizer import DecayShape


@dataclass(frozen=True)
class RateAtStep:
    """The rate at a step, and the shape of the way to it from the point before."""

    step: int
    rate: float
    shape: DecayShape = "linear"


def learning_rate(config: Config, step: int) -> float:
    """Return the rate of optimizer step `step` (from 1).

    With part p of the way between two points, from 0 to 1, the rate is `end + (start - end) · f(p)`: `f` is `1 - p`
    linear, `(1 + cos πp) / 2` cosine, `1 - √p` sqrt (arXiv:2405.18392).
    """
    return rate_at(schedule_points(config), step)


def rate_at(points: Sequence[RateAtStep], step: int) -> float:
    """Return the rate of a step by the points of a schedule."""
    start = points[0]
    for end in points:
        if step < end.step:
            return _between(start, end, step) if end is not points[0] else end.rate
        start = end
    return start.rate


def schedule_points(config: Config) -> list[RateAtStep]:
    """Return the points of a run's schedule.

    The warmup rises from 0 at step 0, so that step s of w has `lr · s / w`; without warmup, step 1 has `lr`. The last
    `constant_steps` steps have `min_lr`; without them, the step after the run's last would be the first at `min_lr`.
    So no step of a named schedule has a rate of 0 unless `min_lr` is 0 there. With `wsd` the `decay_steps` steps before
    (arXiv:2404.06395) decay, all others with `linear` and `cosine`, none with `constant`.
    """
    o = config.optimizer
    if o.schedule == "points":
        return [RateAtStep(point.at, o.lr * point.factor, point.shape) for point in o.points]
    points = [RateAtStep(max(1, o.warmup_steps), o.lr)]
    if o.warmup_steps:
        points.insert(0, RateAtStep(0, 0.0))
    first_at_minimum = config.train.steps - o.constant_steps + 1
    if o.schedule == "wsd":
        decay_steps = o.decay_steps or 0
        if decay_steps:
            points.append(RateAtStep(first_at_minimum - 1 - decay_steps, o.lr))
            points.append(RateAtStep(first_at_minimum, o.min_lr, o.decay_shape))
    elif o.schedule != "constant":
        points.append(RateAtStep(first_at_minimum, o.min_lr, o.schedule))
    return points


def moved_end_text(config: Config, former_steps: int, step: int) -> str | None:
    """Return a line for the user of a run whose schedule ends at another step than before; None if it does not.

    Args:
        former_steps: `train.steps` before the run was resumed.
        step: the last step that is done.
    """
    train = config.train.model_copy(update={"steps": former_steps})
    former = schedule_points(config.model_copy(update={"train": train}))
    points = schedule_points(config)
    if former == points:
        return None
    rate, former_rate = (rate_at(schedule, step + 1) for schedule in (points, former))
    changed = f"{rate:.2e} in place of {former_rate:.2e}" if rate != former_rate else f"{rate:.2e}, as before"
    return (
        f"the {config.optimizer.schedule} schedule ends at step {config.train.steps:,} in place of "
        f"{former_steps:,}, so that step {step + 1:,} has {changed}"
    )


def _between(start: RateAtStep, end: RateAtStep, step: int) -> float:
    if start.rate == 0 and end.shape == "linear":
        return end.rate * (step - start.step) / (end.step - start.step)
    part = (step - start.step) / (end.step - start.step)
    shape = {"linear": 1 - part, "cosine": (1 + math.cos(math.pi * part)) / 2, "sqrt": 1 - math.sqrt(part)}[end.shape]
    return end.rate + (start.rate - end.rate) * shape
