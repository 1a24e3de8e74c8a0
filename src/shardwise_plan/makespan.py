"""The time that a step of a pipeline takes, without walking through its actions one by one.

The planner asks this for thousands of layouts. A closed form answers where all forward passes come first; all other
schedules are simulated on topological levels.

A *level* is a step of an imaginary clock: each rank does at most one pass on a level, and what a pass needs is done on
an earlier level. So a simulation takes a level at a time, for all ranks at once. The passes of a rank in the order of
their levels are those of `pipeline/action_order.py`; a test compares them. Weights' gradients that are computed apart
have no level: they follow a pass of their rank, or come at its end.

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
from shardwise.config.pipeline_schedule_specs import rounds_of_step
from shardwise.pipeline.action_order import ORDERS, AlternatingOrder, VShapedOrder
from shardwise.pipeline.partition import pipeline_rank_of
from shardwise.pipeline.timeline import StageTimes, timeline

Integers = npt.NDArray[np.int64]

_ROUNDING = 1e-12  # largest difference, as a part of a time, that rounding of sums can explain
_LONGEST_PERIOD = 16  # largest number of micro-batches in the repeated part of a program whose schedule has no rounds


@lru_cache(maxsize=2**13)
def makespan(
    parallel: ParallelConfig, micro_batches: int, stages: tuple[StageTimes, ...], message: float, recompute: Recompute
) -> float:
    """Predict the time from the first forward pass to the end of the last backward pass; `timeline` ends then.

    All arguments are those of `timeline`.
    """
    order = ORDERS[parallel.schedule]
    if parallel.pipeline == 1 or (isinstance(order, AlternatingOrder) and order.lead is None):
        return _end_of_forward_then_backward(micro_batches, stages, message)
    if isinstance(order, AlternatingOrder | VShapedOrder):
        return _LevelSimulation(level_program(parallel, micro_batches, recompute), stages, message).end()
    return timeline(parallel, micro_batches, stages, message, recompute).makespan


def _end_of_forward_then_backward(micro_batches: int, stages: Sequence[StageTimes], message: float) -> float:
    """Return the end of a step whose forward passes all come before its backward passes.

    The first micro-batch goes through all stages and back without a wait. After it, the slowest stage of either
    direction works without a gap, and the others wait for it.
    """
    slowest = max(stage.forward for stage in stages) + max(stage.backward for stage in stages)
    first = sum(stage.forward + stage.backward for stage in stages) + 2 * (len(stages) - 1) * message
    return first + (micro_batches - 1) * slowest


class _LevelSimulation:
    """A program with its times, level by level.

    Times of a period depend on earlier ones by sums and maxima alone. So if all times at the end of a period are those
    at the end of the one before plus one number, each further period adds that number again: they are not simulated.
    """

    def __init__(self, program: _LevelProgram, stages: Sequence[StageTimes], message: float) -> None:
        forward, backward, weight = np.array([(stage.forward, stage.backward, stage.weight) for stage in stages]).T
        # In the order of the numbers of `program.passes`: forward, whole backward, backward for the input alone, none.
        durations = np.concatenate([forward, backward, backward - weight, [0.0]])
        # Neighbouring stages of one rank need no message. The last stage sends nothing on, the first nothing back.
        transit = message * (np.diff(program.ranks) != 0)
        forward_transit = np.append(transit, 0.0)
        backward_transit = np.insert(transit, 0, 0.0)
        transits = np.concatenate([forward_transit, backward_transit, backward_transit, [0.0]])
        self._program = program
        self._until_arrival = tuple((durations + transits)[program.passes])
        self._until_free = tuple(durations[program.passes] + np.append(weight, 0.0)[program.weights])
        ranks = len(self._until_free[0])
        self._late_weights = np.bincount(program.ranks, program.late * weight, ranks)
        rows = program.reach + len(program.needs) + program.repeats * len(program.body)
        # When what each rank sent on each level has arrived. The last column stays 0: it is the input of passes that
        # need none. The first `reach` rows stand before the first level.
        self._arrivals = np.zeros((rows, ranks + 1))
        self._free = np.zeros(ranks)
        self._ready = np.empty(ranks)
        self._level = 0

    def end(self) -> float:
        """Return the end of the last rank."""
        program = self._program
        levels = len(program.needs)
        if program.repeats == 0:
            self._run(range(levels))
        else:
            self._run(range(program.body.stop))
            self._repeat_body()
            self._run(range(program.body.stop, levels))
        return float((self._free + self._late_weights).max())

    def _repeat_body(self) -> None:
        """Simulate the repeated periods until they grow evenly, and add the growth of all others at once."""
        program = self._program
        for periods_left in reversed(range(program.repeats)):
            before = float(self._free[0])
            self._run(program.body)
            growth = float(self._free[0]) - before
            if self._grows_evenly(growth):
                self._arrivals[self._level : self._level + program.reach, :-1] += periods_left * growth
                self._free += periods_left * growth
                return

    def _run(self, levels: range) -> None:
        """Do these levels: a pass starts when its rank is free and its input is there."""
        program = self._program
        free = self._free
        ready = self._ready
        columns = self._arrivals.shape[1]
        flat_arrivals = self._arrivals.reshape(-1)
        for level in levels:
            flat_arrivals[self._level * columns :].take(program.needs[level], out=ready, mode="clip")
            np.maximum(ready, free, out=ready)
            np.add(ready, self._until_arrival[level], out=self._arrivals[self._level + program.reach, :-1])
            np.add(ready, self._until_free[level], out=free)
            self._level += 1

    def _grows_evenly(self, growth: float) -> bool:
        """Return whether all that later levels need has grown by `growth` since the last period, up to rounding."""
        period = len(self._program.body)
        latest = slice(self._level, self._level + self._program.reach)
        earlier = slice(latest.start - period, latest.stop - period)
        difference = abs(self._arrivals[latest, :-1] - self._arrivals[earlier, :-1] - growth)
        return bool(difference.max() <= _ROUNDING * self._free[0])


@dataclass(frozen=True)
class _LevelProgram:
    """A step by level and rank, with S stages. Only one period of its repeated middle is written down.

    `passes`: number of the pass on each level of each rank. s: forward; S + s: backward; 2·S + s: backward for the
    input alone; 3·S: none.
    `needs`: for each level and rank, the place of the input in the last `reach` rows of arrivals, flattened.
    """

    ranks: Integers  # rank of each stage
    passes: Integers
    needs: tuple[Integers, ...]
    weights: Integers  # stage whose weights' gradients follow the pass; S: none
    late: Integers  # number of each stage's weights' gradients that come at the end of its rank
    reach: int  # number of levels that an input may be old
    body: range  # levels of the period
    repeats: int  # how often the period comes again


@dataclass(frozen=True)
class _PassLevels:
    """Levels of the passes of each stage and micro-batch."""

    forward: Integers  # levels of the forward passes
    backward: Integers  # levels of the backward passes
    split: npt.NDArray[np.bool_]  # True where the backward pass computes the gradient of its input alone
    weight_stage: Integers  # stage whose weights' gradients follow the backward pass; -1: none
    steady: int  # level from which on the ranks repeat themselves, until one has no forward pass left


def level_program(parallel: ParallelConfig, micro_batches: int, recompute: Recompute) -> _LevelProgram:
    """Return the levels of a step to simulate, on at least two ranks whose forward passes do not all come first."""
    p = parallel.pipeline
    m = micro_batches
    if _has_rounds(parallel):
        period = m // rounds_of_step(p, m)
        shortest = 3 * period
    else:
        period = min(p, _LONGEST_PERIOD)
        shortest = 2 * p + period
    repeats = max(0, m - shortest) // period
    return _program(parallel, m - repeats * period, period, repeats, recompute == "full")


def _has_rounds(parallel: ParallelConfig) -> bool:
    return parallel.stages_per_rank > 1 and isinstance(ORDERS[parallel.schedule], AlternatingOrder)


@lru_cache(maxsize=32)
def _program(parallel: ParallelConfig, m: int, period: int, repeats: int, whole_backward: bool) -> _LevelProgram:
    p = parallel.pipeline
    v = parallel.stages_per_rank
    stages = p * v
    levels = pass_levels(parallel, m, period)
    rank_of_stage = np.array([pipeline_rank_of(parallel, stage) for stage in range(stages)])
    stage_S1 = np.arange(stages)[:, None]
    rank_S1 = rank_of_stage[:, None]
    forward = levels.forward[:, :m]
    backward = levels.backward[:, :m]
    split = levels.split[:, :m]
    rows = int(levels.backward.max()) + 1

    passes = np.full((rows, p), 3 * stages)
    passes[forward, rank_S1] = stage_S1
    if whole_backward:
        passes[backward, rank_S1] = stage_S1 + stages
    else:
        passes[backward, rank_S1] = stage_S1 + stages * (1 + split)

    # The input of a pass: the rank that sent it, and how many levels ago. Passes without input take column p, a 0.
    source_rank = np.full((rows, p), p)
    age = np.ones((rows, p), np.int64)
    every_but_first = slice(1, None)
    every_but_last = slice(-1)
    for pass_level, receivers, senders in (
        (forward, every_but_first, every_but_last),
        (backward, every_but_last, every_but_first),
    ):
        place = pass_level[receivers], rank_S1[receivers]
        source_rank[place] = rank_S1[senders]
        age[place] = pass_level[receivers] - pass_level[senders]
    reach = int(age.max())

    weights = np.full((rows, p), stages)
    late = np.zeros(stages, np.int64)
    if not whole_backward:
        follows = levels.weight_stage >= 0
        ranks = np.broadcast_to(rank_S1, follows.shape)
        weights[levels.backward[follows], ranks[follows]] = levels.weight_stage[follows]
        late = split.sum(1) - np.bincount(levels.weight_stage[follows], minlength=stages)
    # A rank does a forward and a backward pass for each micro-batch and stage of the period.
    body = range(levels.steady, levels.steady + 2 * v * period)
    needs = tuple((reach - age) * (p + 1) + source_rank)
    return _LevelProgram(rank_of_stage, passes, needs, weights, late, reach, body, repeats)


def pass_levels(parallel: ParallelConfig, micro_batches: int, period: int) -> _PassLevels:
    """Return the levels of the passes of a step to simulate.

    period: micro-batches of a round, of a schedule that has rounds.
    """
    order = ORDERS[parallel.schedule]
    if isinstance(order, VShapedOrder):
        return _v_shaped_levels(parallel.pipeline, micro_batches, order.splits_every_backward)
    assert isinstance(order, AlternatingOrder)
    return _alternating_levels(parallel, order, micro_batches, period if _has_rounds(parallel) else micro_batches)


def _alternating_levels(parallel: ParallelConfig, order: AlternatingOrder, m: int, q: int) -> _PassLevels:
    """Return the levels of `AlternatingOrder`.

    A rank begins `lead` levels after the one before it. From then on it has forward passes on every second level, and
    backward passes on the levels between. Its backward pass i follows its forward pass `first + i`, where `first` is as
    in `AlternatingOrder.actions`.
    """
    p = parallel.pipeline
    v = parallel.stages_per_rank
    lead = order.lead
    assert lead is not None
    s = np.arange(p * v)[:, None]
    k = np.arange(m)
    virtual_stage, r = np.divmod(s, p)
    round_number, place = np.divmod(k, q)
    # With fewer micro-batches than ranks, a round waits until the last rank has its first one: it takes p slots.
    slots = max(p, q)
    first = (v - 1) * slots + lead * (p - 1 - r)
    forward_number = round_number * v * slots + virtual_stage * slots + place
    backward_number = round_number * v * slots + (v - 1 - virtual_stage) * slots + place
    forward = lead * r + 2 * forward_number
    backward = lead * r + 2 * (first + backward_number) + 1
    # After its backward pass i, without empty slots, rank r computes the weights' gradients of its backward pass i - r.
    due = round_number * v * q + (v - 1 - virtual_stage) * q + place - r
    due_stage = (v - 1 - due // q % v) * p + r
    weight_stage = np.where((due >= 0) & order.defers_weights, due_stage, -1)
    split = np.full(backward.shape, order.defers_weights)
    # The level of backward pass p of the first rank, which begins its backward passes last.
    steady = 2 * ((v - 1) * slots + lead * (p - 1) + p) + 1
    return _PassLevels(forward, backward, split, weight_stage, steady)


def _v_shaped_levels(p: int, m: int, splits_every_backward: bool) -> _PassLevels:
    """Return the levels of `VShapedOrder`: see `_zero_bubble_v` and `_dual_pipe_v` in `action_order.py`.

    A micro-batch needs a level for each stage, so stage s can begin on level s. The pipeline fills until level `start`.
    A rank has an outbound forward pass on every level. Once micro-batches return, it has a returning forward pass on
    every second level, and between them the remaining outbound ones, then the first backward passes. From `start` on,
    the rank takes four levels for a micro-batch: outbound forward, backward, returning forward, backward.
    """
    padded = max(2 * p - 1, m)  # as in `_zero_bubble_v`
    s = np.arange(2 * p)[:, None]
    k = np.arange(padded)
    is_outbound = s < p
    r = np.minimum(s, 2 * p - 1 - s)
    # The returning forward passes 0 … p-1 fill levels 2p-1-r, 2p+1-r, …, 4p-3-r. One backward pass may follow the last.
    start = 4 * p - 1 - r

    # Outbound forward passes: k < 2(p-r)-1 on every level from r on; r more on the levels between returning ones, the
    # first of them on level 2p-r. The two lines cross where the second kind begins, so the larger one counts.
    warmup_outbound = 2 * p - r - 1
    filling_outbound = np.maximum(r + k, 2 * k - 2 * p + 3 * r + 2)
    forward_outbound = np.where(k < warmup_outbound, filling_outbound, start + 4 * (k - warmup_outbound))
    forward_returning = np.where(k < p, 2 * p - 1 - r + 2 * k, start + 4 * (k - p) + 2)
    forward = np.where(is_outbound, forward_outbound, forward_returning)

    # Backward passes of the returning stage that come before `start`, one behind each returning forward pass from the
    # r-th on: p-r of them, or one fewer where the outbound stage, not the returning one, ends a group of four.
    early = p - r - (not splits_every_backward)
    outbound_place, returning_place = (1, 3) if splits_every_backward else (3, 1)
    backward_outbound = start + 4 * k + outbound_place
    backward_returning = np.where(k < early, 2 * p + r + 2 * k, start + 4 * (k - early) + returning_place)
    backward = np.where(is_outbound, backward_outbound, backward_returning)

    steady = 4 * p
    if splits_every_backward:
        split = np.full(backward.shape, True)
        weight_stage = _weights_of_split_passes(s, k, r, is_outbound, p, m, padded)
    else:
        split, weight_stage = _weights_of_partly_split_passes(s, k, r, is_outbound, p, m, early)
    return _PassLevels(forward, backward, split, weight_stage, steady)


def _weights_of_split_passes(
    s: Integers, k: Integers, r: Integers, is_outbound: npt.NDArray[np.bool_], p: int, m: int, padded: int
) -> Integers:
    """Return the stage whose weights' gradients follow each backward pass where all are split; -1: none.

    Each pass is followed by its own stage's, but for the last part of `_zero_bubble_v`: r times, an outbound and a
    returning pass have none. So the p-r outbound passes after those are followed by the weights of the micro-batch r
    before theirs. Weights of micro-batches that only pad the pattern are left out.
    """
    is_last_part = k >= padded - p
    has_none = np.where(is_outbound, is_last_part & (k < padded - p + r), k >= padded - r)
    behind = np.where(is_outbound & is_last_part, r, 0)
    return np.where(has_none | (k - behind >= m), -1, s)


def _weights_of_partly_split_passes(
    s: Integers, k: Integers, r: Integers, is_outbound: npt.NDArray[np.bool_], p: int, m: int, early: Integers
) -> tuple[npt.NDArray[np.bool_], Integers]:
    """Return which backward passes are split, and the stage whose weights' gradients follow each; -1: none.

    At the begin, the first `early` returning passes are split, and their weights follow at once. At the end of
    `_dual_pipe_v`, its loop over i has returning passes for even i and outbound ones for odd i, and splits those with
    i > r. Before it, the outbound stage has done m-p backward passes and the returning one m-r-1. After it all outbound
    passes are split, which i > r holds for too.
    """
    i = np.where(is_outbound, 2 * (k - (m - p)) + 1, 2 * (k - (m - r - 1)))
    split = np.where(is_outbound, i > r, (k < early) | (i > r))

    # After the loop, p-r-1 = `early` times, the oldest weights of the queue come, then an outbound pass. So they follow
    # the outbound pass before it: number `turn` of these takes entry `turn` of the queue. The loop put in its passes
    # i = r+1, r+2, …, 2r+1 (even ones are returning); entries from r+1 on are outbound passes.
    turn = k - (m - p + r)
    is_returning_entry = (turn <= r) & ((r + 1 + turn) % 2 == 0)
    queued_stage = np.where(is_returning_entry, 2 * p - 1 - s, s)
    is_turn = (turn >= 0) & (turn < early)
    weight_stage = np.where(is_outbound, np.where(is_turn, queued_stage, -1), np.where(k < early, s, -1))
    return split, weight_stage
