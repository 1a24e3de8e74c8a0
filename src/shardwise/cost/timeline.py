"""A step's actions in time: each rank in the order of its schedule, with unequal stages and messages that take time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwise.config import ParallelConfig, Recompute
from shardwise.config.sections import V_SHAPED
from shardwise.plan.order import Action, action_order
from shardwise.plan.stage import rank_of

_EXACT = 6_000
"""Actions of all ranks up to which a step is simulated whole; of longer ones the steady middle is not repeated."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a micro-batch in a stage; `weight` is the part of `backward` that can be done apart."""

    forward: float
    backward: float
    weight: float


@dataclass(frozen=True)
class Timed:
    """An action with its start and end in seconds."""

    action: Action
    start: float
    end: float


def timeline(
    parallel: ParallelConfig, micro_batches: int, stages: Sequence[StageTimes], message: float, recompute: Recompute
) -> list[list[Timed]]:
    """What each pipeline rank does, in its order."""
    orders = [action_order(parallel, micro_batches, rank, recompute) for rank in range(parallel.pipeline)]
    rows: list[list[Timed]] = [[] for _ in orders]
    _walk(parallel, orders, stages, message, rows)
    return rows


@lru_cache(maxsize=2**13)
def makespan(
    parallel: ParallelConfig,
    micro_batches: int,
    stages: tuple[StageTimes, ...],
    message: float,
    recompute: Recompute,
) -> float:
    """Seconds from the first forward pass to the end of the last backward pass.

    A schedule repeats itself in its middle: for many micro-batches two shorter steps are simulated, a round apart, and
    what they differ by is added for each round that is missing.
    """
    p = parallel.pipeline
    whole = 2 * micro_batches * len(stages)
    if p == 1:
        return micro_batches * sum(one.forward + one.backward for one in stages)
    single = parallel.schedule in ("1f1b", "gpipe")
    step = min(p, 4) if single else p
    rounds = 12 if parallel.schedule in V_SHAPED else 3  # a V finds its steady state late
    few = 2 * p + (micro_batches - 2 * p) % step if single else rounds * p + micro_batches % p
    repeats = (micro_batches - few) // step
    if repeats < 2 or (whole <= _EXACT) or (not single and micro_batches % p):
        return _end(parallel, micro_batches, stages, message, recompute)
    first = _end(parallel, few, stages, message, recompute)
    second = _end(parallel, few + step, stages, message, recompute)
    return first + repeats * (second - first)


def _end(
    parallel: ParallelConfig, micro_batches: int, stages: Sequence[StageTimes], message: float, recompute: Recompute
) -> float:
    if parallel.schedule == "1f1b":
        return _alternating_end(micro_batches, stages, message)
    orders = [action_order(parallel, micro_batches, rank, recompute) for rank in range(parallel.pipeline)]
    return _walk(parallel, orders, stages, message, None)


def _alternating_end(micro_batches: int, stages: Sequence[StageTimes], message: float) -> float:
    """The end of a step by 1F1B, ten times as fast as by a walk through its actions.

    In round k each stage s does its backward pass k - p + s, which the next stage did in round k - 1, and then its
    forward pass k, which the stage before did in the same round.
    """
    p = len(stages)
    free, back = [0.0] * p, [-message] * (p + 1)
    for k in range(micro_batches + p):
        ahead = -message
        for s, one in enumerate(stages):
            now = free[s]
            if p - s <= k < micro_batches + p - s:
                now = back[s] = max(now, back[s + 1] + message) + one.backward
            if k < micro_batches:
                now = ahead = max(now, ahead + message) + one.forward
            free[s] = now
    return max(free)


def _walk(
    parallel: ParallelConfig,
    orders: Sequence[Sequence[Action]],
    stages: Sequence[StageTimes],
    message: float,
    rows: list[list[Timed]] | None,
) -> float:
    """Let each rank do its actions as soon as their input is there; the end of the last one."""
    last, ranks = len(stages) - 1, [rank_of(parallel, index) for index in range(len(stages))]
    ahead: dict[tuple[int, int], float] = {}
    back: dict[tuple[int, int], float] = {}
    at, free = [0] * len(orders), [0.0] * len(orders)
    takes = {kind: [_seconds(kind, one) for one in stages] for kind in ("forward", "backward", "input", "weight")}
    moving = True
    while moving:
        moving = False
        for rank, order in enumerate(orders):
            place, now = at[rank], free[rank]
            while place < len(order):
                action = order[place]
                kind, stage, batch = action.kind, action.stage, action.micro_batch
                ready = 0.0
                if kind == "forward" and stage:
                    found = ahead.get((stage - 1, batch))
                    if found is None:
                        break
                    ready = found + (message if ranks[stage - 1] != rank else 0.0)
                elif kind in ("backward", "input") and stage != last:
                    found = back.get((stage + 1, batch))
                    if found is None:
                        break
                    ready = found + (message if ranks[stage + 1] != rank else 0.0)
                start = now if now > ready else ready
                now = start + takes[kind][stage]
                if kind == "forward":
                    ahead[stage, batch] = now
                elif kind != "weight":
                    back[stage, batch] = now
                if rows is not None:
                    rows[rank].append(Timed(action, start, now))
                place += 1
                moving = True
            at[rank], free[rank] = place, now
    assert all(place == len(order) for place, order in zip(at, orders, strict=True)), "ranks wait for each other"
    return max(free)


def _seconds(kind: str, stage: StageTimes) -> float:
    match kind:
        case "forward":
            return stage.forward
        case "backward":
            return stage.backward
        case "input":
            return stage.backward - stage.weight
        case _:
            return stage.weight
