"""The progress of a training, and the record of each step: its throughput, its slowest rank, and each rank's file.

A straggler is a rank whose own work takes longer than that of the ranks that do the same. The ranks of a pipeline stage
do the same work. A rank that is alone in its stage is compared with its own best time. The exchange costs no collective
of its own: a few numbers of each rank travel with those of the next step (`Trainer.step`), reduced to their maximum
over all ranks. First these are the longest and the shortest work of each stage; the rank that recognises its own work
as the longest says so in the numbers of the step after.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median, pstdev
from typing import Any

import psutil

from shardwise.base.files import open_plain
from shardwise.base.hardware import cpu_count
from shardwise.base.parsing import record_of
from shardwise.config import Config, Layout
from shardwise.distributed.mesh import Mesh
from shardwise.launch.environment import joined
from shardwise.pipeline.clock import StepTiming
from shardwise.runs.folder import JsonLines, RunDirectory, now

WINDOW_STEPS = 10
"""Steps over which throughput is averaged."""
SMOOTHED_STEPS = 20
"""Steps over which a line of progress averages the loss."""
WINDOW = 20
"""Steps whose median tells a rank's work: a single slow step names nobody."""
_NO_TIME = -1e30
"""In place of a negative time of a stage that has none yet: any time is greater."""
_SAME = 1e-6
"""Relative difference up to which two times are one: all numbers travel as float32, which has 7 digits."""
_LEAST_DEVIATION = 1e-3
"""Least standard deviation relative to the mean: among losses that are nearly equal a smaller change is no spike."""


@dataclass
class Progress:
    """The progress of a training, over all its runs, and its present phase, which errors name.

    Attributes:
        step: optimizer steps done.
        before: steps among them that earlier runs did.
        samples: samples trained on.
        tokens: tokens trained on.
        position: place in the order of the data; greater than `samples` where batches were left out.
        losses: losses of the last steps, at most `SMOOTHED_STEPS`.
        phase: present work of the run, as a noun phrase.
    """

    step: int = 0
    before: int = 0
    samples: int = 0
    tokens: int = 0
    position: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=SMOOTHED_STEPS))
    phase: str = "start"

    @property
    def mean_loss(self) -> float:
        """The mean of `losses`."""
        return fmean(self.losses)

    def advance(self, loss: float, samples: int, length: int) -> None:
        """Count a step that was done, on `samples` samples of `length` tokens."""
        self.step += 1
        self.position += samples
        self.samples += samples
        self.tokens += samples * length
        self.losses.append(loss)


def loss_spike(loss: float, earlier_losses: Sequence[float]) -> float | None:
    """Standard deviations by which a loss is above the mean of the steps before it; None after too few steps."""
    if len(earlier_losses) < SMOOTHED_STEPS:
        return None
    mean = fmean(earlier_losses)
    # The last bound keeps the division defined where all losses are 0.
    deviation = max(pstdev(earlier_losses, mean), _LEAST_DEVIATION * abs(mean), sys.float_info.min)
    return (loss - mean) / deviation


def end_of_run(config: Config, steps_before: int) -> int:
    """The last step of a run that begins after `steps_before` steps."""
    train = config.train
    return train.steps if train.stop_after is None else min(train.steps, steps_before + train.stop_after)


@dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step.

    Attributes:
        step: number of the step, from 1, over the whole training.
        loss: mean loss of the global batch, before the update.
        mean_loss: mean of `loss` over this step and the ones before.
        mean_steps: steps in that mean: `SMOOTHED_STEPS`, or fewer where the training is younger.
        lr: learning rate of the update.
        grad_norm: norm of the whole model's gradients, before clipping.
        param_norm: norm of the whole model's parameters, before the update.
        tokens: tokens read by all ranks over the whole training, this step included.
        samples: samples read by all ranks, counted likewise.
        seconds: wall time of this step on this rank, without evaluation. On an accelerator the step ends when its
            update is queued, so the update itself counts to the next step.
        input_seconds: part of `seconds` in which this rank waited for data.
        peak_memory_bytes: most memory that this rank has used since its start.
        losses: mean loss of each objective, where there are several; `loss` is their sum.
        timing: timing of a pipeline's step, in steps that are logged.
        split: seconds of this rank by part (`train/step_clock.py`); empty where it was not measured.
        checkpoint_seconds: time for which training waited for checkpoints and copies after the steps before this one,
            since the last step that is logged.
        communication_bytes: bytes that this rank sent in the step, by axis of the mesh; `pp` has the messages between
            stages.
        memory: bytes in use on this rank, by kind.
        loss_spike: standard deviations by which the loss is above the mean of the steps before.
        straggler: slowest rank.
        allocator: bytes by `devices.allocator_bytes`, on an accelerator.
        agreed_flags: largest of all ranks' flags, which were read with the step's numbers (`Trainer.step`).
    """

    step: int
    loss: float
    mean_loss: float
    mean_steps: int
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
    split: Mapping[str, float] = field(default_factory=dict)
    checkpoint_seconds: float = 0.0
    communication_bytes: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    loss_spike: float | None = None
    straggler: Straggler | None = None
    allocator: Mapping[str, int] = field(default_factory=dict)
    agreed_flags: tuple[float, ...] = ()

    @property
    def work_seconds(self) -> float | None:
        """Seconds of this rank's own work in the step, without communication; None where that was not measured."""
        return self.seconds - self.split["communication"] if self.split else None


