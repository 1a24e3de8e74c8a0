"""What passes between the process that verifies and the ranks that it starts: a job, and a line for each result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.verify.layouts import Cell
from shardwise.verify.tolerance import Differences

TIMEOUT = 120.0
"""Seconds after which a collective fails that a rank never calls: steps of a miniature take less than one."""
CLEAR_LINE = "\r\x1b[2K"
"""What a terminal clears the line of progress by."""
_JOB, _RESULTS = "job.json", "results.jsonl"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of the middle of a training. `of`: the name of the layout that saved it."""

    folder: str
    of: str


@dataclass(frozen=True)
class Job:
    """Cells of one device and number of ranks.

    Attributes:
        config: of the miniature.
        source: the checkpoint that the first cell reads; the next one reads that of the cell before it.
        one_process: the checkpoint of the reference, which is read after a cell that broke the contract.
        done, total: cells before these, and of the whole verification, for a line of progress.
    """

    config: Mapping[str, Any]
    cells: Sequence[Cell]
    source: Checkpoint
    one_process: Checkpoint
    done: int
    total: int

    def write(self, folder: Path) -> None:
        """Put the job into a folder, where no results are yet."""
        (folder / _RESULTS).unlink(missing_ok=True)
        (folder / _JOB).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> Job:
        """The job that a folder holds."""
        values = json.loads((folder / _JOB).read_text(encoding="utf-8"))
        checkpoints = {key: Checkpoint(**values[key]) for key in ("source", "one_process")}
        return Job(**{**values, **checkpoints, "cells": [Cell(**cell) for cell in values["cells"]]})


@dataclass(frozen=True)
class Result:
    """What the ranks found of one cell.

    Attributes:
        checkpoint: that they saved. source: whose checkpoint they read.
    """

    differences: Differences
    checkpoint: Checkpoint
    source: str
    seconds: float

    def append(self, folder: Path) -> None:
        """Add the result to those of the folder's job."""
        with (folder / _RESULTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self)) + "\n")

    @staticmethod
    def read_all(folder: Path) -> list[Result]:
        """The results of the folder's job so far; a line that a rank could not finish is none."""
        path = folder / _RESULTS
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [
            Result(Differences(**one["differences"]), Checkpoint(**one["checkpoint"]), one["source"], one["seconds"])
            for one in found
        ]
