"""A step's passes on topological levels: what a pass needs is done on a level before its own.

So a simulation takes a level at a time, for all pipeline ranks at once. The passes of a rank in the order of their
levels are those of `plan.order`; a test compares them. Gradients of weights that are computed apart have no level: they
follow a pass of their rank, or come at the end.

Legend: p pipeline ranks, v stages on each, m micro-batches of a step, q of a round; s a stage, r its rank, k a
micro-batch. Matrices of passes are [stage, micro-batch], those of a program [level, rank].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardwise.config import ParallelConfig, Recompute
from shardwise.config.sections import V_SHAPED
from shardwise.plan.order import rounds
from shardwise.plan.stage import rank_of

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
