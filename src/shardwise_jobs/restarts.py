"""Restarts of a job: the history of its attempts, and the rule that decides about the next one.

A job that SLURM ends, because it preempts it or a machine is lost, continues without bound. A crash, a node that does
not answer though SLURM still has it, or a time limit counts against `launch.max_restarts`; a newer state that is kept,
on the disk or in memory, clears the count. What cannot get better is not tried again: wrong input, a loss that is not
finite, and the same root failure twice at the same step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from shardwise.base.errors import ConfigError, see
from shardwise.runs.folder import JsonLines
from shardwise.runs.json_records import record_instances

How = Literal["finished", "stopped", "time limit", "preempted", "ended by SLURM", "lost node", "failed", "cancelled"]
_NOT_FINITE = "must be finite"  # words of the trainer's error on a loss or gradient (`Passes.non_finite_error`)


@dataclass(frozen=True)
class AttemptEnding:
    """The end of one attempt at a job."""

    # "stopped" by the user, or "cancelled" before it; "preempted" with a warning; "ended by SLURM" without one, or
    # cancelled; "lost node" if a node did not answer, while SLURM let the job run.
    how: How
    job: str  # number of the job in SLURM
    requeues: int  # number of times that SLURM had started the job again
    nodes: int  # number of nodes
    began: float  # beginning, in seconds since the epoch
    seconds: float = 0.0  # duration of the attempt
    until_joined: float | None = None  # seconds until the launchers of all nodes were there; None if they never were
    until_training: float | None = None  # seconds until the first step began; None if none did
    after_last_step: float = 0.0  # seconds between the last step, as heartbeats show it, and the end
    first_step: int | None = None  # steps that were done when the attempt began to train; None if it did not
    step: int = 0  # steps done at the end
    checkpoint: int = 0  # step of the newest checkpoint on the disk, 0 without one
    rank: int | None = None  # rank at fault; None if none is known
    text: str = ""  # failure, as the user reads it
    exit_code: int = 0  # exit code that the failure has by itself

    @property
    def kept(self) -> int:
        """Newest step whose state is known to be kept, on the disk or in the copy that this attempt began from."""
        return max(self.checkpoint, self.first_step or 0)

    @property
    def root(self) -> tuple[int, int | None, str]:
        """Key that is equal for two equal failures."""
        # Process numbers and seconds differ from attempt to attempt, and so may what other ranks met.
        return self.step, self.rank, re.sub(r"\d+", "N", self.text.partition("\n")[0])


@dataclass(frozen=True)
class Decision:
    """The decision about another attempt at a job: `starts_again`, and the reason as the user reads it."""

    starts_again: bool
    why: str


def decide(endings: Sequence[AttemptEnding], max_restarts: int) -> Decision:
    """Decide what follows from the last of the endings of a job, which are in the order of time.

    The last attempt did not finish, and the user did not stop it.
    """
    last = endings[-1]
    if last.how in ("preempted", "ended by SLURM"):
        return Decision(starts_again=True, why="what SLURM ends is not counted")
    # Attempts since the one that brought the run to the state that is kept now: a newer state clears the count.
    counted = 0
    for ending in reversed(endings):
        if ending.kept < last.kept:
            break
        counted += ending.how in ("failed", "lost node", "time limit")
    problem = _hopeless(endings)
    if problem is None and counted > max_restarts:
        since = f"since the state of step {last.kept:,} was kept" if last.kept else "without a checkpoint"
        problem = f"{counted} restarts {since} exceed launch.max_restarts ({max_restarts})"
    if problem is not None:
        return Decision(starts_again=False, why=f"the job is not started again: {problem}")
    return Decision(starts_again=True, why=f"restart {counted} of {max_restarts} (launch.max_restarts)")


def _hopeless(endings: Sequence[AttemptEnding]) -> str | None:
    """Say why another attempt would meet the same failure; None if it may get better."""
    last = endings[-1]
    if last.exit_code == ConfigError.exit_code:
        return f"its input must be corrected first{see('jobs#input-is-wrong')}"
    if last.how != "failed":
        return None
    if _NOT_FINITE in last.text:
        return f"it would meet the same loss{see('jobs#same-loss-again')}"
    former = [ending for ending in endings[:-1] if ending.how == "failed"]
    if former and former[-1].root == last.root:
        return f"the same failure came twice at step {last.step:,}{see('jobs#same-failure-twice')}"
    return None


def _history_file(run_path: Path) -> Path:
    return run_path / "restarts.jsonl"


def history(run_path: Path) -> list[AttemptEnding]:
    """Read the recorded endings of a run's jobs; a line that a crash cut short is left out."""
    return record_instances(AttemptEnding, _history_file(run_path))


def record(run_path: Path, ending: AttemptEnding) -> None:
    """Add the ending of an attempt to the history of a run's jobs."""
    with JsonLines(_history_file(run_path)) as file:
        file.write(asdict(ending))
