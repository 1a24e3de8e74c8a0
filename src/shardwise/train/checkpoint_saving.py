"""The times at which a run saves, and at which it stops because somebody asked.

A run saves every few steps or minutes, at its end, and before a stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import LostPeerError, RunError, see
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.save import Saver
from shardwise.distributed import collectives
from shardwise.optim.learning_rate import learning_rate
from shardwise.runs.folder import FollowedFolder
from shardwise.train.rank_agreement import first_stop_reason
from shardwise.train.reporter import Reporter
from shardwise.train.step_record import STREAM
from shardwise.train.training import Training, memory_copy_interval

if TYPE_CHECKING:
    from shardwise.train.memory_copies import MemoryCopies
    from shardwise.train.state_hashes import StateHashes


@dataclass(eq=False)
class CheckpointSaver:
    """Saves by steps, by minutes, at the end, and before a stop; reports how each save ended."""

    training: Training
    saver: Saver
    reporter: Reporter
    # Returns this rank's reason to stop, or None; all ranks obey a reason that any rank has.
    reason_to_stop: Callable[[], str | None]
    # Record of how the run last went back, for the manifests' `schedule`.
    went_back: Mapping[str, Any] = field(default_factory=dict)
    copies: MemoryCopies | None = None  # copies of the state in the memory of the nodes
    followed: FollowedFolder | None = None  # folder of the run, on rank 0
    state_hashes: StateHashes | None = None  # hashes of the state, which manifests have where the run has some
    # Who asked the run to stop after its last step so far; None if nobody did.
    stopped_by: str | None = field(default=None, init=False)
    _seconds: float = field(default=0.0, init=False)
    _saved_at: float = field(default_factory=time.monotonic, init=False)
    _reported_name: Path | None = field(default=None, init=False)

    def flags(self) -> tuple[float, float]:
        """This rank's flags to stop, and to save, after the present step. All ranks obey the largest of all ranks.

        Rank 0 alone looks whether a checkpoint is due by time, as clocks of machines differ. Flags are floats, 1 or 0,
        as they travel with the norms and losses of a step (`Trainer.step`).
        """
        minutes = self.training.config.checkpoint.every_minutes
        is_due = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        return float(self.reason_to_stop() is not None), float(is_due and self.training.mesh.world.rank == 0)

    def after_step(self, is_last: bool, agreed_flags: Sequence[float] | None = None) -> None:
        """Save if a checkpoint is due, and set `stopped_by`, the same on every rank.

        Args:
            agreed_flags: largest of all ranks' `flags` during the step; None exchanges them now.

        Raises:
            RunError: the run's folder is not found; on rank 0.
        """
        mesh = self.training.mesh
        settings = self.training.config.checkpoint
        progress = self.training.progress
        progress.phase = "checkpoint"
        start = time.perf_counter()
        self.follow()
        # A save of an earlier step may have ended since, in the thread that writes.
        self._report()
        if agreed_flags is None:
            agreed_flags = collectives.reduce_numbers([int(flag) for flag in self.flags()], mesh.world)
        stop, save = agreed_flags
        self.stopped_by = first_stop_reason(self.reason_to_stop(), mesh) if stop else None
        is_due = settings.every and progress.step % settings.every == 0
        if self.stopped_by is not None or save or is_last or is_due:
            fields = self._described()
            if self.state_hashes is not None:
                fields["state_hash"] = self.state_hashes.now().recorded()
            self.saver.save(progress.step, fields)
            self._saved_at = time.monotonic()
        copy_every = memory_copy_interval(settings)
        # The disk has the state of a last step: a copy of it would never be read.
        if self.copies is not None and progress.step % copy_every == 0 and not (is_last or self.stopped_by):
            self.copies.copy(progress.step, self._described())
        self._seconds += time.perf_counter() - start

    def take_seconds(self) -> float:
        """The time for which training has waited for checkpoints and copies since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def follow(self) -> None:
        """Go on in the run's folder where it was renamed, and tell the user; on rank 0.

        Raises:
            RunError: it is not found, or something else has its name.
        """
        if self.followed is None:
            return
        self.followed.follow()
        if self.followed.renamed_to != self._reported_name:
            self._reported_name = self.followed.renamed_to
            self.reporter.warning(
                f"the run's folder was renamed to {self._reported_name}: the run goes on there, and a link of the old "
                "name leads to it, which can be removed once the run has ended"
            )

    def save_again(self, manifest: Manifest) -> None:
        """Save the checkpoint that was just restored once more: it replaces one that is damaged in part."""
        names = ["samples", "position", "tokens", "losses", "schedule", "rng"]
        if manifest.state_hash is not None:
            names.append("state_hash")
        self.saver.save(manifest.step, {name: getattr(manifest, name) for name in names})

    def finish(self) -> None:
        """Wait for the last save.

        Raises:
            RunError: the save failed, and this run's last steps are lost; raised on every rank.
            LostPeerError: it failed because another rank has ended.
        """
        self.saver.wait()
        self.follow()
        # None where the resumed run had done all its steps before.
        finished = self.saver.finished()
        for saved in finished:
            # The failure of an earlier save is only a warning: a later one has all that it lacks.
            if saved is finished[-1] and saved.problem is not None:
                if saved.lost_peer:
                    raise LostPeerError(f"{saved.problem} while the checkpoint of step {saved.step:,} was saved")
                raise RunError(
                    f"the checkpoint of step {saved.step:,} could not be saved: {saved.problem}"
                    f"{see('checkpoints#not-saved')}"
                )
            self.reporter.saved(saved)

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for a save that has started, unless the user interrupts the run once more."""
        if not isinstance(error, KeyboardInterrupt):
            self.saver.wait()
            self._report(continues=error is None)

    def _report(self, *, continues: bool = True) -> None:
        for saved in self.saver.finished():
            self.reporter.saved(saved, continues=continues)

    def _described(self) -> dict[str, Any]:
        config = self.training.config
        progress = self.training.progress
        schedule = {
            "name": config.optimizer.schedule,
            "steps": config.train.steps,
            "lr": learning_rate(config.optimizer, config.train.steps, max(progress.step, 1)),
            **self.went_back,
        }
        # All random numbers are functions of these, the step and the sample. The only other state is where streams are
        # read, and where the stages of a mixture began.
        rng: dict[str, Any] = {"seed": config.train.seed, "dropout_mode": config.train.dropout_mode}
        if state := self.training.feed.batches.state(progress.position):
            rng[STREAM] = state
        return {
            "samples": progress.samples,
            "position": progress.position,
            "tokens": progress.tokens,
            "losses": tuple(progress.losses),
            "schedule": schedule,
            "rng": rng,
        }
