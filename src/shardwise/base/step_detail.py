"""The record of a logged step that a part of a training gives to those who write it and need not know the part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepDetail:
    """Numbers that a part of a training adds to the record of a logged step, under the names of the run's files.

    Attributes:
        numbers: beside the loss, in metrics and trackers.
        facts: further entries of the step's event.
        scalars: further numbers for trackers, by prefix.
        lines: entries of a line in a file of their own, by its name without `.jsonl`.
    """

    numbers: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    scalars: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    lines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
