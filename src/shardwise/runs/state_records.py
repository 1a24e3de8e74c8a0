"""The losses, gradient norms and state hashes that a run recorded, of the steps that count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.optim.state_digest import digests_by_tensor
from shardwise.runs.folder import RunDirectory, last_kept_step


@dataclass(frozen=True)
class RecordedHash:
    """The hash of a run's state after a step."""

    text: str  # hash of the whole state
    tensors: Mapping[str, str]  # `STATE/NAME` of each tensor → its digest


@dataclass
class StateRecords:
    """The records of a run that are equal to the bit in an equal run."""

    losses: dict[int, float] = field(default_factory=dict)  # step → loss
    norms: dict[int, float] = field(default_factory=dict)  # step → norm of the gradient
    hashes: dict[int, RecordedHash] = field(default_factory=dict)  # step → hash of the state after it
    # Keys that resumptions changed, such as `train.steps 240 → 480`, each with the step after which it was.
    changes: list[tuple[int, str]] = field(default_factory=list)
    begin: int | None = None  # steps before the run's first start: those of its parent, if it is a branch
    ranks: int | None = None  # number of ranks of the run's last start; None if no start is recorded

    @staticmethod
    def of(directory: RunDirectory) -> StateRecords:
        """Read metrics.jsonl; steps that were undone are left out."""
        records = StateRecords()
        names: Mapping[str, Sequence[str]] = {}
        for event in directory.events("start", "step", "resume", "state_hash"):
            step = event.get("step")
            kept = last_kept_step(event)
            if kept is not None:
                records._forget_after(kept)
            if event["event"] == "start":
                records.ranks = event.get("ranks")
                if records.begin is None:
                    records.begin = event.get("steps_before") or 0
            elif event["event"] == "resume" and type(step) is int:
                records.changes += [(step, change) for change in event.get("changes", ())]
            elif event["event"] == "step" and type(step) is int:
                records.losses[step] = event.get("loss", math.nan)
                records.norms[step] = event.get("grad_norm", math.nan)
            elif event["event"] == "state_hash" and type(step) is int:
                names = event.get("names") or names
                records.hashes[step] = RecordedHash(
                    str(event.get("hash")), digests_by_tensor(event.get("tensors") or {}, names)
                )
        return records

    def _forget_after(self, step: int) -> None:
        for numbers in (self.losses, self.norms, self.hashes):
            for later in [number for number in numbers if number > step]:
                del numbers[later]
        # Keys that were changed after a step that was undone are those of the steps that replace it.
        self.changes = [(min(at, step), change) for at, change in self.changes]


def differing_tensors(a: RecordedHash, b: RecordedHash) -> list[str]:
    """`STATE/NAME` of the tensors whose recorded digests differ in two runs, or that one of the two lacks."""
    return [name for name in dict.fromkeys([*a.tensors, *b.tensors]) if a.tensors.get(name) != b.tensors.get(name)]
