"""The time of a training on the calendar: its steps, evaluations and checkpoints, and what failures cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.config import CheckpointConfig, Config
from shardwise.estimates.memory import checkpoint_bytes
from shardwise_plan.device_specs import Cluster
from shardwise_plan.step_time import HOST_LINK_BANDWIDTH

_YEAR = 365 * 86_400
_EVALUATION = 1 / 3  # the part of a step that an evaluation of a batch takes: its forward pass
_LEAST_INTERVAL = 60.0  # seconds between checkpoints below which nobody goes
_LEAST_GOODPUT = 1e-3  # goodput below which a training counts as one that does not finish
_MOST_EXPONENT = 50.0  # exponent of a time that nobody waits for: it keeps the numbers finite


@dataclass(frozen=True)
class Calendar:
    """The planned time of a training on the calendar, in seconds, with checkpoints and failures."""

    steps: float
    evaluations: float
    interval: float  # work between two checkpoints
    is_given: bool  # True if the recipe gives the interval; otherwise it is that which costs least
    stall: float  # wait of the training for a checkpoint, while it is copied to the host
    write: float  # time until a checkpoint is stored
    between_failures: float  # time between two failures of the cluster, on average; infinite without failures
    restart: float  # time until the run trains again after a failure
    seconds: float  # whole time; infinite if failures let the training not finish

    @property
    def goodput(self) -> float:
        """The part of the time in which the training makes steps that count."""
        return self.steps / self.seconds

    @property
    def ends(self) -> bool:
        """False if failures let the training not finish."""
        return math.isfinite(self.seconds)


def calendar(config: Config, cluster: Cluster, step_seconds: float) -> Calendar:
    """Predict the time on the calendar of a training whose steps take `step_seconds` on average.

    A checkpoint is copied to the host, for which training waits, and is stored while it goes on. A failure costs the
    work since the last checkpoint that was stored, a restart, and reading the checkpoint. The expected time is Daly's
    (2006, doi:10.1016/j.future.2004.11.016), with failures that do not depend on each other.
    """
    train = config.train
    reliability = cluster.device.reliability
    steps = train.steps * step_seconds
    evaluations = 0.0
    if train.eval_every:
        evaluations = train.steps // train.eval_every * train.eval_batches * _EVALUATION * step_seconds
    size = checkpoint_bytes(config, cluster.device.is_accelerator) or 0
    stall = size / (HOST_LINK_BANDWIDTH * cluster.world)
    write = size / (reliability.storage * cluster.nodes)
    failures = reliability.failures_per_year * cluster.world / _YEAR
    between = 1 / failures if failures else math.inf
    work = steps + evaluations
    given = _given_interval(config.checkpoint, step_seconds)
    interval = min(work, given if given is not None else best_checkpoint_interval(stall, write, between))
    # The store is read once, and a checkpoint that is being stored does not count yet.
    restart = reliability.restart + write
    attempts = work / interval
    # A save waits until the one before it is stored.
    period = max(interval + stall, write)
    seconds = attempts * period
    if failures:
        repeated = math.exp(min(_MOST_EXPONENT, (restart + write) / between))
        seconds = attempts * repeated * between * math.expm1(min(_MOST_EXPONENT, period / between))
        if work < _LEAST_GOODPUT * seconds:
            seconds = math.inf
    is_given = given is not None
    return Calendar(steps, evaluations, interval, is_given, stall, write, between, restart, seconds)


def best_checkpoint_interval(stall: float, write: float, between_failures: float) -> float:
    """Return the work between two checkpoints that costs least (Young, 1974; Daly, 2006), and at least a minute.

    Args:
        stall: seconds that training waits for a checkpoint.
        write: seconds until it is stored: the next one begins after it.
        between_failures: seconds between two failures.
    """
    return max(math.sqrt(2 * stall * between_failures) - stall, write, stall, _LEAST_INTERVAL)


def _given_interval(checkpoint: CheckpointConfig, step_seconds: float) -> float | None:
    intervals = [checkpoint.every * step_seconds] if checkpoint.every else []
    if "every_minutes" in checkpoint.model_fields_set and checkpoint.every_minutes:
        intervals.append(checkpoint.every_minutes * 60)
    return min(intervals, default=None)
