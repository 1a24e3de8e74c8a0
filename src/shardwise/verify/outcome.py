"""What a verification found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.verify.cells import Cell
from shardwise.verify.tolerance import Differences


@dataclass(frozen=True)
class Outcome:
    """What was found of one cell.

    Attributes:
        differences: None of a cell that failed.
        problems: what breaks the contract, or why the cell failed.
        source: whose checkpoint was read.
    """

    cell: Cell
    differences: Differences | None
    problems: Sequence[str]
    source: str | None = None
    seconds: float = 0.0

    def facts(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            **self.cell.facts(),
            **(asdict(self.differences) if self.differences is not None else {}),
            "problems": [*self.problems],
            "source": self.source,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Verification:
    """What was found of all.

    Attributes:
        losses: of the reference.
        outcomes: of all layouts, then of one process that read the last layout's checkpoint.
    """

    losses: Sequence[float]
    outcomes: Sequence[Outcome]

    @property
    def broken(self) -> list[Outcome]:
        """Those that broke the contract, or failed."""
        return [outcome for outcome in self.outcomes if outcome.problems]
