"""Detection of a straggler: a rank whose own work takes longer than that of the ranks that do the same.

The ranks of a pipeline stage do the same work. A rank that is alone in its stage is compared with its own best time.
The exchange costs no collective of its own: a few numbers of each rank travel with those of the next step
(`Trainer.step`), reduced to their maximum over all ranks. First these are the longest and the shortest work of each
stage; the rank that recognises its own work as the longest says so in the numbers of the step after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from shardwise.distributed.mesh import Mesh

STRAGGLER_STEPS = 20
"""Steps whose median tells a rank's work: a single slow step names nobody."""
_NO_TIME = -1e30
"""In place of a negative time of a stage that has none yet: any time is greater."""
_SAME = 1e-6
"""Relative difference up to which two times are one: all numbers travel as float32, which has 7 digits."""


@dataclass(frozen=True)
class Straggler:
    """The slowest rank.

    Attributes:
        relative: work of this rank divided by that of the fastest rank of its stage.
        own: work of this rank divided by its own best.
    """

    rank: int
    relative: float
    own: float


class Stragglers:
    """One rank's knowledge of its own work and of the slowest rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # Ranks without a peer in their stage compare their ratios to their own best, all together.
        self._is_alone = mesh.stage.size == 1
        self._stages = 1 if self._is_alone else mesh.pp.size
        self._recent: deque[float] = deque(maxlen=STRAGGLER_STEPS)
        self._best: float | None = None
        self._reported = 0.0
        self._claim = (0.0, 0.0, 0.0)

    def add(self, work_seconds: float) -> None:
        """Count this rank's own work of a step."""
        self._recent.append(work_seconds)
        # The first steps of a run compile, warm up caches and are no measure: the best is known after a whole window.
        if len(self._recent) == STRAGGLER_STEPS:
            self._best = min(self._best or float("inf"), median(self._recent))

    @property
    def slowdown(self) -> float | None:
        """This rank's work divided by its own best; None before there is a window of steps."""
        return median(self._recent) / self._best if self._best else None

    def numbers(self) -> list[float]:
        """Numbers of this rank, as many on all ranks; each is to be reduced to its maximum over all ranks.

        They are the longest work of each stage, its shortest work as a negative number, so that the maximum finds it,
        and this rank's claim to be the slowest: its number + 1, its `relative` and its `own` of `Straggler`.
        """
        if self._mesh.world.size == 1:
            return []
        longest = [0.0] * self._stages
        shortest = [_NO_TIME] * self._stages
        self._reported = 0.0
        if self.slowdown is not None:
            self._reported = self.slowdown if self._is_alone else median(self._recent)
            longest[self._stage] = self._reported
            shortest[self._stage] = -self._reported
        claim = self._claim
        self._claim = (0.0, 0.0, 0.0)
        return [*longest, *shortest, *claim]

    def take(self, reduced: Sequence[float]) -> Straggler | None:
        """The slowest rank by the reduced numbers of all ranks; None where no rank has claimed to be it.

        Sets this rank's claim for the next step.
        """
        if not reduced:
            return None
        longest = reduced[: self._stages]
        shortest = reduced[self._stages : 2 * self._stages]
        relative = []
        for most, negative_least in zip(longest, shortest, strict=True):
            relative.append(most / -negative_least if negative_least > _NO_TIME / 2 else 0.0)
        slowest = max(range(self._stages), key=lambda stage: relative[stage])
        # The maximum names no rank. The one whose report it was knows it by its value, and claims it in the next step.
        if slowest == self._stage and self._reported and abs(self._reported / longest[slowest] - 1) < _SAME:
            self._claim = (self._mesh.world.rank + 1.0, relative[slowest], self.slowdown or 0.0)
        # The number is that of a rank plus 1, as 0 says that no rank claims to be the slowest.
        rank_plus_1, claimed_relative, claimed_slowdown = reduced[2 * self._stages :]
        if not rank_plus_1:
            return None
        return Straggler(round(rank_plus_1) - 1, claimed_relative, claimed_slowdown)

    @property
    def _stage(self) -> int:
        return 0 if self._is_alone else self._mesh.pp.rank
