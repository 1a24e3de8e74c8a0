"""Whether a job that ended is started again: the history of its attempts, and the rule.

A job that SLURM ends, because it preempts it or a machine is lost, continues without bound. A crash, a node that does
not answer though SLURM still has it, or a time limit counts against `launch.max_restarts`; a newer state that is kept,
on the disk or in memory, clears the count. What cannot get better is not tried again: wrong input, a loss that is not
finite, and the same root failure twice at the same step.

How a run ended and what it saved, as its folder's events record it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal

from shardwise.base.errors import ConfigError, see
from shardwise.base.files import open_plain, read_plain
from shardwise.base.run_records import instance, record_of
from shardwise.runs.folder import JsonLines, RunDirectory

How = Literal["finished", "stopped", "time limit", "preempted", "ended by SLURM", "lost node", "failed"]
_NOT_FINITE = "must be finite"
"""What the trainer says of a loss or gradient (`Trainer._stop_non_finite`)."""


@dataclass(frozen=True)
class Ending:
    """How one attempt at a job ended.

    Attributes:
        how: "stopped" by the user; "preempted" with a warning; "ended by SLURM" without one, or cancelled; "lost node":
            it did not answer, while SLURM let the job run.
        job: SLURM's number.
        requeues: how often SLURM had started the job again.
        nodes: their number.
        began: seconds since the epoch.
        seconds: of the whole attempt.
        until_joined: seconds until the launchers of all nodes were there; None where they never were.
        until_training: seconds until the first step began; None where none did.
        after_last_step: seconds from the last step, as heartbeats tell of it, to the end.
        first_step: steps that were done when the attempt began to train; None where it did not.
        step: steps done at the end.
        checkpoint: the step of the newest checkpoint on the disk, 0 without one.
        rank: the one at fault, where one was.
        text: the failure, as the user reads it.
        exit_code: that the failure has by itself.
    """

    how: How
    job: str
    requeues: int
    nodes: int
    began: float
    seconds: float
    until_joined: float | None
    until_training: float | None
    after_last_step: float
    first_step: int | None
    step: int
    checkpoint: int
    rank: int | None = None
    text: str = ""
    exit_code: int = 0

    @property
    def kept(self) -> int:
        """The newest step whose state is known to be kept: on the disk, or where this attempt continued from."""
        return max(self.checkpoint, self.first_step or 0)

    @property
    def root(self) -> tuple[int, int | None, str]:
        """What two failures that are the same have in common. Numbers of processes and seconds differ."""
        return self.step, self.rank, re.sub(r"\d+", "N", self.text.partition("\n")[0].partition("; its log")[0])


@dataclass(frozen=True)
class Decision:
    """Whether the job is started again, and why, as the user reads it."""

    again: bool
    why: str


def decide(endings: Sequence[Ending], max_restarts: int) -> Decision:
    """What follows from the last of the endings of a job; they are in the order of time."""
    last = endings[-1]
    if last.how in ("finished", "stopped"):
        return Decision(again=False, why="")
    if last.how in ("preempted", "ended by SLURM"):
        return Decision(again=True, why="what SLURM ends is not counted")
    if last.exit_code == ConfigError.exit_code:
        return Decision(
            again=False,
            why=f"the job is not started again: its input must be corrected first{see('jobs#input-is-wrong')}",
        )
    if last.how == "failed" and _NOT_FINITE in last.text:
        return Decision(
            again=False, why=f"the job is not started again: it would meet the same loss{see('jobs#same-loss-again')}"
        )
    former = [ending for ending in endings[:-1] if ending.how == "failed"]
    if last.how == "failed" and former and former[-1].root == last.root:
        again = (
            f"the job is not started again: the same failure came twice at step {last.step:,}"
            f"{see('jobs#same-failure-twice')}"
        )
        return Decision(again=False, why=again)
    counted = 0
    for ending in reversed(endings):
        if ending.kept < last.kept:
            break
        counted += ending.how in ("failed", "lost node", "time limit")
    if counted > max_restarts:
        since = f"since the state of step {last.kept:,} was kept" if last.kept else "without a checkpoint"
        bound = f"launch.max_restarts ({max_restarts})"
        return Decision(again=False, why=f"the job is not started again: {counted} restarts {since} exceed {bound}")
    return Decision(again=True, why=f"restart {counted} of {max_restarts} (launch.max_restarts)")


def history_file(run_path: Path) -> Path:
    """Where the endings of a run's jobs are."""
    return run_path / "restarts.jsonl"


def history(run_path: Path) -> list[Ending]:
    """The endings that are recorded; a line that a crash cut short is left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in read_plain(history_file(run_path)).splitlines():
            with contextlib.suppress(ValueError):
                found.append(instance(Ending, record_of(line)))
    return found


def record(run_path: Path, ending: Ending) -> None:
    """Add an ending to the history of a run."""
    with JsonLines(history_file(run_path)) as file:
        file.write(asdict(ending))


def how_it_ended(run_path: Path) -> str:
    """What to add to a message on a run that is over; empty where no event says how it ended."""
    metrics = RunDirectory(run_path).metrics
    stop, saved = _last(metrics, "stop"), what_is_saved(run_path, "")
    ending = f": {stop.get('reason', 'ended')} after step {stop.get('step') or 0:,}" if stop is not None else ""
    return f"{ending}; {saved or 'no checkpoint is recorded'}" if ending or saved else ""


def what_is_saved(run_path: Path, nothing: str = "no checkpoint was saved") -> str:
    """The newest checkpoint of a run: until a resumed run saves its first, the one that it was resumed from.

    `nothing`: what is returned where there is none.
    """
    event = _last(RunDirectory(run_path).metrics, "checkpoint", "resume")
    return nothing if event is None else f"its newest checkpoint is of step {event.get('step') or 0:,}"


def newest_checkpoint(run_path: Path) -> int:
    """The step of the newest checkpoint that a run has recorded; 0 where there is none."""
    event = _last(RunDirectory(run_path).metrics, "checkpoint", "resume")
    return 0 if event is None else int(event.get("step") or 0)


def last_step_event(run_path: Path) -> dict[str, Any] | None:
    """The last "step" event that a run has recorded."""
    return _last(RunDirectory(run_path).metrics, "step")


def last_step(run_path: Path) -> int:
    """The last step that a run has recorded; 0 where there is none."""
    event = _last(RunDirectory(run_path).metrics, "step", "checkpoint", "resume")
    return 0 if event is None else int(event.get("step") or 0)


def first_step(run_path: Path) -> int:
    """Steps that were done when the run was started last."""
    event = _last(RunDirectory(run_path).metrics, "start", "resume") or {}
    return int(event.get("step") or 0) if event.get("event") == "resume" else 0


def _last(metrics: Path, *kinds: str) -> dict[str, Any] | None:
    """The last event of these kinds. The file is searched from its end, because it may have gigabytes."""
    try:
        with open_plain(metrics) as file, mmap(file.fileno(), 0, access=ACCESS_READ) as lines:
            end = len(lines)
            while (at := max(lines.rfind(f'"event": "{kind}"'.encode(), 0, end) for kind in kinds)) >= 0:
                lines.seek(lines.rfind(b"\n", 0, at) + 1)
                end = lines.tell()
                with contextlib.suppress(ValueError):  # a crash cut the line short
                    event = record_of(lines.readline())
                    if event.get("event") in kinds:
                        return event
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        pass
    return None
