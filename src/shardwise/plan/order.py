"""In which order each rank of a pipeline works on stages and micro-batches: what torch's schedules do, without torch.

A test compares these orders with those of `torch.distributed.pipelining`. Memory is read from them, and the bubble of
schedules that have no formula for it.

Legend: p pipeline ranks, r the rank, v stages on each rank, m micro-batches of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from shardwise.config import ParallelConfig, Schedule

Kind = Literal["forward", "backward", "input", "weight"]
"""A forward pass, a whole backward pass, or its two parts: the gradient of the input and those of the weights."""

TIME: dict[Kind, int] = {"forward": 1, "backward": 2, "input": 1, "weight": 1}
"""How long each takes beside the others: the two products of a backward pass as long as the forward pass's one."""


@dataclass(frozen=True)
class Work:
    """What a rank does at one time: a stage's part of one micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int


def work_order(parallel: ParallelConfig, micro_batches: int, rank: int) -> tuple[Work, ...]:
    """The work of a rank in one step; without a pipeline one micro-batch after the other."""
    schedule: Schedule = "1f1b" if parallel.pipeline == 1 else parallel.schedule
    return _order(schedule, parallel.pipeline, parallel.stages_per_rank, micro_batches, rank)


def in_one_pass(order: Iterable[Work]) -> tuple[Work, ...]:
    """The order where backward passes are not parted: all is done where the gradient of the input has its place.

    So it is with full recompute, which would compute a block again for the gradient of each of its weights.
    """
    return tuple(
        replace(work, kind="backward") if work.kind == "input" else work for work in order if work.kind != "weight"
    )


def rounds(degree: int, micro_batches: int) -> int:
    """In how many rounds an interleaved schedule takes the micro-batches; a round goes through all stages of a rank."""
    return max(1, micro_batches // degree)


@cache
def _order(schedule: Schedule, p: int, v: int, m: int, r: int) -> tuple[Work, ...]:
    """Forward passes that come first, before one forward and one backward pass alternate (arXiv:2104.04473 §2.2):

    | schedule                | passes                          |
    |-------------------------|---------------------------------|
    | gpipe                   | m                               |
    | 1f1b                    | p-1-r                           |
    | interleaved             | (v-1)·m/rounds + 2·(p-1-r)      |
    | interleaved_zero_bubble | (v-1)·m/rounds + p-1-r          |
    """
    each = m // rounds(p, m)
    match schedule:
        case "gpipe":
            return _alternating(p, v, m, r, m)
        case "1f1b":
            return _alternating(p, v, m, r, p - 1 - r)
        case "interleaved":
            return _alternating(p, v, m, r, (v - 1) * each + 2 * (p - 1 - r))
        case "interleaved_zero_bubble":
            return _alternating(p, v, m, r, (v - 1) * each + p - 1 - r, weights_later=r)
        case "zbv":
            return _zbv(p, m, r)
        case "dualpipev":
            return _dualpipev(p, m, r)


def _alternating(p: int, v: int, m: int, r: int, first: int, weights_later: int | None = None) -> tuple[Work, ...]:
    """`first` forward passes, then a forward and a backward pass by turns, then what remains of the backward passes.

    weights_later: weight gradients lag this many backward passes behind (arXiv:2401.10241, ZB-H1); None: they are part
    of these.
    """
    each = m // rounds(p, m)
    first = min(first, v * m)

    def forward(i: int) -> Work:
        return Work("forward", i // each % v * p + r, i // (each * v) * each + i % each)

    def backward(kind: Kind, i: int) -> Work:
        return Work(kind, (v - 1 - i // each % v) * p + r, i // (each * v) * each + i % each)

    order = [forward(i) for i in range(first)]
    for i in range(v * m):
        if first + i < v * m:
            order.append(forward(first + i))
        order.append(backward("backward" if weights_later is None else "input", i))
        if weights_later is not None and i >= weights_later:
            order.append(backward("weight", i - weights_later))
    if weights_later is not None:
        order += [backward("weight", i) for i in range(max(v * m - weights_later, 0), v * m)]
    return tuple(order)


class _Writer:
    """Writes down an order in which each stage takes its micro-batches one after the other."""

    def __init__(self) -> None:
        self.order: list[Work] = []
        self.count: Counter[tuple[Kind, int]] = Counter()

    def add(self, *works: tuple[Kind, int]) -> None:
        """Each of (kind, stage), on the next micro-batch of its own."""
        for kind, stage in works:
            number = self.count["input" if kind == "backward" else kind, stage]
            self.order.append(Work(kind, stage, number))
            for part in ("input", "weight") if kind == "backward" else (kind,):
                self.count[part, stage] += 1


def _zbv(p: int, m: int, r: int) -> tuple[Work, ...]:
    """ZB-V (arXiv:2401.10241 §6): stages r and 2p-1-r. Written for 2p-1 micro-batches at least; others are left out."""
    there, back, full, write = r, 2 * p - 1 - r, max(2 * p - 1, m), _Writer()
    count = write.count
    for _ in range(2 * (p - r) - 1):
        write.add(("forward", there))
    for _ in range(r):
        write.add(("forward", back), ("forward", there))
    for _ in range(p - r):
        write.add(("forward", back), ("input", back), ("weight", back))
    while count["forward", back] < count["forward", there] or count["forward", there] < full:
        if count["forward", there] < full:
            write.add(("forward", there))
        write.add(("input", there), ("weight", there), ("forward", back), ("input", back), ("weight", back))
    for _ in range(r):
        write.add(("input", there), ("input", back))
    for _ in range(p - r):
        write.add(("input", there), ("weight", there))
    for stage in (back, there):
        for _ in range(count["input", stage] - count["weight", stage]):
            write.add(("weight", stage))
    return tuple(work for work in write.order if work.micro_batch < m)


def _dualpipev(p: int, m: int, r: int) -> tuple[Work, ...]:
    """DualPipeV (arXiv:2412.19437 §3.2.1, one copy of the model): stages r and 2p-1-r, at least 2p micro-batches."""
    there, back, write = r, 2 * p - 1 - r, _Writer()
    pending: list[int] = []

    def split(stage: int) -> None:
        write.add(("input", stage))
        pending.append(stage)

    def weight() -> None:
        if pending:
            write.add(("weight", pending.pop(0)))

    for _ in range(2 * (p - r - 1)):
        write.add(("forward", there))
    for _ in range(r + 1):
        write.add(("forward", there), ("forward", back))
    for _ in range(p - r - 1):
        split(back)
        weight()
        write.add(("forward", back))
    for _ in range(m - 2 * p + r + 1):
        write.add(("forward", there), ("backward", back), ("forward", back), ("backward", there))
    for _ in range(p - r - 1):
        write.add(("backward", back), ("forward", back), ("backward", there))
    for i in range(2 * (r + 1)):  # the second half leaves weight gradients for the gaps
        stage = there if i % 2 else back
        if i > r:
            split(stage)
        else:
            write.add(("backward", stage))
    for _ in range(p - r - 1):
        weight()
        split(there)
    for _ in range(r + 1):
        weight()
    return tuple(write.order)
