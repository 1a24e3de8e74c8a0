"""The hashes of a run's state, each made once and recorded in metrics.jsonl."""

from __future__ import annotations

from torch import nn

from shardwise.config import Config
from shardwise.distributed.mesh import Mesh
from shardwise.optim.state_digest import StateHash, place_in_training
from shardwise.optim.state_hash import StateSums
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.train.reporter import Reporter
from shardwise.train.step_record import Progress


class StateHashes:
    """Makes the hashes that `log.state_hash_every` asks for, and one for each checkpoint.

    Args:
        reporter: records the hashes.
    """

    def __init__(
        self, model: nn.Module, optimizer: ZeroRedundancyOptimizer, mesh: Mesh, config: Config, reporter: Reporter
    ) -> None:
        self._sums = StateSums(model, optimizer, mesh)
        self._seed = config.train.seed
        self._reporter = reporter
        self._last: StateHash | None = None

    def now(self, progress: Progress) -> StateHash:
        """The hash of the present state, which is recorded unless this step's is. Collective."""
        place = place_in_training(progress.step, progress.samples, progress.tokens, progress.position, self._seed)
        if self._last is None or self._last.place != place:
            self._last = StateHash(place, self._sums.measure())
            self._reporter.state_hash(progress.step, self._last)
        return self._last
