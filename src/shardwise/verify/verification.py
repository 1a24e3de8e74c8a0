"""A verification: the reference in this process, then the ranks of each layout, compared with the reference."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.base.errors import RunError, ShardwiseError
from shardwise.config import Config
from shardwise.distributed import collectives, devices
from shardwise.verify import cell_training, layouts, rank_calls
from shardwise.verify.tolerance import LayoutDifferences, Tolerance

_TIMEOUT = 120.0
"""Seconds after which a collective fails that a rank never calls: steps of a miniature take less than one."""


@dataclass(frozen=True)
class _MiddleCheckpoint:
    folder: Path
    layout: str


@dataclass(frozen=True)
class CellOutcome:
    """A cell's result and its judgement; `differences`: None if the cell failed."""

    cell: layouts.Cell
    differences: LayoutDifferences | None
    problems: Sequence[str]
    source: str | None = None
    seconds: float = 0.0

    def facts(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return {
            **self.cell.facts(),
            **(asdict(self.differences) if self.differences is not None else {}),
            "problems": [*self.problems],
            "source": self.source,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Verification:
    """The outcome of a whole verification."""

    losses: Sequence[float]
    # Outcomes of all layouts, then of one process that read the last layout's checkpoint.
    outcomes: Sequence[CellOutcome]
    choices: int = 0  # tokens times experts of each, of all routers and steps, that were compared; 0 for a dense model

    def choice_rows(self) -> list[tuple[str, str]]:
        """Return rows of text on the choices of experts that were compared; none for a dense model."""
        if not self.choices:
            return []
        text = (
            f"{self.choices:,} choices of a token's expert; only nearly equal scores may be ordered otherwise, and "
            "such a layout is compared with the choices of one process"
        )
        return [("experts", text)]

    def replayed_text(self) -> str:
        """Return words on the layouts that were compared with the choices of one process; empty if none was."""
        differences = (outcome.differences for outcome in self.layout_outcomes)
        layouts = sum(values is not None and values.choices.differing > 0 for values in differences)
        return f", {layouts} of them with its choices of experts" if layouts else ""

    @property
    def layout_outcomes(self) -> Sequence[CellOutcome]:
        """Outcomes of all layouts, without that of one process."""
        return self.outcomes[:-1]

    @property
    def broken(self) -> list[CellOutcome]:
        """Outcomes that broke the contract, or failed."""
        return [outcome for outcome in self.outcomes if outcome.problems]


def verify(config: Config, cells: Sequence[layouts.Cell], folder: Path) -> Verification:
    """Train the miniature in one process and at every cell, and compare.

    The reference runs in this process, on the device of the first cell. The other cells of one device and number of
    ranks share their processes; after a cell that failed, the next ones get new processes. RunError: the reference
    cannot be trained.
    """
    # As many as a rank on the CPU has: another number would sum in another order.
    torch.set_num_threads(1)
    first = layouts.Cell(device=cells[0].device)
    try:
        one_process = _MiddleCheckpoint(cell_training.train_reference(config, first, folder), first.name)
    except ShardwiseError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise RunError(f"one process on {first.device}, the reference, cannot be trained: {text}") from error
    reference = cell_training.ReferenceTraining.load(folder)
    outcomes: list[CellOutcome] = []
    source = one_process
    for _, group in itertools.groupby(cells, key=lambda cell: (cell.device, cell.ranks)):
        pending = list(group)
        while pending:
            call = (config, pending, folder, source, one_process, len(outcomes))
            answer = rank_calls.call_on_ranks(_train_cells, *call, ranks=pending[0].ranks, folder=folder)
            results: list[tuple[CellOutcome, _MiddleCheckpoint]] = answer.values
            for outcome, checkpoint in results:
                outcomes.append(outcome)
                source = one_process if outcome.problems else checkpoint
            pending = pending[len(results) :]
            # Results are fewer than cells if the ranks failed: the first cell without a result is at fault.
            if pending:
                # Ranks can also end with exit code 0 and no result, by code of the user's own.
                reason = "the ranks ended without a result" if answer.failure is None else str(answer.failure)
                outcomes.append(CellOutcome(pending[0], None, (reason,)))
                source = one_process
                pending = pending[1:]
    differences = cell_training.continue_in_one_process(config, first, folder, source.folder)
    problems = differences.problems(Tolerance.of(config), source.layout)
    outcomes.append(CellOutcome(first, differences, problems, source.layout))
    return Verification(reference.losses, outcomes, sum(tensor.numel() for tensor in reference.choices.values()))


def _train_cells(
    config: Config,
    cells: Sequence[layouts.Cell],
    folder: Path,
    source: _MiddleCheckpoint,
    one_process: _MiddleCheckpoint,
    done: int,
) -> Iterator[tuple[CellOutcome, _MiddleCheckpoint]]:
    """Train each cell on this rank; yield its outcome, and the checkpoint that its ranks saved. Collective.

    All cells have one device and number of ranks. A cell that fails ends all ranks: the process that started them knows
    by the missing result which cell it was. The first cell reads the checkpoint `source`, each later one that of the
    cell before it, and that of `one_process` after a cell that broke the contract. `done`: number of cells before.
    """
    device = torch.device("cpu") if cells[0].device == "cpu" else devices.local_device()
    tolerance = Tolerance.of(config)
    with rank_calls.join_called_ranks(device, _TIMEOUT) as world:
        for number, cell in enumerate(cells, start=done):
            start = time.perf_counter()
            target = folder / f"layout-{number}"
            differences, saved = cell_training.train_cell(config, cell, folder, source.folder, target)
            problems = differences.problems(tolerance, source.layout)
            checkpoint = _MiddleCheckpoint(saved, cell.name)
            seconds = time.perf_counter() - start
            yield CellOutcome(cell, differences, problems, source.layout, seconds), checkpoint
            if world.rank == 0 and source != one_process:
                # It is small, but there may be hundreds.
                shutil.rmtree(source.folder.parent)
            # After a breach the checkpoint of one process is read: the next layout must not inherit the error.
            source = one_process if problems else checkpoint
            collectives.barrier(world)
