"""The measurements of a step on one rank: seconds by part, bytes sent, memory by kind, and the slowest rank.

The parts are data, forward, backward, communication and optimizer. Communication is the time for which the rank waits
in collectives and, in a pipeline, for other stages; transfers that run during other work cost nothing here. All else
is the rank's own work, by which a slow rank is found: the ranks that wait for it take as long as it does for a step,
but most of their time is communication.

On an accelerator the marks are events in its stream. They are read once the host has waited for the step's numbers, so
the measurement adds no wait. The update of the parameters is still under way then, and counts to the next step, as it
does in `step_seconds`. Collectives within a compiled graph count to the pass that they are in.

Shapes: K = objectives of the loss, N = terms of the global batch's losses.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import starmap
from operator import methodcaller
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.data.samples.batch import BlendedBatches
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh
from shardwise.optim.state import kept_bytes
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.pipeline.action_order import BACKWARD, FORWARD
from shardwise.train.step_record import StepDetail, StepRecord, Straggler
from shardwise.train.training import Training

if TYPE_CHECKING:
    from shardwise.pipeline.clock import Clock
    from shardwise.train.step_totals import SourceLosses

DATA = "data"
COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
OTHER = "other"
PARTS = (DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER)
PIPELINE = "pipeline"
"""A step of the pipeline, whose own clock tells `read` the forward from the backward passes and the waits."""
STRAGGLER_STEPS = 20
"""Steps whose median tells a rank's work: a single slow step names nobody."""
_NO_TIME = -1e30  # in place of a negative time of a stage that has none yet: any time is greater
_SAME = 1e-6  # relative difference up to which two times are one: all numbers travel as float32, which has 7 digits


class StepMeter:
    """Meters the training steps of one rank: the seconds of each part."""

    def __init__(self, mesh: Mesh, pipeline: Clock | None = None) -> None:
        self._mesh = mesh
        self._device = mesh.device
        self._pipeline = pipeline
        self._waits: list[tuple[devices.Mark, devices.Mark]] = []
        self._phases: list[tuple[str, devices.Mark, devices.Mark, slice]] = []
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._measures = False
        self._sent_before = Counter[str]()
        if pipeline is not None:
            pipeline.waits = self._waits

    def begin(self, *, measures: bool) -> None:
        """Begin a step. On an accelerator nothing is recorded where `measures` is false."""
        self._measures = measures or self._device.type == "cpu"
        self._seconds = dict.fromkeys(PARTS, 0.0)
        if not self._measures:
            # Marks that were not read are too old for the next step that is measured.
            self._phases.clear()
            self._waits.clear()
            return
        # The meters of the collectives append to this list themselves, as they know when a wait begins and ends.
        self._sent_before = self._sent_so_far(waits=self._waits)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body, which is one of `PARTS` or `PIPELINE`."""
        if not self._measures:
            yield
            return
        start = devices.mark_time(self._device)
        first_wait = len(self._waits)
        yield
        # Waits within the body are known by their places in the list, and are taken off its time in `read`.
        self._phases.append((name, start, devices.mark_time(self._device), slice(first_wait, len(self._waits))))

    def read(self) -> None:
        """Add up the marks so far. An accelerator must have done the work that they are around."""
        waits = list(starmap(devices.seconds_between, self._waits))
        for name, start, end, part in self._phases:
            seconds = devices.seconds_between(start, end) - sum(waits[part])
            if name == PIPELINE and self._pipeline is not None:
                for kind, stage_seconds in self._pipeline.own_work().items():
                    self._seconds[kind] += stage_seconds
                    seconds -= stage_seconds
                # The stages' passes are taken out, so the remainder is the wait for other stages.
                name = COMMUNICATION
            self._seconds[name] += seconds
        self._seconds[COMMUNICATION] += sum(waits)
        self._phases.clear()
        self._waits.clear()

    def end(self, step_seconds: float) -> tuple[dict[str, float], dict[str, int]]:
        """End the step; both results are empty if it was not measured.

        Collectives between this step and the next, such as those of an evaluation, are no part of either.

        Returns:
            seconds by part, with `other`, so that they sum to `step_seconds`; and bytes sent, by axis of the mesh.
        """
        if not self._measures:
            return {}, {}
        sent = self._sent_so_far(waits=None)
        if self._device.type == "cpu":
            self.read()
        # An accelerator's marks are times of its own clock: their sum may exceed the host's seconds a little.
        split = {**self._seconds, OTHER: max(0.0, step_seconds - sum(self._seconds.values()))}
        sent.subtract(self._sent_before)
        return split, dict(sent)

    def _sent_so_far(self, waits: list[tuple[devices.Mark, devices.Mark]] | None) -> Counter[str]:
        """Bytes that this rank has sent, by axis. From now on collectives add their waits to a list; None: to none."""
        sent = Counter[str]()
        for group in self._mesh.groups:
            for meter in group.meters.values():
                sent[group.name] += sum(meter.bytes.values())
                meter.spans = waits
        return sent


class _Stragglers:
    """One rank's knowledge of its own work and of the slowest rank.

    The ranks of a pipeline stage do the same work. A rank that is alone in its stage is compared with its own best
    time. The exchange costs no collective of its own: a few numbers of each rank travel with those of the next step
    (`StepMeters.read`), reduced to their maximum over all ranks. First these are the longest and the shortest work of
    each stage; the rank that recognises its own work as the longest says so in the numbers of the step after.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # Ranks without a peer in their stage compare their ratios to their own best, all together.
        self._is_alone = mesh.stage.size == 1
        self._stages = 1 if self._is_alone else mesh.pp.size
        self._stage = 0 if self._is_alone else mesh.pp.rank
        self._recent: deque[float] = deque(maxlen=STRAGGLER_STEPS)
        self._best: float | None = None
        self._reported = 0.0
        self._claim = (0.0, 0.0, 0.0)

    def add(self, work_seconds: float) -> None:
        self._recent.append(work_seconds)
        # The first steps of a run compile, warm up caches and are no measure: the best is known after a whole window.
        if len(self._recent) == STRAGGLER_STEPS:
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


