"""Measures how long a rank works on each stage in a step of a pipeline, and how long it waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh
from shardwise.pipeline.action_order import BACKWARD, FORWARD


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a pipeline step in which this rank worked on one of its stages."""

    stage: int  # index of the stage
    forward: float  # seconds of its forward passes
    backward: float  # seconds of its backward passes, both halves of split ones included


@dataclass(frozen=True)
class StepTiming:
    """The timing of a pipeline step on this rank."""

    stages: tuple[StageSeconds, ...]  # work on each of the rank's stages
    bubble: float  # part of the pipeline's step in which this rank did not work
    mean_bubble: float  # mean of `bubble` over the pipeline's ranks


@dataclass(frozen=True)
class _Work:
    """One forward or backward pass."""

    kind: str  # one of the constants above
    stage: int  # index of the stage
    start: devices.Mark  # mark before it
    end: devices.Mark  # mark behind it
    waits: slice  # the part of `Clock.waits` that was added meanwhile


@dataclass
class Clock:
    """Measures one step's work on one rank.

    On an accelerator a call returns once the work is queued on the stream. There events in the stream mark where the
    work begins and ends; their times are read after the step, so that the measurement does not stall the device.
    """

    device: torch.device  # device of the rank
    # Begin and end of each wait for a collective; whoever measures the step adds them.
    waits: list[tuple[devices.Mark, devices.Mark]] = field(default_factory=list)
    _work: list[_Work] = field(default_factory=list)
    _step_start: devices.Mark = 0.0
    _step_end: devices.Mark = 0.0

    @contextmanager
    def time(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Measure the body's time, and name it for the profiler."""
        with record_function(_trace_name(kind, stage, micro_batch)):
            start = devices.mark_time(self.device)
            first_wait = len(self.waits)
            yield
            end = devices.mark_time(self.device)
            self._work.append(_Work(kind, stage, start, end, slice(first_wait, len(self.waits))))

    def begin(self) -> None:
        """Begin a step, and forget the one before."""
        self._work.clear()
        self._step_start = devices.mark_time(self.device)

    def end(self) -> None:
        """End the step, once its last work is queued."""
        self._step_end = devices.mark_time(self.device)

    def timing(self, stages: Sequence[int], mesh: Mesh) -> StepTiming:
        """Return the timing of the last step, of which this rank has `stages`. Collective over the pipeline.

        The step's length is the longest of all ranks: the last stage ends before the first has received its gradient.
        """
        devices.synchronize(self.device)
        forward = dict.fromkeys(stages, 0.0)
        backward = dict.fromkeys(stages, 0.0)
        for work in self._work:
            direction = forward if work.kind == FORWARD else backward
            direction[work.stage] += devices.seconds_between(work.start, work.end)
        busy = sum(forward[stage] + backward[stage] for stage in stages)
        length = devices.seconds_between(self._step_start, self._step_end)
        local = torch.tensor([[busy, length]]).to(mesh.device)
        busy_P, length_P = collectives.all_gather(local, mesh.pp).cpu().unbind(1)
        longest = float(length_P.max())
        return StepTiming(
            tuple(StageSeconds(stage, forward[stage], backward[stage]) for stage in stages),
            bubble=1 - busy / longest,
            mean_bubble=1 - float(busy_P.mean()) / longest,
        )

    def own_work(self) -> dict[str, float]:
        """Return the seconds of the last step's forward and backward passes, less those of `waits` within them.

        An accelerator must have done the step's work.
        """
        seconds = {FORWARD: 0.0, BACKWARD: 0.0}
        for work in self._work:
            waited = sum(devices.seconds_between(start, end) for start, end in self.waits[work.waits])
            direction = FORWARD if work.kind == FORWARD else BACKWARD
            seconds[direction] += devices.seconds_between(work.start, work.end) - waited
        return seconds


def name_stage_messages(messages: list[Any], kind: str, stage: int, micro_batch: int) -> list[Any]:
    """Name `P2POp`s between pipeline stages by their stage and micro-batch, and return them."""
    for message in messages:
        message.traced_as = _trace_name(kind, stage, micro_batch)
    return messages


def stage_message_name(message: Any) -> str:
    """Return the name by `name_stage_messages`; only messages that open connections have none."""
    name: str = getattr(message, "traced_as", "opening of connections")
    return name


def _trace_name(kind: str, stage: int, micro_batch: int) -> str:
    return f"{kind}, stage {stage}, micro-batch {micro_batch}"
