"""When each pipeline rank works and when it waits in a step, by a simulation of the schedule with equal stages.

An action takes `order.TIME` and a message takes no time. So the result is the bubble that the order of the actions
causes by itself, on any device.

torch's first stage computes both halves of a split backward pass at the place of the second; here each has its place.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config import ParallelConfig, Recompute
from shardwise.pipeline.action_order import TIME, Action, action_order


@dataclass(frozen=True)
class Timed:
    """An action with its start and end, in forward passes of a stage."""

    action: Action
    start: int
    end: int


@dataclass(frozen=True)
class Simulation:
    """A step of a schedule.

    Attributes:
        ranks: what each rank does, in its order.
    """

    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def makespan(self) -> int:
        """From the first forward pass to the end of the last backward pass."""
        return max(timed.end for row in self.ranks for timed in row)

    def busy(self, rank: int) -> int:
        """How long a rank works."""
        return sum(timed.end - timed.start for timed in self.ranks[rank])

    @property
    def bubble(self) -> float:
        """The part of the step in which a rank waits for others, on average over the ranks."""
        busy = sum(self.busy(rank) for rank in range(len(self.ranks)))
        return 1 - busy / (self.makespan * len(self.ranks))


def simulate(parallel: ParallelConfig, micro_batches: int, recompute: Recompute = "none") -> Simulation:
    """A step in which each rank does its actions in order, each as soon as the pass that it needs is done.

    A forward pass needs the one of the stage before, a backward pass the one of the stage after. With full recompute,
    no backward pass is split.
    """
    orders = [action_order(parallel, micro_batches, rank, recompute) for rank in range(parallel.pipeline)]
    last_stage = max(action.stage for order in orders for action in order)
    # Each round lets every rank do the actions whose input is there. The rounds end when no rank can do anything more.
    done: dict[tuple[bool, int, int], int] = {}
    timed: list[list[Timed]] = [[] for _ in orders]
    moving = True
    while moving:
        moving = False
        for rank, order in enumerate(orders):
            for action in order[len(timed[rank]) :]:
                needed = _needed(action, last_stage)
                if needed is not None and needed not in done:
                    break
                free = timed[rank][-1].end if timed[rank] else 0
                start = max(free, done[needed] if needed is not None else 0)
                timed[rank].append(Timed(action, start, start + TIME[action.kind]))
                if action.kind != "weight":
                    done[action.kind == "forward", action.stage, action.micro_batch] = timed[rank][-1].end
                moving = True
    assert all(len(made) == len(order) for made, order in zip(timed, orders, strict=True)), "ranks wait for each other"
    return Simulation(tuple(map(tuple, timed)))


def _needed(action: Action, last_stage: int) -> tuple[bool, int, int] | None:
    """(is forward, stage, micro-batch) of the pass that must be done before, or None."""
    if action.kind == "forward":
        return (True, action.stage - 1, action.micro_batch) if action.stage else None
    if action.kind == "weight" or action.stage == last_stage:
        return None
    return (False, action.stage + 1, action.micro_batch)


def bubble(parallel: ParallelConfig, micro_batches: int) -> float | None:
    """The part of a step in which a rank waits for others, where stages are equal and messages take no time.

    (p-1) / (m+p-1) with GPipe (arXiv:1811.06965 §2.3) and 1F1B (arXiv:2104.04473 §2.2.1); (p-1) / (v·m+p-1) if it is
    interleaved (§2.2.2) and m ≥ p. None for m < p there, and for schedules that move weight gradients into the gaps:
    these have no formula, and `simulate` follows the order of their actions.

    Legend: p pipeline ranks, v stages on each rank, m micro-batches of a step.
    """
    p, m = parallel.pipeline, micro_batches
    if p == 1:
        return 0.0
    match parallel.schedule:
        case "gpipe" | "1f1b":
            return (p - 1) / (m + p - 1)
        case "interleaved" if m >= p:
            return (p - 1) / (parallel.stages_per_rank * m + p - 1)
        case _:
            return None
