"""The actions of each pipeline rank in a step, in the order of torch's schedules, without torch.

`ORDERS` has the order of each schedule; a test compares it with `torch.distributed.pipelining`. The planner computes
peak memory and the time of a step from these orders.

Legend: p pipeline ranks, r the rank, v stages on each rank, m micro-batches of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, Protocol

from shardwise.config import ParallelConfig, Recompute
from shardwise.config.pipeline_schedule_specs import DEFAULT_SCHEDULE, rounds_of_step

FORWARD = "forward"
BACKWARD = "backward"
INPUT = "backward of the input"
WEIGHTS = "backward of the weights"
"""Kinds of work on a stage, as records and traces call them."""

ActionKind = Literal["forward", "backward", "input", "weight"]
"""A forward pass, a whole backward pass, or one of its halves: the gradient of the input, and those of the weights."""

TIME: dict[ActionKind, int] = {"forward": 1, "backward": 2, "input": 1, "weight": 1}
"""The time of each kind, in forward passes.

A linear layer's forward pass is one matrix product. Its backward pass is two of the same size: one for the gradient of
the input, one for that of the weight.
"""


class Action(NamedTuple):  # which is made in half the time of a dataclass: a step has thousands
    """One pass of one micro-batch through one stage."""

    kind: ActionKind
    stage: int
    micro_batch: int


class _ScheduleOrder(Protocol):
    def actions(self, p: int, v: int, m: int, r: int) -> tuple[Action, ...]:
        """Return the actions of rank r in one step."""
        ...


def action_order(
    parallel: ParallelConfig, micro_batches: int, rank: int, recompute: Recompute = "none"
) -> tuple[Action, ...]:
    """Return the actions of a rank in one step. Without a pipeline, it does one micro-batch after the other."""
    schedule = DEFAULT_SCHEDULE if parallel.pipeline == 1 else parallel.schedule
    order = _actions(schedule, parallel.pipeline, parallel.stages_per_rank, micro_batches, rank)
    return with_whole_backward_passes(order) if recompute == "full" else order


@cache
def _actions(schedule: str, p: int, v: int, m: int, r: int) -> tuple[Action, ...]:
    return ORDERS[schedule].actions(p, v, m, r)


def with_whole_backward_passes(order: Iterable[Action]) -> tuple[Action, ...]:
    """Return the same order with whole backward passes, each at the place of its first half.

    Full recompute needs this: in the second half, torch computes the gradient of each weight by itself, and would
    compute a block again for each of its weights.
    """
    return tuple(
        action._replace(kind="backward") if action.kind == "input" else action
        for action in order
        if action.kind != "weight"
    )


@dataclass(frozen=True)
class AlternatingOrder:
    """Forward passes first, then one forward and one backward pass in turn, then the remaining backward passes.

    arXiv:2104.04473 §2.2. Schedules of this kind differ in the number of forward passes that come first.

    Attributes:
        lead: number of forward passes that a rank does before its first backward pass, more than the next rank; None if
            all forward passes come first.
        defers_weights: True if gradients of weights are computed r backward passes later (arXiv:2401.10241, ZB-H1);
            otherwise backward passes are whole.
    """

    lead: int | None
    defers_weights: bool = False

    def actions(self, p: int, v: int, m: int, r: int) -> tuple[Action, ...]:
        """Return the actions of rank r in one step."""
        passes = v * m
        per_round = m // rounds_of_step(p, m)
        if self.lead is None:
            first = passes
        else:
            # The first micro-batch comes back after v-1 rounds through this rank's earlier stages, and the way to the
            # last rank and back.
            first = min((v - 1) * per_round + self.lead * (p - 1 - r), passes)

        # Pass i of this rank: a round takes `per_round` micro-batches through the rank's first stage, then the same
        # ones through its next stage. Backward passes take the stages in the opposite order.

        def forward(i: int) -> Action:
            virtual_stage = i // per_round % v
            return Action("forward", virtual_stage * p + r, _micro_batch(i, v, per_round))

        def backward(kind: ActionKind, i: int) -> Action:
            virtual_stage = v - 1 - i // per_round % v
            return Action(kind, virtual_stage * p + r, _micro_batch(i, v, per_round))

        order = [forward(i) for i in range(first)]
        for i in range(passes):
            if first + i < passes:
                order.append(forward(first + i))
            order.append(backward("input" if self.defers_weights else "backward", i))
            if self.defers_weights and i >= r:
                order.append(backward("weight", i - r))
        if self.defers_weights:
            order += [backward("weight", i) for i in range(max(passes - r, 0), passes)]
        return tuple(order)


def _micro_batch(i: int, v: int, per_round: int) -> int:
    """Return the micro-batch of pass i of a rank, where rounds have `per_round` micro-batches."""
    return i // (per_round * v) * per_round + i % per_round


@dataclass(frozen=True)
class VShapedOrder:
    """The order of a schedule in which rank r holds the stages r (outbound) and 2p-1-r (returning)."""

    build: Callable[[int, int, int], tuple[Action, ...]]  # function of (p, m, r) that returns the actions
    # True if every backward pass is split; otherwise only those at the begin and the end of a step, where their
    # weights' gradients fill gaps.
    splits_every_backward: bool

    def actions(self, p: int, v: int, m: int, r: int) -> tuple[Action, ...]:
        """Return the actions of rank r in one step."""
        return self.build(p, m, r)


class _OrderBuilder:
    """Collects the actions of a rank; each stage takes its micro-batches in order."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self.count: Counter[tuple[ActionKind, int]] = Counter()

    def add(self, *actions: tuple[ActionKind, int]) -> None:
        """Append actions (kind, stage), each on the next micro-batch of that kind and stage."""
        for kind, stage in actions:
            # A whole backward pass is both halves on the same micro-batch, so it counts as both.
            halves: tuple[ActionKind, ...] = ("input", "weight") if kind == "backward" else (kind,)
            self.order.append(Action(kind, stage, self.count[halves[0], stage]))
            for half in halves:
                self.count[half, stage] += 1


