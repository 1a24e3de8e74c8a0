"""The progress of a training, and the record of each of its steps."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.pipeline.clock import StepTiming

THROUGHPUT_STEPS = 10
"""Steps over which throughput is averaged."""
SMOOTHED_STEPS = 20
"""Steps over which a line of progress averages the loss."""
STREAM = "stream"
"""The key of the state of streams and mixtures in a manifest's `rng`."""
_LEAST_DEVIATION = 1e-3
"""Least standard deviation relative to the mean: among losses that are nearly equal a smaller change is no spike."""


@dataclass
class Progress:
    """The progress of a training, over all its runs, and its present phase, which errors name."""

    step: int = 0
    before: int = 0  # steps among them that earlier runs did
    samples: int = 0
    tokens: int = 0
    position: int = 0  # place in the order of the data; greater than `samples` where batches were left out
    # Losses of the last steps, at most `SMOOTHED_STEPS`, since a stage of the data began.
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=SMOOTHED_STEPS))
    phase: str = "start"  # present work of the run, as a noun phrase

    def advance(self, loss: float, samples: int, length: int) -> float | None:
        """Count a step; return the standard deviations by which its loss is above the mean before, None at first."""
        self.step += 1
        self.position += samples
        self.samples += samples
        self.tokens += samples * length
        spike = None
        if len(self.losses) == SMOOTHED_STEPS:
            mean = fmean(self.losses)
            # The last bound keeps the division defined where all losses are 0.
            deviation = max(pstdev(self.losses, mean), _LEAST_DEVIATION * abs(mean), sys.float_info.min)
            spike = (loss - mean) / deviation
        self.losses.append(loss)
        return spike


@dataclass(frozen=True)
class StepDetail:
    """Numbers that a part of a training adds to the record of a logged step, under the names of the run's files."""

    numbers: Mapping[str, float] = field(default_factory=dict)  # beside the loss, in metrics and trackers
    facts: Mapping[str, Any] = field(default_factory=dict)  # further entries of the step's event
    # Further numbers for trackers, by prefix.
    scalars: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    # Entries of a line in a file of their own, by its name without `.jsonl`.
    lines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Straggler:
    """The slowest rank of a training's step."""

    rank: int
    relative: float  # work of this rank divided by that of the fastest rank of its stage
    own: float  # work of this rank divided by its own best


@dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step."""

    step: int  # number of the step, from 1, over the whole training
    loss: float  # mean loss of the global batch, before the update
    mean_loss: float  # mean of `loss` over this step and the ones before
    # Steps in that mean: `SMOOTHED_STEPS`, or fewer where the training or a stage of its data is younger.
    mean_steps: int
    lr: float
    grad_norm: float  # norm of the whole model's gradients, before clipping
    param_norm: float | None  # norm of the whole model's parameters, before the update, in steps that are logged
    tokens: int  # tokens read by all ranks over the whole training, this step included
    samples: int
    # Wall time of this step on this rank, without evaluation. On an accelerator the step ends when its update is
    # queued, so the update itself counts to the next step.
    seconds: float
    input_seconds: float  # part of `seconds` in which this rank waited for data
    peak_memory_bytes: int  # most memory that this rank has used since its start
    # Mean loss of each objective, where there are several; `loss` is their sum.
    losses: Mapping[str, float] = field(default_factory=dict)
    timing: StepTiming | None = None  # timing of a pipeline's step, in steps that are logged
    # Seconds of this rank by part (`train/step_meters.py`); empty where it was not measured.
    split: Mapping[str, float] = field(default_factory=dict)
    # Time for which training waited for checkpoints and copies after the steps before this one, since the last step
    # that is logged.
    checkpoint_seconds: float = 0.0
    # Bytes that this rank sent in the step, by axis of the mesh; `pp` has the messages between stages.
    communication_bytes: Mapping[str, int] = field(default_factory=dict)
    # Bytes in use on this rank, by kind, in steps that are logged.
    memory: Mapping[str, int] = field(default_factory=dict)
    loss_spike: float | None = None  # standard deviations by which the loss is above the mean of the steps before
    straggler: Straggler | None = None
    allocator: Mapping[str, int] = field(default_factory=dict)  # bytes by `devices.allocator_bytes`, on an accelerator
    details: Sequence[StepDetail] = ()  # what is recorded further, in steps that are logged
    # Largest of all ranks' flags, which were read with the step's numbers (`Trainer.step`); None where there were none,
    # or where much time has passed since then.
    agreed_flags: tuple[float, ...] | None = None
    is_logged: bool = True  # files and progress show this step; the same on every rank

    @property
    def work_seconds(self) -> float | None:
        """Seconds of this rank's own work in the step, without communication; None where that was not measured."""
        return self.seconds - self.split["communication"] if self.split else None


class Throughput:
    """Rates: over the last 10 steps, over all steps of a start of a run, and over its 10 fastest consecutive steps.

    Args:
        step_amounts: amounts of a step in this stage, by name, such as its tokens.
        former: throughput of the stages before, whose steps count in averages and peaks.
    """

    def __init__(self, step_amounts: Mapping[str, float], former: Throughput | None = None) -> None:
        self._step_amounts = step_amounts
        self._recent: deque[float] = deque(maxlen=THROUGHPUT_STEPS)
        self._amounts = dict.fromkeys(step_amounts, 0.0)
        self._peaks = dict.fromkeys(step_amounts, 0.0)
        self._seconds = 0.0
        if former is not None:
            self._amounts |= former._amounts
            self._peaks |= former._peaks
            self._seconds = former._seconds

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)
        self._seconds += seconds
        for name, amount in self._step_amounts.items():
            self._amounts[name] += amount
        if len(self._recent) == THROUGHPUT_STEPS:
            for name in self._step_amounts:
                self._peaks[name] = max(self._peaks[name], self.recent(name))

    @property
    def step_seconds(self) -> float:
        """Mean over the last 10 steps; 0 before the first."""
        return sum(self._recent) / max(len(self._recent), 1)

    def recent(self, name: str) -> float:
        return _rate(self._step_amounts[name] * len(self._recent), sum(self._recent))

    def average(self, name: str) -> float:
        return _rate(self._amounts[name], self._seconds)

    def peak(self, name: str) -> float:
        """The rate over the 10 fastest consecutive steps of a stage; the average where shorter stages are faster."""
        return max(self._peaks[name], self.average(name))


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class StartTotals:
    """The totals of a start of a run, over the stages that this process has trained."""

    steps_before: int  # steps done by earlier starts
    seconds_before: float | None  # time to train of earlier starts; None where they recorded none
    began: float  # time at which the first stage began to train, by `time.perf_counter`
    throughput: Throughput
