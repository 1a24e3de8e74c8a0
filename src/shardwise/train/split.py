"""Where the time of a step goes on one rank: data, forward, backward, communication, optimizer.

Communication is what the rank waits for in collectives, and in a pipeline for other stages; what runs beside other work
costs nothing here. The rest is the rank's own work, by which a slow rank is found: the ranks that wait for it take as
long as it does for a step, but most of that is communication.

On an accelerator the marks are events in its stream. They are read once the host has waited for the step's numbers, so
the measurement adds no wait. The update of the parameters is still under way then, and counts to the next step, as it
does in `step_seconds`. Collectives within a compiled graph count to the pass that they are in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise import device as devices
from shardwise.mesh import Mesh
from shardwise.pipeline.clock import BACKWARD, FORWARD, Clock

DATA, COMMUNICATION, OPTIMIZER, OTHER = "data", "communication", "optimizer", "other"
PARTS = (DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER)
_PIPELINE = "pipeline"


class StepClock:
    """Measures the steps of one rank, phase by phase."""

    def __init__(self, mesh: Mesh, pipeline: Clock | None = None) -> None:
        """`pipeline`: the clock of the stages of this rank, where the model is cut into stages."""
        self._mesh, self._device, self._pipeline = mesh, mesh.device, pipeline
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
        if not self._measures:  # what was not read is too old for the next step that is measured
            self._phases.clear()
            self._waits.clear()
            return
        self._sent_before = self._sent()
        self._collect(self._waits)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body, which is one of `PARTS`."""
        if not self._measures:
            yield
            return
        start, waits = devices.mark(self._device), len(self._waits)
        yield
        self._phases.append((name, start, devices.mark(self._device), slice(waits, len(self._waits))))

    @contextmanager
    def stages(self) -> Iterator[None]:
        """Measure a step of the pipeline, whose own clock tells the forward from the backward passes."""
        with self.phase(_PIPELINE):
            yield

    def read(self) -> None:
        """Add up what was marked so far. An accelerator must have done that work."""
        for name, start, end, waits in self._phases:
            seconds = devices.seconds_between(start, end) - self._waited(waits)
            if name == _PIPELINE and self._pipeline is not None:
                for kind, own in self._pipeline.own_work().items():
                    self._seconds[kind] += own
                    seconds -= own
                name = COMMUNICATION
            self._seconds[name] += seconds
        self._seconds[COMMUNICATION] += self._waited(slice(None))
        self._phases.clear()
        self._waits.clear()

    def split(self, step_seconds: float) -> dict[str, float]:
        """End the step: its seconds by part, with `other`, so that they sum to `step_seconds`; empty if not measured.

        Collectives between this step and the next, such as those of an evaluation, are no part of either.
        """
        if not self._measures:
            return {}
        self._collect(None)
        if self._device.type == "cpu":
            self.read()
        return {**self._seconds, OTHER: max(0.0, step_seconds - sum(self._seconds.values()))}

    def sent(self) -> dict[str, int]:
        """Bytes that this rank has sent since the step began, by axis of the mesh; empty where not measured."""
        if not self._measures:
            return {}
        return {axis: count - self._sent_before[axis] for axis, count in self._sent().items()}

    def _sent(self) -> Counter[str]:
        sent = Counter[str]()
        for group in self._mesh.groups:
            for meter in group.meters.values():
                sent[group.name] += sum(meter.bytes.values())
        return sent

    def _collect(self, waits: list[tuple[devices.Mark, devices.Mark]] | None) -> None:
        """Have the collectives of the mesh add their waits to this list from now on; None: to none."""
        for group in self._mesh.groups:
            for meter in group.meters.values():
                meter.spans = waits

    def _waited(self, waits: slice) -> float:
        return sum(devices.seconds_between(start, end) for start, end in self._waits[waits])
