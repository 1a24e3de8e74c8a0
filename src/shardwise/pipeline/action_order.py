"""The actions of each pipeline rank in a step, in the order of torch's schedules, without torch.

A test compares these orders with those of `torch.distributed.pipelining`. `cost/` computes peak memory from them, and
the bubble of schedules that have no formula for it.

Legend: p pipeline ranks, r the rank, v stages on each rank, m micro-batches of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Literal, NamedTuple

from shardwise.config import ParallelConfig, Recompute, Schedule

Kind = Literal["forward", "backward", "input", "weight"]
"""A forward pass, a whole backward pass, or one of its halves: the gradient of the input, and those of the weights."""

TIME: dict[Kind, int] = {"forward": 1, "backward": 2, "input": 1, "weight": 1}
"""How long each takes, in forward passes. A linear layer's forward pass is one matrix product. Its backward pass is two
of the same size: one for the gradient of the input, one for that of the weight."""


class Action(NamedTuple):  # which is made in half the time of a dataclass: a step has thousands
    """One pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro_batch: int


def action_order(
    parallel: ParallelConfig, micro_batches: int, rank: int, recompute: Recompute = "none"
) -> tuple[Action, ...]:
    """The actions of a rank in one step. Without a pipeline, it does one micro-batch after the other."""
    schedule: Schedule = "1f1b" if parallel.pipeline == 1 else parallel.schedule
    order = _order(schedule, parallel.pipeline, parallel.stages_per_rank, micro_batches, rank)
    return in_one_pass(order) if recompute == "full" else order


def in_one_pass(order: Iterable[Action]) -> tuple[Action, ...]:
    """The same order with whole backward passes, each at the place of its first half.

    Full recompute needs this: in the second half, torch computes the gradient of each weight by itself, and would
    compute a block again for each of its weights.
    """
    return tuple(
        action._replace(kind="backward") if action.kind == "input" else action
        for action in order
        if action.kind != "weight"
    )


def rounds(degree: int, micro_batches: int) -> int:
    """Rounds of an interleaved schedule. A round takes its micro-batches through all stages of a rank, one by one."""
    return max(1, micro_batches // degree)


@cache
def _order(schedule: Schedule, p: int, v: int, m: int, r: int) -> tuple[Action, ...]:
    """The first four schedules differ in how many forward passes come first (arXiv:2104.04473 §2.2), before one forward
    and one backward pass alternate.
    """
    per_round = m // rounds(p, m)
    match schedule:
        case "gpipe":
            return _alternating(p, v, m, r, m)
        case "1f1b":
            return _alternating(p, v, m, r, p - 1 - r)
        case "interleaved":
            return _alternating(p, v, m, r, (v - 1) * per_round + 2 * (p - 1 - r))
        case "interleaved_zero_bubble":
            return _alternating(p, v, m, r, (v - 1) * per_round + p - 1 - r, weights_later=r)
        case "zbv":
            return _zbv(p, m, r)
        case "dualpipev":
            return _dualpipev(p, m, r)


def _alternating(p: int, v: int, m: int, r: int, first: int, weights_later: int | None = None) -> tuple[Action, ...]:
    """`first` forward passes, then one forward and one backward pass in turn, then the remaining backward passes.

    Args:
        p, v, m, r: as in the legend above.
        first: forward passes before the first of those that alternate.
        weights_later: how many backward passes later the gradients of the weights are computed (arXiv:2401.10241,
            ZB-H1); None: backward passes are whole.
    """
    per_round = m // rounds(p, m)
    first = min(first, v * m)

    # Pass i of this rank: a round takes `per_round` micro-batches through the rank's first stage, then the same ones
    # through its next stage. Backward passes take the stages in the opposite order.

    def forward(i: int) -> Action:
        return Action("forward", i // per_round % v * p + r, i // (per_round * v) * per_round + i % per_round)

    def backward(kind: Kind, i: int) -> Action:
        return Action(kind, (v - 1 - i // per_round % v) * p + r, i // (per_round * v) * per_round + i % per_round)

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


class _OrderBuilder:
    """Collects the actions of a rank; each stage takes its micro-batches in order."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self.count: Counter[tuple[Kind, int]] = Counter()

    def add(self, *actions: tuple[Kind, int]) -> None:
        """Append actions (kind, stage), each on the next micro-batch of that kind and stage."""
        for kind, stage in actions:
            number = self.count["input" if kind == "backward" else kind, stage]
            self.order.append(Action(kind, stage, number))
            for part in ("input", "weight") if kind == "backward" else (kind,):
                self.count[part, stage] += 1


def _zbv(p: int, m: int, r: int) -> tuple[Action, ...]:
    """ZB-V (arXiv:2401.10241 §6): stages r and 2p-1-r.

    The pattern needs at least 2p-1 micro-batches: with fewer it is written for 2p-1, and the actions on those that do
    not exist are left out.
    """
    there, back, full, write = r, 2 * p - 1 - r, max(2 * p - 1, m), _OrderBuilder()
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
    return tuple(action for action in write.order if action.micro_batch < m)


def _dualpipev(p: int, m: int, r: int) -> tuple[Action, ...]:
    """DualPipeV (arXiv:2412.19437 §3.2.1, one copy of the model): stages r and 2p-1-r, at least 2p micro-batches."""
    there, back, write = r, 2 * p - 1 - r, _OrderBuilder()
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