class _StepNumbers(NamedTuple):
    """Numbers of a step that the host reads, equal on every rank."""

    gradient_norm: float
    parameter_norm: float | None  # None in steps that are not logged
    losses: tuple[float, ...]  # mean loss of each objective over the global batch
    agreed_flags: tuple[float, ...] | None  # largest of all ranks' flags, in their order; None where there are no flags
    straggler: Straggler | None
    totals: Sequence[Sequence[float]]  # numbers of each of `StepMeters.totals`; empty in steps that are not logged


class StepTotals(Protocol):
    """Numbers that a rank's meters add up between logged steps, such as losses by source and loads of experts."""

    def take(self) -> Tensor:
        """Return the totals of all ranks, and begin anew. Collective."""

    def record(self, totals: Sequence[float], position: int) -> StepDetail | None:
        """Return the record of these totals, at a place in the order of the data."""


class StepMeters:
    """The meters of one rank: times by part, the slowest rank, losses by source, and bytes in use."""

    def __init__(self, training: Training) -> None:
        self._training = training
        mesh = training.mesh
        batches = training.feed.batches
        pipeline = training.pipeline
        self.clock = StepMeter(mesh, None if pipeline is None else pipeline.clock)
        self.sources: SourceLosses | None = None
        if isinstance(batches, BlendedBatches):
            from shardwise.train.step_totals import SourceLosses

            self.sources = SourceLosses(batches, mesh)
        self.totals: list[StepTotals] = [] if self.sources is None else [self.sources]
        model = training.config.model
        if model.is_own or model.is_sparse:
            from shardwise.train.step_totals import ExpertTotals

            self.totals += ExpertTotals.of(training.model, model, mesh)
        self._stragglers = _Stragglers(mesh) if mesh.world.size > 1 else None

    def read(
        self, losses_NK: Tensor, norms: tuple[Tensor, ...], flags: Sequence[float] | None, *, reads_all: bool
    ) -> _StepNumbers:
        """Read a step's numbers on the host, which waits here for all work before. Collective.

        All travel in one tensor, the ranks' flags too: a transfer of their own would stop the host a second time in
        each step, with nothing queued on the device, and their all-reduce is queued behind the backward pass.

        Args:
            losses_NK: terms of the global batch's losses; their sum is rounded once, whatever their order.
            norms: norm of the gradients, and that of the parameters where it was computed.
            flags: flags of this rank, of which the largest of all ranks are read, and with them the slowest rank;
                None reads neither.
            reads_all: `totals` are read too.
        """
        parts = [losses_NK.flatten(), torch.stack(norms)]
        for totals in self.totals if reads_all else ():
            parts.append(totals.take().flatten())
        if flags is not None:
            mesh = self._training.mesh
            own_numbers = torch.tensor([*flags, *(() if self._stragglers is None else self._stragglers.numbers())])
            parts.append(collectives.all_reduce_(devices.to_device(own_numbers, mesh.device), mesh.world, op="max"))
        read = list(map(methodcaller("tolist"), torch.cat(parts).cpu().split(list(map(len, parts)))))
        # The host has waited for the device, so the marks around the passes can be read without another wait.
        self.clock.read()
        agreed: tuple[float, ...] | None = None
        straggler = None
        if flags is not None:
            numbers = read.pop()
            agreed = tuple(numbers[: len(flags)])
            if self._stragglers is not None:
                straggler = self._stragglers.take(numbers[len(flags) :])
        losses, (gradient_norm, *parameter_norm), *read_totals = read
        return _StepNumbers(
            gradient_norm=gradient_norm,
            parameter_norm=parameter_norm[0] if parameter_norm else None,
            losses=tuple(map(math.fsum, np.reshape(losses, losses_NK.shape).T)),
            agreed_flags=agreed,
            straggler=straggler,
            totals=read_totals,
        )

    def record(
        self,
        numbers: _StepNumbers,
        *,
        lr: float,
        spike: float | None,
        seconds: float,
        input_seconds: float,
        is_logged: bool,
    ) -> StepRecord:
        """The record of the step that was just counted in the progress."""
        progress = self._training.progress
        pipeline = self._training.pipeline
        device = self._training.mesh.device
        losses = numbers.losses
        split, sent = self.clock.end(seconds)
        if split and self._stragglers is not None:
            self._stragglers.add(seconds - split[COMMUNICATION])
        memory: dict[str, int] = {}
        if is_logged:
            memory = {**self._state, "other": max(0, devices.memory_in_use(device) - sum(self._state.values()))}
        details = []
        for totals, amounts in zip(self.totals, numbers.totals, strict=False):
            if (detail := totals.record(amounts, progress.position)) is not None:
                details.append(detail)
        return StepRecord(
            step=progress.step,
            loss=sum(losses),
            mean_loss=fmean(progress.losses),
            mean_steps=len(progress.losses),
            lr=lr,
            grad_norm=numbers.gradient_norm,
            param_norm=numbers.parameter_norm,
            tokens=progress.tokens,
            samples=progress.samples,
            seconds=seconds,
            input_seconds=input_seconds,
            peak_memory_bytes=devices.peak_memory(device),
            losses=dict(zip(self._training.feed.batches.objectives, losses, strict=True)) if len(losses) > 1 else {},
            allocator=devices.allocator_bytes(device),
            agreed_flags=numbers.agreed_flags,
            split=split,
            communication_bytes=sent,
            loss_spike=spike,
            straggler=numbers.straggler,
            details=details,
            is_logged=is_logged,
            timing=pipeline.timing() if pipeline is not None and is_logged else None,
            memory=memory,
        )

    @cached_property
    def _state(self) -> dict[str, int]:
        """Bytes of the state, which is complete after the first step. Added up once, as that takes a millisecond."""
        return state_bytes_by_kind(self._training.model, self._training.optimizer)


def state_bytes_by_kind(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> dict[str, int]:
    """Add up for the meters the bytes of `parameters`, `gradients` and `optimizer` on this rank's device."""
    state = optimizer.state_bytes()
    return kept_bytes(model, optimizer, state["state"] + state["masters"])
