"""A verification: the reference in this process, then the ranks of each layout.

What a verification found.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.base.errors import RunError, ShardwiseError
from shardwise.config import Config
from shardwise.launch.local import EndedError, LaunchError, launch
from shardwise.verify.job import Checkpoint, Job, Result
from shardwise.verify.layouts import Cell
from shardwise.verify.measure import Reference, continued, loss_difference, train_reference
from shardwise.verify.tolerance import Differences, Tolerance


def verify(config: Config, cells: Sequence[Cell], folder: Path) -> Verification:
    """Train the miniature in one process and at every cell, and compare.

    The reference runs in this process, on the device of the first cell. The other cells of one device and number of
    ranks share their processes; after a cell that failed, the next ones get new processes.

    Raises:
        RunError: the reference cannot be trained.
    """
    torch.set_num_threads(1)
    first = Cell(device=cells[0].device)
    try:
        one_process = Checkpoint(str(train_reference(config, first, folder)), first.name)
    except ShardwiseError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise RunError(f"one process on {first.device}, the reference, cannot be trained: {text}") from error
    losses = Reference.load(folder).losses
    outcomes: list[Outcome] = []
    source = one_process
    for _, group in itertools.groupby(cells, key=lambda cell: (cell.device, cell.ranks)):
        pending = list(group)
        while pending:
            Job(config.model_dump(mode="json"), pending, source, one_process, len(outcomes), len(cells)).write(folder)
            failure = _launch(folder, pending[0].ranks)
            results = Result.read_all(folder)
            for cell, result in zip(pending, results, strict=False):
                problems = result.differences.problems(Tolerance.of(config), result.source)
                outcomes.append(Outcome(cell, result.differences, problems, result.source, result.seconds))
                source = one_process if problems else result.checkpoint
            done = len(results)
            if done < len(pending):
                outcomes.append(Outcome(pending[done], None, (failure or "the ranks ended without a result",)))
                source, done = one_process, done + 1
            pending = pending[done:]
    return Verification(losses, [*outcomes, _read_back(config, first, source, losses)])


def _launch(folder: Path, ranks: int) -> str | None:
    """Run the folder's job on new processes; returns why it failed, if it did."""
    try:
        launch([sys.executable, "-P", "-m", "shardwise.verify.worker", str(folder)], ranks, folder)
    except EndedError:
        raise  # the user's signal
    except LaunchError as error:
        return str(error)
    return None


def _read_back(config: Config, cell: Cell, source: Checkpoint, losses: Sequence[float]) -> Outcome:
    """One process continues from the last layout's checkpoint."""
    differences = Differences(0.0, 0.0, 0.0, loss_difference(continued(config, cell, Path(source.folder)), losses))
    return Outcome(cell, differences, differences.problems(Tolerance.of(config), source.of), source.of)


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
