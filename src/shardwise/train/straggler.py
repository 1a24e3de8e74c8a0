"""Which rank is slow: whose own work takes longer than that of the ranks that do the same.

The ranks of a pipeline stage do the same work. A rank that is alone in its stage is compared by its work over its own
best. Ranks tell each other by a few numbers that travel with those of the next step, and of which the largest of all
ranks counts: the longest and the shortest work of each stage, and a step later who it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from shardwise.distributed.mesh import Mesh

WINDOW = 20
"""Steps whose median counts: a single slow step names nobody."""
_NOBODY = -1e30


@dataclass(frozen=True)
class Straggler:
    """The slowest rank.

    Attributes:
        relative: its own work over that of the best rank of its stage.
        own: over its own best.
    """

    rank: int
    relative: float
    own: float


class Stragglers:
    """What one rank knows of its own work and of the slowest rank's."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._is_alone = mesh.tp.size * mesh.dp.size == 1
        self._places = 1 if self._is_alone else mesh.pp.size
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._best: float | None = None
        self._told = 0.0
        self._claim = (0.0, 0.0, 0.0)

    def add(self, work_seconds: float) -> None:
        """Count this rank's own work of a step."""
        self._recent.append(work_seconds)
        if len(self._recent) == WINDOW:
            self._best = min(self._best or float("inf"), median(self._recent))

    @property
    def own(self) -> float | None:
        """This rank's work over its own best; None before there is a window of steps."""
        return median(self._recent) / self._best if self._best else None

    def numbers(self) -> list[float]:
        """What this rank tells, of which each is to be reduced to its maximum over all ranks; as many on all ranks."""
        if self._mesh.world.size == 1:
            return []
        longest, shortest = [0.0] * self._places, [_NOBODY] * self._places
        self._told = 0.0
        if self.own is not None:
            self._told = self.own if self._is_alone else median(self._recent)
            longest[self._place], shortest[self._place] = self._told, -self._told
        claim, self._claim = self._claim, (0.0, 0.0, 0.0)
        return [*longest, *shortest, *claim]

    def take(self, reduced: Sequence[float]) -> Straggler | None:
        """The slowest rank by what all ranks told; None where there is too little to tell."""
        if not reduced:
            return None
        longest, shortest = reduced[: self._places], reduced[self._places : 2 * self._places]
        relative = [
            most / -least if least > _NOBODY / 2 else 0.0 for most, least in zip(longest, shortest, strict=True)
        ]
        slowest = max(range(self._places), key=lambda place: relative[place])
        # As float32, in which all numbers travelled.
        if self._told and slowest == self._place and abs(self._told / longest[slowest] - 1) < 1e-6:
            self._claim = (self._mesh.world.rank + 1.0, relative[slowest], self.own or 0.0)
        rank, of_best, own = reduced[2 * self._places :]
        return Straggler(round(rank) - 1, of_best, own) if rank else None

    @property
    def _place(self) -> int:
        return 0 if self._is_alone else self._mesh.pp.rank


class Occurrence:
    """Something that is said once when it begins, and again only after it had ended.

    Args:
        begins, ends: the score from which on it is there, and below which it is over.
    """

    def __init__(self, begins: float, ends: float) -> None:
        self._begins, self._ends = begins, ends
        self._who: object = None

    def begins(self, score: float | None, who: object = True) -> bool:
        """Whether it begins with this score. `who`: another one is another occurrence."""
        if score is None or score < self._ends:
            self._who = None
        elif score >= self._begins and who != self._who:
            self._who = who
            return True
        return False