class Throughput:
    """Samples per second: over the last 10 steps, over the run, and over its 10 fastest consecutive steps.

    Args:
        samples_per_step: samples of the global batch.
    """

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
        """Mean over the last 10 steps; 0 before the first."""
        return sum(self._recent) / max(len(self._recent), 1)

    @property
    def recent(self) -> float:
        return self._rate(len(self._recent), sum(self._recent))

    @property
    def average(self) -> float:
        return self._rate(self._steps, self._seconds)

    @property
    def peak(self) -> float:
        """Samples per second over the 10 fastest consecutive steps; the average of a run with fewer steps."""
        return self._peak or self.average

    def _rate(self, steps: int, seconds: float) -> float:
        return self._samples_per_step * steps / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Straggler:
    """The slowest rank.

    Attributes:
        relative: work of this rank divided by that of the fastest rank of its stage.
        own: work of this rank divided by its own best.
    """

    rank: int
    relative: float
    own: float


class Stragglers:
    """One rank's knowledge of its own work and of the slowest rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # Ranks without a peer in their stage compare their ratios to their own best, all together.
        self._is_alone = mesh.tp.size * mesh.dp.size == 1
        self._stages = 1 if self._is_alone else mesh.pp.size
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._best: float | None = None
        self._reported = 0.0
        self._claim = (0.0, 0.0, 0.0)

    def add(self, work_seconds: float) -> None:
        """Count this rank's own work of a step."""
        self._recent.append(work_seconds)
        # The first steps of a run compile, warm up caches and are no measure: the best is known after a whole window.
        if len(self._recent) == WINDOW:
            self._best = min(self._best or float("inf"), median(self._recent))

    @property
    def slowdown(self) -> float | None:
        """This rank's work divided by its own best; None before there is a window of steps."""
        return median(self._recent) / self._best if self._best else None

    def numbers(self) -> list[float]:
        """Numbers of this rank, as many on all ranks; each is to be reduced to its maximum over all ranks.

        They are the longest work of each stage, its shortest work as a negative number, so that the maximum finds it,
        and this rank's claim to be the slowest: its number + 1, its `relative` and its `own` of `Straggler`.
        """
        if self._mesh.world.size == 1:
            return []
        longest = [0.0] * self._stages
        shortest = [_NO_TIME] * self._stages
        self._reported = 0.0
        if self.slowdown is not None:
            self._reported = self.slowdown if self._is_alone else median(self._recent)
            longest[self._stage] = self._reported
            shortest[self._stage] = -self._reported
        claim = self._claim
        self._claim = (0.0, 0.0, 0.0)
        return [*longest, *shortest, *claim]

    def take(self, reduced: Sequence[float]) -> Straggler | None:
        """The slowest rank by the reduced numbers of all ranks; None where no rank has claimed to be it.

        Sets this rank's claim for the next step.
        """
        if not reduced:
            return None
        longest = reduced[: self._stages]
        shortest = reduced[self._stages : 2 * self._stages]
        relative = []
        for most, negative_least in zip(longest, shortest, strict=True):
            relative.append(most / -negative_least if negative_least > _NO_TIME / 2 else 0.0)
        slowest = max(range(self._stages), key=lambda stage: relative[stage])
        # The maximum names no rank. The one whose report it was knows it by its value, and claims it in the next step.
        if slowest == self._stage and self._reported and abs(self._reported / longest[slowest] - 1) < _SAME:
            self._claim = (self._mesh.world.rank + 1.0, relative[slowest], self.slowdown or 0.0)
        # The number is that of a rank plus 1, as 0 says that no rank claims to be the slowest.
        rank_plus_1, claimed_relative, claimed_slowdown = reduced[2 * self._stages :]
        if not rank_plus_1:
            return None
        return Straggler(round(rank_plus_1) - 1, claimed_relative, claimed_slowdown)

    @property
    def _stage(self) -> int:
        return 0 if self._is_alone else self._mesh.pp.rank