def _zero_bubble_v(p: int, m: int, r: int) -> tuple[Action, ...]:
    """ZB-V (arXiv:2401.10241 §6).

    The pattern needs at least 2p-1 micro-batches: with fewer it is written for 2p-1, and the actions on those that do
    not exist are left out.
    """
    outbound = r
    returning = 2 * p - 1 - r
    padded = max(2 * p - 1, m)
    builder = _OrderBuilder()
    count = builder.count
    # Until the first micro-batch is back at this rank.
    for _ in range(2 * (p - r) - 1):
        builder.add(("forward", outbound))
    for _ in range(r):
        builder.add(("forward", returning), ("forward", outbound))
    # The returning stage is the first that has backward passes to do.
    for _ in range(p - r):
        builder.add(("forward", returning), ("input", returning), ("weight", returning))
    while count["forward", returning] < count["forward", outbound] or count["forward", outbound] < padded:
        if count["forward", outbound] < padded:
            builder.add(("forward", outbound))
        builder.add(("input", outbound), ("weight", outbound))
        builder.add(("forward", returning), ("input", returning), ("weight", returning))
    # Other ranks wait for gradients of inputs, so those come first and the weights' gradients fill the gaps after them.
    for _ in range(r):
        builder.add(("input", outbound), ("input", returning))
    for _ in range(p - r):
        builder.add(("input", outbound), ("weight", outbound))
    for stage in (returning, outbound):
        for _ in range(count["input", stage] - count["weight", stage]):
            builder.add(("weight", stage))
    return tuple(action for action in builder.order if action.micro_batch < m)


def _dual_pipe_v(p: int, m: int, r: int) -> tuple[Action, ...]:
    """DualPipeV (arXiv:2412.19437 §3.2.1, one copy of the model) for at least 2p micro-batches."""
    outbound = r
    returning = 2 * p - 1 - r
    builder = _OrderBuilder()
    weight_queue: list[int] = []

    def input_gradient(stage: int) -> None:
        builder.add(("input", stage))
        weight_queue.append(stage)

    def weight_gradients() -> None:
        if weight_queue:
            builder.add(("weight", weight_queue.pop(0)))

    for _ in range(2 * (p - r - 1)):
        builder.add(("forward", outbound))
    for _ in range(r + 1):
        builder.add(("forward", outbound), ("forward", returning))
    for _ in range(p - r - 1):
        input_gradient(returning)
        weight_gradients()
        builder.add(("forward", returning))
    for _ in range(m - 2 * p + r + 1):
        builder.add(("forward", outbound), ("backward", returning), ("forward", returning), ("backward", outbound))
    for _ in range(p - r - 1):
        builder.add(("backward", returning), ("forward", returning), ("backward", outbound))
    for i in range(2 * (r + 1)):  # the second half leaves weight gradients for the gaps
        stage = outbound if i % 2 else returning
        if i > r:
            input_gradient(stage)
        else:
            builder.add(("backward", stage))
    for _ in range(p - r - 1):
        weight_gradients()
        input_gradient(outbound)
    for _ in range(r + 1):
        weight_gradients()
    return tuple(builder.order)


ORDERS: dict[str, _ScheduleOrder] = {
    "gpipe": AlternatingOrder(lead=None),
    "1f1b": AlternatingOrder(lead=1),
    # The lead of 2 is the one of Megatron-LM, which torch follows.
    "interleaved": AlternatingOrder(lead=2),
    "interleaved_zero_bubble": AlternatingOrder(lead=1, defers_weights=True),
    "zbv": VShapedOrder(_zero_bubble_v, splits_every_backward=True),
    "dualpipev": VShapedOrder(_dual_pipe_v, splits_every_backward=False),
}
"""The order of each schedule, by the name of its record in `config/pipeline_schedule_specs.py`."""
