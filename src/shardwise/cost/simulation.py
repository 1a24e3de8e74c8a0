"""When each rank of a pipeline works and waits in a step, and how much it holds, where stages are all alike.

Work takes `order.TIME`, messages take nothing. torch's first stage does both parts of a parted backward pass at the
second one's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.config import ParallelConfig, Recompute
from shardwise.plan.order import TIME, Work, in_one_pass, work_order


@dataclass(frozen=True)
class Timed:
    """A piece of work, from when to when."""

    work: Work
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
        return max(each.end for row in self.ranks for each in row)

    def busy(self, rank: int) -> int:
        """How long a rank works."""
        return sum(each.end - each.start for each in self.ranks[rank])

    @property
    def bubble(self) -> float:
        """The part of the step in which a rank waits for others, on average over the ranks."""
        busy = sum(self.busy(rank) for rank in range(len(self.ranks)))
        return 1 - busy / (self.makespan * len(self.ranks))


def simulate(parallel: ParallelConfig, micro_batches: int, recompute: Recompute = "none") -> Simulation:
    """A step of the schedule. Full recompute leaves backward passes in one part."""
    orders = [work_order(parallel, micro_batches, rank) for rank in range(parallel.pipeline)]
    return run_orders([in_one_pass(order) for order in orders] if recompute == "full" else orders)


def run_orders(orders: Sequence[Sequence[Work]]) -> Simulation:
    """Do what each rank is to do, one after the other.

    A forward pass waits for that of the stage before, a backward pass for that of the stage behind.
    """
    last_stage = max(work.stage for order in orders for work in order)
    done: dict[tuple[bool, int, int], int] = {}
    found: list[list[Timed]] = [[] for _ in orders]
    moving = True
    while moving:
        moving = False
        for rank, order in enumerate(orders):
            for work in order[len(found[rank]) :]:
                needed = _needed(work, last_stage)
                if needed is not None and needed not in done:
                    break
                free = found[rank][-1].end if found[rank] else 0
                start = max(free, done[needed] if needed is not None else 0)
                found[rank].append(Timed(work, start, start + TIME[work.kind]))
                if work.kind != "weight":
                    done[work.kind == "forward", work.stage, work.micro_batch] = found[rank][-1].end
                moving = True
    assert all(len(made) == len(order) for made, order in zip(found, orders, strict=True)), "ranks wait for each other"
    return Simulation(tuple(map(tuple, found)))


def _needed(work: Work, last_stage: int) -> tuple[bool, int, int] | None:
    """(forward, stage, micro-batch) that must be done before, beside the rank's own work."""
    if work.kind == "forward":
        return (True, work.stage - 1, work.micro_batch) if work.stage else None
    if work.kind == "weight" or work.stage == last_stage:
        return None
    return (False, work.stage + 1, work.micro_batch)


def bubble(parallel: ParallelConfig, micro_batches: int) -> float | None:
    """The part of a step in which a rank waits for others, where stages are equal and messages take no time.

    (p-1) / (m+p-1) with GPipe (arXiv:1811.06965 §2.3) and 1F1B (arXiv:2104.04473 §2.2.1); (p-1) / (v·m+p-1) where it is
    interleaved (§2.2.2) and a round has as many micro-batches as there are ranks, or more. None with fewer, and for
    schedules that move weight gradients into the gaps: there `simulate` follows the order of their work.

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
