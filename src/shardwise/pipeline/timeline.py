"""A step's actions in time: each rank in the order of its schedule, with unequal stages and messages that take time.

A step's passes on topological levels: what a pass needs is done on a level before its own.

So a simulation takes a level at a time, for all pipeline ranks at once. The passes of a rank in the order of their
levels are those of `pipeline.action_order`; a test compares them. Gradients of weights that are computed apart have no
level: they follow a pass of their rank, or come at the end.

Legend: p pipeline ranks, v stages on each, m micro-batches of a step, q of a round; s a stage, r its rank, k a
micro-batch. Matrices of passes are [stage, micro-batch], those of a program [level, rank].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardwise.config import ParallelConfig, Recompute
from shardwise.config.sections import V_SHAPED
from shardwise.config.stages import rank_of
from shardwise.pipeline.action_order import Action, action_order, rounds

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


Integers = npt.NDArray[np.int64]
_MOST = 16  # micro-batches that are repeated at once where the schedule has no rounds


@dataclass(frozen=True)
class Passes:
    """When the passes of each stage and micro-batch come.

    Attributes:
        forward: their levels.
        backward: likewise.
        split: whether the backward pass computes the gradient of its input alone.
        then: the stage whose weights' gradients follow the backward pass; -1: none.
        steady: the level from which on the ranks repeat themselves, until one has no forward pass left.
    """

    forward: Integers
    backward: Integers
    split: npt.NDArray[np.bool_]
    then: Integers
    steady: int


@dataclass(frozen=True)
class Program:
    """A step by level and rank, with S stages. Of its repeated middle, one period is written down.

    Attributes:
        ranks: of each stage.
        passes: s: forward; S + s: backward; 2·S + s: backward for the input alone; 3·S: none.
        needs: where the input is found in the last `reach` levels: rows of what each rank sent, and a 0, which
            a pass without input takes. One row of indices for each level.
        weights: the stage whose weights' gradients follow; S: none.
        late: how many of each stage come at the end of its rank.
        body: the period's levels, which come `repeats` times more.
    """

    ranks: Integers
    passes: Integers
    needs: tuple[Integers, ...]
    weights: Integers
    late: Integers
    reach: int
    body: range
    repeats: int


def program(parallel: ParallelConfig, micro_batches: int, recompute: Recompute) -> Program:
    """The levels of a step of any schedule but GPipe, on at least two ranks."""
    p, m = parallel.pipeline, micro_batches
    portion = min(p, _MOST)
    least = 2 * p + portion
    if parallel.stages_per_rank > 1 and parallel.schedule not in V_SHAPED:
        portion = m // rounds(p, m)
        least = 3 * portion
    repeats = max(0, m - least) // portion
    return _program(parallel, m - repeats * portion, portion, repeats, recompute == "full")


def passes_of(parallel: ParallelConfig, micro_batches: int, portion: int) -> Passes:
    """The passes of a step; `portion`: micro-batches of a round of an interleaved schedule."""
    if parallel.schedule in V_SHAPED:
        return _v_shaped(parallel, micro_batches)
    return _alternating(parallel, micro_batches, portion if parallel.stages_per_rank > 1 else micro_batches)


@lru_cache(maxsize=32)
def _program(parallel: ParallelConfig, m: int, portion: int, repeats: int, whole: bool) -> Program:
    p, v = parallel.pipeline, parallel.stages_per_rank
    stages, found = p * v, passes_of(parallel, m, portion)
    ranks = np.array([rank_of(parallel, stage) for stage in range(stages)])
    each = np.arange(stages)[:, None]
    kind = each + stages * (1 + found.split) * ~np.bool_(whole) + stages * whole
    rows = int(found.backward.max()) + 1
    passes, weights = np.full((rows, p), 3 * stages), np.full((rows, p), stages)
    needed, lag = np.full((rows, p), p), np.ones((rows, p), np.int64)
    ahead, back = found.forward[:, :m], found.backward[:, :m]
    passes[ahead, ranks[:, None]] = each
    passes[back, ranks[:, None]] = kind[:, :m]
    for levels, here, source in ((ahead, slice(1, None), slice(-1)), (back, slice(-1), slice(1, None))):
        at = levels[here], ranks[here, None]
        needed[at], lag[at] = ranks[source, None], levels[here] - levels[source]
    late = np.zeros(stages, np.int64)
    if not whole:
        follows = found.then >= 0
        weights[found.backward[follows], np.broadcast_to(ranks[:, None], follows.shape)[follows]] = found.then[follows]
        late = found.split[:, :m].sum(1) - np.bincount(found.then[follows], minlength=stages)
    reach = int(lag.max())
    body = range(found.steady, found.steady + 2 * v * portion)
    return Program(ranks, passes, tuple((reach - lag) * (p + 1) + needed), weights, late, reach, body, repeats)


def _alternating(parallel: ParallelConfig, m: int, q: int) -> Passes:
    """Forward passes on even steps of a rank, backward passes on odd ones; with fewer micro-batches than ranks, a round
    waits for the last rank.
    """
    p, v = parallel.pipeline, parallel.stages_per_rank
    s, k, width = np.arange(p * v)[:, None], np.arange(m), max(p, q)
    chunk, r = np.divmod(s, p)
    apart = 2 if parallel.schedule == "interleaved" else 1
    splits = parallel.schedule == "interleaved_zero_bubble"
    first = (v - 1) * width + apart * (p - 1 - r)
    forward = apart * r + 2 * (k // q * v * width + chunk * width + k % q)
    backward = apart * r + 2 * (first + k // q * v * width + (v - 1 - chunk) * width + k % q) + 1
    before = k // q * v * q + (v - 1 - chunk) * q + k % q - r  # the pass whose weights are due
    then = np.where((before >= 0) & splits, (v - 1 - before // q % v) * p + r, -1)
    steady = 2 * ((v - 1) * width + apart * (p - 1) + p) + 1
    return Passes(forward, backward, np.full(backward.shape, splits), then, steady)


def _v_shaped(parallel: ParallelConfig, m: int) -> Passes:
    """From `start` on, each rank takes four levels for a micro-batch: forward on its way there, on its way back, and
    between them two backward passes.
    """
    p, zbv = parallel.pipeline, parallel.schedule == "zbv"
    full = max(2 * p - 1, m)
    s, k = np.arange(2 * p)[:, None], np.arange(full)
    there, r = s < p, np.minimum(s, 2 * p - 1 - s)
    start, early = 4 * p - 1 - r, p - r - (not zbv)
    forward = np.where(
        there,
        np.where(k < 2 * p - r - 1, np.maximum(r + k, 2 * k - 2 * p + 3 * r + 2), start + 4 * (k - 2 * p + r + 1)),
        np.where(k < p, 2 * p - 1 - r + 2 * k, start + 4 * (k - p) + 2),
    )
    there_at, back_at = (1, 3) if zbv else (3, 1)
    on_return = np.where(k < early, 2 * p + r + 2 * k, start + 4 * (k - early) + back_at)
    backward = np.where(there, start + 4 * k + there_at, on_return)
    if zbv:
        owed = np.where(there, (k >= full - p) * r, 0)  # passes that the weights lag behind
        none = np.where(there, (k >= full - p) & (k < full - p + r), k >= full - r) | (k - owed >= m)
        return Passes(forward, backward, np.full(backward.shape, True), np.where(none, -1, s), 4 * p)
    split = np.where(there, 2 * (k - m + p) + 1 > r, (k < early) | (2 * (k - m + r + 1) > r))
    late = k - m + p - r  # of the weights that wait in a queue, the one that is due
    first_in = np.where((late <= r) & ((r + 1 + late) % 2 == 0), 2 * p - 1 - s, s)
    then = np.where(there, np.where((late >= 0) & (late < early), first_in, -1), np.where(k < early, s, -1))
    return Passes(forward, backward, split, then, 4 * p)
