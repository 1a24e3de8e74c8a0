"""When a rank worked on which stage and micro-batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

FORWARD, BACKWARD = "forward", "backward"
INPUT, WEIGHTS = "backward of the input", "backward of the weights"


@dataclass(frozen=True)
class Span:
    """One pass of a micro-batch through a stage, with its begin and end.

    Attributes:
        kind: "forward", "backward", …
        stage, micro_batch: their indices.
        start, end: seconds of `time.perf_counter` at which the device began and ended the work.
    """

    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass
class Clock:
    """The times of one step's work on one rank.

    On an accelerator a call returns once the work is queued on the stream. There events in the stream mark where the
    work begins and ends; their times are read after the step, so that timing stalls nothing.
    """

    device: torch.device
    _marks: list[tuple[str, int, int, float | torch.Event, float | torch.Event]] = field(default_factory=list)
    _origin: tuple[float, torch.Event] | None = None
    _begun: float | torch.Event = 0.0
    _ended: float | torch.Event = 0.0

    @contextmanager
    def time(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Time what is inside, and name it for the profiler."""
        with record_function(_name(kind, stage, micro_batch)):
            start = self._now()
            yield
            self._marks.append((kind, stage, micro_batch, start, self._now()))

    def begin(self) -> None:
        """Forget the step before."""
        self._marks.clear()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
            event = torch.Event(self.device, enable_timing=True)
            event.record()
            self._origin = time.perf_counter(), event
        self._begun = self._now()

    def end(self) -> None:
        """Mark the end of the step: its last work is issued."""
        self._ended = self._now()

    @property
    def window(self) -> float:
        """Seconds from the step's begin to its end, waits for others included; read it after `spans`."""
        return self._at(self._ended) - self._at(self._begun)

    def spans(self) -> list[Span]:
        """The step's work, in the order in which it was issued; waits until it is done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return [Span(kind, stage, n, self._at(start), self._at(end)) for kind, stage, n, start, end in self._marks]

    def _now(self) -> float | torch.Event:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def _at(self, mark: float | torch.Event) -> float:
        if isinstance(mark, float):
            return mark
        assert self._origin is not None, "begin() comes first"
        at, event = self._origin
        return at + event.elapsed_time(mark) / 1000


def name_messages(messages: list[Any], kind: str, stage: int, micro_batch: int) -> list[Any]:
    """Give torch's `P2POp`s the names that a trace shows; returns them."""
    for message in messages:
        message.traced_as = _name(kind, stage, micro_batch)
    return messages


def message_name(message: Any) -> str:
    """What `name_messages` named a `P2POp`; those that open connections have no name of their own."""
    name: str = getattr(message, "traced_as", "opening of connections")
    return name


def _name(kind: str, stage: int, micro_batch: int) -> str:
    return f"{kind}, stage {stage}, micro-batch {micro_batch}"
