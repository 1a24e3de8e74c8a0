"""What passes between `shardwise compile` and the processes that it starts: one graph each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """One graph that is to be captured, and compiled unless `only_capture`.

    Attributes:
        config: resolved.
        unit, training: the graph.
        rank, world: of the role that is played: a rank with that unit, in a job with one data-parallel rank.
        device: its kind.
        folder: where the compiler works.
        only_capture: trace the graph from tensors without data.
    """

    config: Mapping[str, Any]
    unit: str
    training: bool
    rank: int
    world: int
    device: str
    folder: str
    only_capture: bool

    def dump(self) -> str:
        """The job as a text that `load` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Job:
        """The job of a text."""
        return Job(**json.loads(text))
