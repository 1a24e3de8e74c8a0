"""How long a rank worked on each stage in a step of a pipeline, and how long it waited."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh

FORWARD, BACKWARD = "forward", "backward"
INPUT, WEIGHTS = "backward of the input", "backward of the weights"


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a step in which this rank worked on one of its stages."""

    stage: int
    forward: float
    backward: float


@dataclass(frozen=True)
class StepTiming:
    """A step on this rank.

    Attributes:
        stages: the work on each of its stages.
        bubble: the part of the pipeline's step in which this rank did not work.
        mean_bubble: the mean of `bubble` over the pipeline's ranks.
    """

    stages: tuple[StageSeconds, ...]
    bubble: float
    mean_bubble: float


@dataclass
class Clock:
    """Measures one step's work on one rank.

    On an accelerator a call returns once the work is queued on the stream. There events in the stream mark where the
    work begins and ends; their times are read after the step, so that the measurement does not stall the device.

    Attributes:
        waits: begin and end of each wait for a collective, which whoever measures the step adds.
    """

    device: torch.device
    waits: list[tuple[devices.Mark, devices.Mark]] = field(default_factory=list)
    _work: list[tuple[str, int, devices.Mark, devices.Mark, slice]] = field(default_factory=list)
    _begun: devices.Mark = 0.0
    _ended: devices.Mark = 0.0

    @contextmanager
    def time(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Measure the body's time, and name it for the profiler."""
        with record_function(_name(kind, stage, micro_batch)):
            start, waits = devices.mark(self.device), len(self.waits)
            yield
            self._work.append((kind, stage, start, devices.mark(self.device), slice(waits, len(self.waits))))

    def begin(self) -> None:
        """Begin a step, and forget the one before."""
        self._work.clear()
        self._begun = devices.mark(self.device)

    def end(self) -> None:
        """End the step, once its last work is queued."""
        self._ended = devices.mark(self.device)

    def timing(self, stages: Sequence[int], mesh: Mesh) -> StepTiming:
        """The timing of the last step, of which this rank has `stages`. Collective over the pipeline.

        The step's length is the longest of all ranks: the last stage ends before the first has received its gradient.
        """
        devices.synchronize(self.device)
        seconds = {stage: [0.0, 0.0] for stage in stages}
        for kind, stage, start, end, _ in self._work:
            seconds[stage][kind != FORWARD] += devices.seconds_between(start, end)
        work = tuple(StageSeconds(stage, forward, backward) for stage, (forward, backward) in seconds.items())
        busy = sum(stage.forward + stage.backward for stage in work)
        here = torch.tensor([[busy, devices.seconds_between(self._begun, self._ended)]])
        busy_P, length_P = collectives.all_gather(here.to(mesh.device), mesh.pp).cpu().unbind(1)
        longest = float(length_P.max())
        return StepTiming(work, 1 - busy / longest, 1 - float(busy_P.mean()) / longest)

    def own_work(self) -> dict[str, float]:
        """Seconds of the forward and the backward passes of the last step, less those of `waits` within them.

        An accelerator must have done the step's work.
        """
        found = {FORWARD: 0.0, BACKWARD: 0.0}
        for kind, _, start, end, waits in self._work:
            waited = sum(devices.seconds_between(*wait) for wait in self.waits[waits])
            found[FORWARD if kind == FORWARD else BACKWARD] += devices.seconds_between(start, end) - waited
        return found


def name_messages(messages: list[Any], kind: str, stage: int, micro_batch: int) -> list[Any]:
    """Give torch's `P2POp`s the names that a trace shows; returns them."""
    for message in messages:
        message.traced_as = _name(kind, stage, micro_batch)
    return messages


def message_name(message: Any) -> str:
    """The name of a `P2POp` by `name_messages`; messages that open connections have none of their own."""
    name: str = getattr(message, "traced_as", "opening of connections")
    return name


def _name(kind: str, stage: int, micro_batch: int) -> str:
    return f"{kind}, stage {stage}, micro-batch {micro_batch}"
