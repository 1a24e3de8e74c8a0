"""Hashes of the state of a training, which compare runs and checkpoints."""

from __future__ import annotations

from shardwise.optim.state_digest import StateHash, digest_place
from shardwise.optim.state_hash import StateSums
from shardwise.train.reporter import Reporter
from shardwise.train.training import Training


class StateHashes:
    """Makes the hashes that `log.state_hash_every` asks for, and one for each checkpoint; `reporter` records them."""

    def __init__(self, training: Training, reporter: Reporter) -> None:
        self._sums = StateSums(training.model, training.optimizer, training.mesh)
        self._progress = training.progress
        self._seed = training.config.train.seed
        self._reporter = reporter
        self._last: StateHash | None = None

    def now(self) -> StateHash:
        """The hash of the present state, which is recorded unless this step's is. Collective."""
        progress = self._progress
        place = digest_place(progress.step, progress.samples, progress.tokens, progress.position, self._seed)
        if self._last is None or self._last.place != place:
            self._last = StateHash(place, self._sums.measure())
            self._reporter.state_hash(progress.step, self._last)
        return self._last
