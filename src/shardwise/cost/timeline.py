"""A step's actions in time: each rank in the order of its schedule, with unequal stages and messages that take time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwise.config import ParallelConfig, Recompute
from shardwise.cost.levels import Program, program
from shardwise.plan.order import Action, action_order
from shardwise.plan.stage import rank_of

_ROUNDING = 1e-12  # of a time
_FEW = 12  # ranks for which arrays cost more than they save


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
    """Seconds from the first forward pass to the end of the last backward pass; `timeline` ends then.

    In GPipe, each stage works without a gap from its first to its last micro-batch if no other one takes longer.
    """
    if parallel.schedule == "gpipe" or parallel.pipeline == 1:
        slowest = max(one.forward for one in stages) + max(one.backward for one in stages)
        once = sum(one.forward + one.backward for one in stages) + 2 * (len(stages) - 1) * message
        return once + (micro_batches - 1) * slowest
    if parallel.schedule == "1f1b" and parallel.pipeline <= _FEW:
        return _few_ranks_end(micro_batches, stages, message)
    return _Levels(program(parallel, micro_batches, recompute), stages, message).end()


def _few_ranks_end(micro_batches: int, stages: Sequence[StageTimes], message: float) -> float:
    """The end of a step by 1F1B, in plain numbers.

    In round k each stage s does its backward pass k - p + s, which the next stage did in round k - 1, and then its
    forward pass k, which the stage before did in the same round. Once all times grow by the same, they go on so: see
    `_Levels`.
    """
    p, k = len(stages), 0
    free, back = [0.0] * p, [-message] * (p + 1)
    while k < micro_batches + p:
        ahead, before = -message, [*free, *back[:p]]
        for s, one in enumerate(stages):
            now = free[s]
            if p - s <= k < micro_batches + p - s:
                now = back[s] = max(now, back[s + 1] + message) + one.backward
            if k < micro_batches:
                now = ahead = max(now, ahead + message) + one.forward
            free[s] = now
        left, grown, close = micro_batches - 1 - k, free[0] - before[0], _ROUNDING * free[0]
        if k > p and left > 0 and all(abs(b - a - grown) <= close for a, b in zip(before, free + back, strict=False)):
            free, k = [one + left * grown for one in free], k + left
            back[:p] = [one + left * grown for one in back[:p]]
        k += 1
    return max(free)


class _Levels:
    """A program with its times, level by level.

    Times of a period depend on the last ones by sums and maxima alone. So where a period ends as the one before it, but
    for one number that all times have grown by, all further ones do: they are not simulated.
    """

    def __init__(self, steps: Program, stages: Sequence[StageTimes], message: float) -> None:
        forward, backward, weight = np.array([(one.forward, one.backward, one.weight) for one in stages]).T
        takes = np.concatenate([forward, backward, backward - weight, [0.0]])
        cut = message * (np.diff(steps.ranks) != 0)
        sent = np.concatenate([cut, [0.0], *[[0.0], cut] * 2, [0.0]])
        self._steps = steps
        self._until_sent = tuple((takes + sent)[steps.passes])
        self._until_free = tuple(takes[steps.passes] + np.append(weight, 0.0)[steps.weights])
        ranks = len(self._until_free[0])
        self._late = np.bincount(steps.ranks, steps.late * weight, ranks)
        rows = steps.reach + len(steps.needs) + steps.repeats * len(steps.body)
        self._sent = np.zeros((rows, ranks + 1))
        self._free, self._ready, self._now = np.zeros(ranks), np.empty(ranks), 0

    def end(self) -> float:
        steps = self._steps
        self._run(range(steps.body.stop if steps.repeats else len(steps.needs)))
        for left in reversed(range(steps.repeats)):
            before = float(self._free[0])
            self._run(steps.body)
            grown = float(self._free[0]) - before
            if self._grows_evenly(grown):
                self._sent[self._now : self._now + steps.reach, :-1] += left * grown
                self._free += left * grown
                break
        if steps.repeats:
            self._run(range(steps.body.stop, len(steps.needs)))
        return float((self._free + self._late).max())

    def _run(self, levels: range) -> None:
        """Do these levels: a pass starts when its rank is free and its input is there."""
        steps, free, ready, width = self._steps, self._free, self._ready, self._sent.shape[1]
        times = self._sent.reshape(-1)
        for level in levels:
            times[self._now * width :].take(steps.needs[level], out=ready, mode="clip")
            np.maximum(ready, free, out=ready)
            np.add(ready, self._until_sent[level], out=self._sent[self._now + steps.reach, :-1])
            np.add(ready, self._until_free[level], out=free)
            self._now += 1

    def _grows_evenly(self, grown: float) -> bool:
        """Whether all that later levels need has grown by that since the last period, up to rounding."""
        last, period = slice(self._now, self._now + self._steps.reach), len(self._steps.body)
        earlier = slice(last.start - period, last.stop - period)
        off = abs(self._sent[last, :-1] - self._sent[earlier, :-1] - grown)
        return bool(off.max() <= _ROUNDING * self._free[0])


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