class Occurrence:
    """A state that the user is told once when it begins, and again only after it had ended.

    Args:
        begin_score: score from which on the state is present.
        end_score: lower score, below which it is over: a score that swings between the two is told once.
    """

    def __init__(self, begin_score: float, end_score: float) -> None:
        self._begin_score = begin_score
        self._end_score = end_score
        self._present: object = None

    def begins(self, score: float | None, subject: object = True) -> bool:
        """Return whether the state begins with this score; for another subject it begins anew."""
        if score is None or score < self._end_score:
            self._present = None
        elif score >= self._begin_score and subject != self._present:
            self._present = subject
            return True
        return False


class RankFile:
    """`ranks/rank-NNNN.jsonl` of this rank. The first rank of a node also records the use of its processors and memory.

    Args:
        device_name: product name of the rank's device.
    """

    def __init__(self, run: RunDirectory, rank: int, layout: Layout, device_name: str) -> None:
        self._file = JsonLines(run.rank_metrics(rank))
        self._rank = rank
        self._layout = layout
        self._device = device_name
        self._utilization = _utilization_of(device_name)
        if _local_rank() == 0:
            # The first call returns 0 and only begins the measurement.
            psutil.cpu_percent()

    def start(self) -> None:
        """Record this rank's node, process and device, and its place in the mesh."""
        layout = self._layout
        rank = self._rank
        self._file.write(
            {
                "event": "start",
                "time": now(),
                "rank": rank,
                "host": platform.node(),
                "pid": os.getpid(),
                "local_rank": _local_rank(),
                "device": self._device,
                "place": layout.coordinates(rank),
                "cores": cpu_count(),
                "memory_total_bytes": psutil.virtual_memory().total,
            }
        )

    def step(self, record: StepRecord) -> None:
        """Record a step, and where the model is cut the work on each stage of this rank."""
        facts: dict[str, Any] = {"step": record.step, "time": now(), "step_seconds": record.seconds}
        facts |= {"input_seconds": record.input_seconds, "peak_memory_bytes": record.peak_memory_bytes}
        if record.split:
            facts |= {"split_seconds": dict(record.split), "work_seconds": record.work_seconds}
        if record.memory:
            facts["memory_in_use_bytes"] = sum(record.memory.values())
        if self._utilization is not None:
            facts["device_utilization"] = self._utilization()
        if _local_rank() == 0:
            memory = psutil.virtual_memory()
            facts |= {"host_cpu": psutil.cpu_percent() / 100, "host_memory_bytes": memory.total - memory.available}
        if record.allocator:
            facts["allocator_bytes"] = dict(record.allocator)
        if record.timing is not None:
            facts["stage_seconds"] = [asdict(stage) for stage in record.timing.stages]
            facts["bubble"] = record.timing.bubble
        self._file.write(facts)

    def close(self) -> None:
        self._file.close()


def place_of_rank(run: RunDirectory, rank: int) -> str:
    """The node, device and stage of a rank, as its file tells them; empty where this machine cannot read the file."""
    try:
        with open_plain(run.rank_metrics(rank)) as file:
            start = record_of(file.readline())
    except (OSError, ValueError):
        return ""
    return f" ({start.get('host')}, {start.get('device')}, stage {(start.get('place') or {}).get('pp')})"


def process_seconds() -> float:
    """Seconds since this process began."""
    # By the clock of the machine, as the system records it: Python's own counters begin after its imports.
    return time.time() - psutil.Process().create_time()


def _utilization_of(device_name: str) -> Callable[[], float | None] | None:
    """A function that returns the use of this rank's GPU, 0 to 1; None where no library tells it."""
    if device_name.startswith("cpu"):
        return None
    try:
        pynvml: Any = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        gpu = _visible_gpu()
        find = pynvml.nvmlDeviceGetHandleByIndex if isinstance(gpu, int) else pynvml.nvmlDeviceGetHandleByUUID
        handle = find(gpu)
    except Exception:  # noqa: BLE001  no driver, another vendor, or a device that NVML does not see
        return None

    def utilization() -> float | None:
        try:
            return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except pynvml.NVMLError:
            return None

    return utilization


def _local_rank() -> int:
    place = joined()
    return 0 if place is None else place.local_rank


def _visible_gpu() -> int | str:
    """The number or UUID by which NVML, which ignores CUDA_VISIBLE_DEVICES, knows this rank's GPU."""
    local = _local_rank()
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not visible:
        return local
    # As in `devices.local_device`: a rank may see its own GPU alone.
    name = visible[min(local, len(visible) - 1)]
    return int(name) if name.isdecimal() else name
