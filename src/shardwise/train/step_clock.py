"""Measurements of a step on one rank: seconds by part of the step, bytes sent, and memory by kind.

The parts are data, forward, backward, communication and optimizer. Communication is the time for which the rank waits
in collectives and, in a pipeline, for other stages; transfers that run during other work cost nothing here. All else
is the rank's own work, by which a slow rank is found: the ranks that wait for it take as long as it does for a step,
but most of their time is communication.

On an accelerator the marks are events in its stream. They are read once the host has waited for the step's numbers, so
the measurement adds no wait. The update of the parameters is still under way then, and counts to the next step, as it
does in `step_seconds`. Collectives within a compiled graph count to the pass that they are in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.profiler

from shardwise.distributed import devices
from shardwise.distributed.mesh import Mesh
from shardwise.optim.state import kept_bytes
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.pipeline.clock import BACKWARD, FORWARD, Clock

DATA = "data"
COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
OTHER = "other"
PARTS = (DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER)
PIPELINE = "pipeline"
"""A step of the pipeline, whose own clock tells `read` the forward from the backward passes and the waits."""


class StepClock:
    """Measures the steps of one rank, part by part.

    Args:
        pipeline: the clock of the stages of this rank, where the model is cut into stages.
    """

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
        self._sent_before = self._sent_so_far()
        # The meters of the collectives append to this list themselves, as they know when a wait begins and ends.
        self._collect_waits_in(self._waits)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body, which is one of `PARTS` or `PIPELINE`."""
        if not self._measures:
            yield
            return
        start = devices.mark(self._device)
        first_wait = len(self._waits)
        yield
        # Waits within the body are known by their places in the list, and are taken off its time in `read`.
        self._phases.append((name, start, devices.mark(self._device), slice(first_wait, len(self._waits))))

    def read(self) -> None:
        """Add up the marks so far. An accelerator must have done the work that they are around."""
        for name, start, end, waits in self._phases:
            seconds = devices.seconds_between(start, end) - self._seconds_of(waits)
            if name == PIPELINE and self._pipeline is not None:
                for kind, stage_seconds in self._pipeline.own_work().items():
                    self._seconds[kind] += stage_seconds
                    seconds -= stage_seconds
                # The stages' passes are taken out, so the remainder is the wait for other stages.
                name = COMMUNICATION
            self._seconds[name] += seconds
        self._seconds[COMMUNICATION] += self._seconds_of(slice(None))
        self._phases.clear()
        self._waits.clear()

    def split(self, step_seconds: float) -> dict[str, float]:
        """End the step: its seconds by part, with `other`, so that they sum to `step_seconds`; empty if not measured.

        Collectives between this step and the next, such as those of an evaluation, are no part of either.
        """
        if not self._measures:
            return {}
        self._collect_waits_in(None)
        if self._device.type == "cpu":
            self.read()
        # An accelerator's marks are times of its own clock: their sum may exceed the host's seconds a little.
        return {**self._seconds, OTHER: max(0.0, step_seconds - sum(self._seconds.values()))}

    def sent(self) -> dict[str, int]:
        """Bytes that this rank has sent since the step began, by axis of the mesh; empty where not measured."""
        if not self._measures:
            return {}
        return {axis: count - self._sent_before[axis] for axis, count in self._sent_so_far().items()}

    def _sent_so_far(self) -> Counter[str]:
        sent = Counter[str]()
        for group in self._mesh.groups:
            for meter in group.meters.values():
                sent[group.name] += sum(meter.bytes.values())
        return sent

    def _collect_waits_in(self, waits: list[tuple[devices.Mark, devices.Mark]] | None) -> None:
        """Have the collectives of the mesh add their waits to this list from now on; None: to no list."""
        for group in self._mesh.groups:
            for meter in group.meters.values():
                meter.spans = waits

    def _seconds_of(self, waits: slice) -> float:
        return sum(devices.seconds_between(start, end) for start, end in self._waits[waits])


def state_by_kind(model: torch.nn.Module, optimizer: ZeroRedundancyOptimizer) -> dict[str, int]:
    """Bytes of `parameters`, `gradients` and `optimizer` on this rank's device, the same after each step."""
    state = optimizer.state_bytes()
    return kept_bytes(model, optimizer, state["state"] + state["masters"])


def memory_by_kind(state: dict[str, int], device: torch.device) -> dict[str, int]:
    """Bytes in use on this rank: its `state_by_kind`, and all else as `other`."""
    return {**state, "other": max(0, devices.memory_in_use(device) - sum(state.values()))}
