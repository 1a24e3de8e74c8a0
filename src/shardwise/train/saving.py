"""When a run saves, and when it stops because somebody asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shardwise.base.errors import LostPeerError, RunError, see
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config
from shardwise.data.samples.streaming import StreamBatches
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh
from shardwise.launch import stop_requests
from shardwise.launch.environment import joined
from shardwise.optim.learning_rate import learning_rate
from shardwise.runs.folder import RunDirectory
from shardwise.train.memory_copies import MemoryCopies, steps_between
from shardwise.train.reporter import Reporter
from shardwise.train.start import FollowedFolder
from shardwise.train.step_record import Progress

STREAM = "stream"
"""The key of a stream's state in a manifest's `rng`."""


def agreed_stop(reason: str | None, mesh: Mesh, flag: bool) -> tuple[str | None, bool]:
    """The first reason to stop that any rank has, and whether any rank sets `flag`; the same on every rank."""
    if mesh.world.size == 1:
        return reason, flag
    stop, flagged = largest_of_ranks((float(reason is not None), float(flag)), mesh).tolist()
    return _first(reason, mesh) if stop else None, bool(flagged)


def largest_of_ranks(numbers: Sequence[float], mesh: Mesh) -> Tensor:
    """The largest of all ranks' numbers, one by one, on the device. Collective; the host does not wait."""
    return collectives.all_reduce_(devices.to_device(torch.tensor(numbers), mesh.device), mesh.world, op="max")


def _first(reason: str | None, mesh: Mesh) -> str | None:
    """The first rank's reason that is one, the same on every rank."""
    reasons = collectives.all_gather_objects(reason, mesh.world)
    return next((text for text in reasons if text is not None), None)


def make_stop_check(directory: RunDirectory) -> Callable[[], str | None]:
    """A function that returns this rank's reason to stop, or None.

    On each machine one rank looks for a request in the run's folder; the others notice only signals.
    """
    place = joined()
    folder = directory.path if place is None or place.local_rank == 0 else None
    return lambda: stop_requests.requested(folder)


@dataclass(eq=False)
class Checkpoints:
    """Saves by steps, by minutes, at the end, and before a stop; reports how each save ended.

    Attributes:
        mesh: its world exchanges two numbers after each step.
        asked_to_stop: returns this rank's reason to stop, or None; all ranks obey the reason of one.
        went_back: how the run last went back, for the manifests' `schedule`.
        stream: the batches, if they are a stream: its state is saved too.
        copies: in the memory of the nodes.
        followed: the run's folder, on rank 0.
    """

    saver: Saver
    config: Config
    reporter: Reporter
    mesh: Mesh
    asked_to_stop: Callable[[], str | None]
    went_back: Mapping[str, Any]
    stream: StreamBatches | None = None
    copies: MemoryCopies | None = None
    followed: FollowedFolder | None = None
    _saved_at: float = field(default_factory=time.monotonic, init=False)
    _told: Path | None = field(default=None, init=False)

    def ask(self) -> tuple[float, float]:
        """Whether this rank is asked to stop, and whether a checkpoint is due by the time: 1 or 0 each."""
        is_displaced = self._is_displaced()
        minutes = self.config.checkpoint.every_minutes
        old = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        return float(is_displaced or self.asked_to_stop() is not None), float(old and self.mesh.world.rank == 0)

    def after_step(self, progress: Progress, last: bool, asked: Sequence[float] | None = None) -> str | None:
        """Save if a checkpoint is due; returns who asked the run to stop, the same on every rank.

        Args:
            asked: the largest numbers of all ranks that `ask` gave during the step; None asks now.

        Raises:
            RunError: on every rank, something else has the name of the run's folder; a checkpoint is saved there.
        """
        self._report()
        every = self.config.checkpoint.every
        stop, old = largest_of_ranks(self.ask(), self.mesh).tolist() if asked is None else asked
        stopped_by = _first(self.asked_to_stop(), self.mesh) if stop else None
        if stop:
            self._end_if_displaced(progress)
        if stopped_by is not None or old or last or (every and progress.step % every == 0):
            self.saver.save(progress.step, self._described(progress))
            self._saved_at = time.monotonic()
        between = steps_between(self.config)
        if self.copies is not None and between and progress.step % between == 0 and not (last or stopped_by):
            self.copies.copy(progress.step, self._described(progress))
        return stopped_by

    def follow(self) -> None:
        """Go on in the run's folder where it was renamed, and tell the user; on rank 0.

        Raises:
            RunError: it is not found.
        """
        if self.followed is None:
            return
        self.followed.follow()
        if self.followed.renamed_to != self._told:
            self._told = self.followed.renamed_to
            self.reporter.warning(
                f"the run's folder was renamed to {self._told}: the run goes on there, and a link of the old name "
                "leads to it, which can be removed once the run has ended"
            )

    def _is_displaced(self) -> bool:
        """Follow the run's folder; whether something else has its name."""
        try:
            self.follow()
        except RunError:
            if self.followed is None or self.followed.taken is None:
                raise
        return self.followed is not None and self.followed.taken is not None

    def _end_if_displaced(self, progress: Progress) -> None:
        """Save in the run's folder, and raise RunError, where other ranks cannot find it by its name. Collective."""
        taken = collectives.broadcast_object(None if self.followed is None else self.followed.taken, self.mesh.world)
        if taken is None:
            return
        place, text = taken
        self.saver.wait()
        if self.config.checkpoint.path is None:
            self.saver.root = Root.of(RunDirectory(place).checkpoints)
        self.saver.save(progress.step, self._described(progress))
        raise RunError(text)

    def save_again(self, manifest: Manifest) -> None:
        """Save the checkpoint that was just restored once more: it replaces one that is damaged in part."""
        kept = ("samples", "position", "tokens", "schedule", "rng")
        self.saver.save(manifest.step, {name: getattr(manifest, name) for name in kept})

    def finish(self) -> None:
        """Wait for the last save.

        Raises:
            RunError: on every rank, it failed: this run's last steps are lost. LostPeerError: it failed because another
            rank has ended.
        """
        self.saver.wait()
        self.follow()
        finished = self.saver.finished()  # none where the resumed run had done all its steps before
        for saved in finished:
            if saved is finished[-1] and saved.problem is not None:
                if saved.lost_peer:
                    raise LostPeerError(f"{saved.problem} while the checkpoint of step {saved.step:,} was saved")
                raise RunError(
                    f"the checkpoint of step {saved.step:,} could not be saved: {saved.problem}"
                    f"{see('checkpoints#not-saved')}"
                )
            self.reporter.saved(saved)

    def __enter__(self) -> Checkpoints:
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

    def _described(self, progress: Progress) -> dict[str, Any]:
        config = self.config
        return {
            "samples": progress.samples,
            "position": progress.position,
            "tokens": progress.tokens,
            "losses": tuple(progress.losses),
            "schedule": {
                "name": config.optimizer.schedule,
                "steps": config.train.steps,
                "lr": learning_rate(config, max(progress.step, 1)),
                **self.went_back,
            },
            # All random numbers are functions of these, the step and the sample. The only other state is where a
            # stream is read.
            "rng": {
                "seed": config.train.seed,
                "dropout_mode": config.train.dropout_mode,
                **({} if self.stream is None else {STREAM: self.stream.state(progress.position)}),
            },
        }
