"""The steps of a run as columns of numbers, which take little memory."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.monitor.lost import number, seconds_of

NUMBERS = (
    "loss",
    "lr",
    "grad_norm",
    "param_norm",
    "tokens",
    "samples",
    "tokens_per_second",
    "samples_per_second",
    "tokens_per_second_per_device",
    "peak_tokens_per_second",
    "mfu",
    "step_seconds",
    "peak_memory_bytes",
    "bubble",
    "loss_spike",
)
"""Numbers of a step that the series of a run has; NaN where a step lacks one."""
PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "other")
"""Of a step's time (`split_seconds`), in the order in which they are shown."""


@dataclass
class Series:
    """The steps of a run, those that were undone left out: by name one number for each step.

    Attributes:
        steps: their numbers, growing.
        seconds: when each was recorded, since the epoch; NaN where that is unknown.
        numbers: by name of `NUMBERS`.
        parts: by name of `PARTS`, seconds of the step.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    numbers: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in NUMBERS})
    parts: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in PARTS})

    def add(self, event: Mapping[str, Any]) -> None:
        """Add a "step" event; steps from its number on are undone."""
        step = event["step"]
        if self.steps and self.steps[-1] >= step:
            self.undo_after(step - 1)
        self.steps.append(step)
        self.seconds.append(seconds_of(event))
        split = event.get("split_seconds")
        for fields, columns in ((event, self.numbers), (split if isinstance(split, dict) else {}, self.parts)):
            for name, values in columns.items():
                value = fields.get(name)
                values.append(value if type(value) is float else number(value))  # there are many: most are floats

    def undo_after(self, step: int) -> None:
        """Forget the steps after `step`: the run went back to it."""
        keep = len(self.steps)
        while keep and self.steps[keep - 1] > step:
            keep -= 1
        if keep < len(self.steps):
            del self.steps[keep:]
            for values in (self.seconds, *self.numbers.values(), *self.parts.values()):
                del values[keep:]
