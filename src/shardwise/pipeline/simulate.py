"""What a schedule does with stages that are all alike: when each rank works, waits, and how much it holds.

A forward pass takes 1, a backward pass 2 (1 for the gradient of the input and 1 for those of the weights, where a
schedule parts them), a message nothing. torch's first stage does both parts at the second one's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

FORWARD, BACKWARD = "forward", "backward"
INPUT, WEIGHTS = "backward of the input", "backward of the weights"

Action: TypeAlias = tuple[str, int, int]
"""(kind, stage, micro-batch) of a piece of work."""

_DURATION = {FORWARD: 1, BACKWARD: 2, INPUT: 1, WEIGHTS: 1}


@dataclass(frozen=True)
class Work:
    """A rank's work on one micro-batch in one stage, from when to when."""

    kind: str
    rank: int
    stage: int
    micro_batch: int
    start: int
    end: int


@dataclass(frozen=True)
class Simulation:
    """A step of a schedule.

    Attributes:
        work: of each rank, in its order. makespan: from the first forward pass to the end of the last backward pass.
    """

    work: tuple[tuple[Work, ...], ...]

    @property
    def makespan(self) -> int:
        return max(each.end for rank in self.work for each in rank)

    def busy(self, rank: int) -> int:
        """How long a rank works."""
        return sum(each.end - each.start for each in self.work[rank])

    @property
    def bubble(self) -> float:
        """The part of the step in which a rank waits for others, on average over the ranks."""
        busy = sum(self.busy(rank) for rank in range(len(self.work)))
        return 1 - busy / (self.makespan * len(self.work))

    def held(self, rank: int) -> int:
        """Most micro-batches of which a rank keeps what their backward pass needs; each stage of it counts by itself."""
        most, held = 0, set[tuple[int, int]]()
        for each in self.work[rank]:
            key = each.stage, each.micro_batch
            if each.kind == FORWARD:
                held.add(key)
                most = max(most, len(held))
            elif each.kind != INPUT:
                held.remove(key)
        return most


def simulate(order: Sequence[Sequence[Action]]) -> Simulation:
    """Run what each rank does, one after the other.

    A forward pass waits for that of the stage before, a backward pass for that of the stage behind.
    """
    last_stage = max(stage for queue in order for _, stage, _ in queue)
    done: dict[tuple[str, int, int], int] = {}
    found: list[list[Work]] = [[] for _ in order]
    moving = True
    while moving:
        moving = False
        for rank, queue in enumerate(order):
            for kind, stage, micro_batch in queue[len(found[rank]) :]:
                needed = _needed(kind, stage, micro_batch, last_stage)
                if needed is not None and needed not in done:
                    break
                free = found[rank][-1].end if found[rank] else 0
                start = max(free, done[needed] if needed is not None else 0)
                work = Work(kind, rank, stage, micro_batch, start, start + _DURATION[kind])
                found[rank].append(work)
                if kind != WEIGHTS:
                    done[FORWARD if kind == FORWARD else BACKWARD, stage, micro_batch] = work.end
                moving = True
    assert all(len(made) == len(queue) for made, queue in zip(found, order, strict=True)), "ranks wait for each other"
    return Simulation(tuple(map(tuple, found)))


def _needed(kind: str, stage: int, micro_batch: int, last_stage: int) -> tuple[str, int, int] | None:
    """What must be done before, beside the rank's own work."""
    if kind == FORWARD:
        return (FORWARD, stage - 1, micro_batch) if stage else None
    if kind == WEIGHTS:
        return None
    return (BACKWARD, stage + 1, micro_batch) if stage < last_stage else (FORWARD, stage, micro_batch)
