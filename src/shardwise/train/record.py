"""Where a training is, and what is measured of its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.config import Config
from shardwise.pipeline import StepTiming

WINDOW_STEPS = 10
"""Steps over which throughput is averaged."""


@dataclass
class Progress:
    """Where a training is, over all its runs, and what it was doing when something went wrong.

    Attributes:
        step: optimizer steps done.
        before: those of them that earlier runs did.
        samples: trained on.
        tokens: trained on.
        position: in the order of the data; it is ahead of `samples` where batches were left out.
        phase: what the run is doing.
    """

    step: int = 0
    before: int = 0
    samples: int = 0
    tokens: int = 0
    position: int = 0
    phase: str = "start"


def end_of_run(config: Config, steps_before: int) -> int:
    """The step after which a run ends that begins after `steps_before` steps."""
    train = config.train
    return train.steps if train.stop_after is None else min(train.steps, steps_before + train.stop_after)


@dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step.

    Attributes:
        step: number of the step, from 1, over the whole training (a resumed run continues to count).
        loss: of the global batch, before the update.
        lr: with which the update was made.
        grad_norm: of the whole model, before clipping.
        param_norm: of the whole model, after the update.
        tokens, samples: consumed since step 0 by all ranks, this step's included.
        seconds: wall time of this step on this rank, evaluation excluded.
        input_seconds: the part of them in which this rank waited for data.
        peak_memory_bytes: of this rank, since it began.
        losses: of each objective, where there are several; `loss` is their sum.
        timing: of a pipeline, in steps that are logged.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    param_norm: float
    tokens: int
    samples: int
    seconds: float
    input_seconds: float
    peak_memory_bytes: int
    losses: Mapping[str, float] = field(default_factory=dict)
    timing: StepTiming | None = None


class Throughput:
    """Samples per second: over the last 10 steps, over the run, and the best ten steps of it."""

    def __init__(self, samples_per_step: int) -> None:
        self._samples_per_step = samples_per_step
        self._recent: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._steps = 0
        self._seconds = 0.0
        self._peak = 0.0

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)
        self._steps += 1
        self._seconds += seconds
        if len(self._recent) == WINDOW_STEPS:
            self._peak = max(self._peak, self.recent)

    @property
    def step_seconds(self) -> float:
        """Mean over the window; 0 before the first step."""
        return sum(self._recent) / max(len(self._recent), 1)

    @property
    def recent(self) -> float:
        return _rate(self._samples_per_step * len(self._recent), sum(self._recent))

    @property
    def average(self) -> float:
        return _rate(self._samples_per_step * self._steps, self._seconds)

    @property
    def peak(self) -> float:
        """Best window of the run; a run shorter than a window has its average."""
        return self._peak or self.average


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
