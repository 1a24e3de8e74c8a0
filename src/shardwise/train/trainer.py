"""The training loop: steps, and after each of them the work of the run's observers (`observers.py`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch.profiler import record_function

from shardwise.optim.learning_rate import learning_rate
from shardwise.train.checkpoint_saving import CheckpointSaver
from shardwise.train.model_checks import check_replicas
from shardwise.train.passes import Passes
from shardwise.train.reporter import Reporter
from shardwise.train.step_meters import DATA, OPTIMIZER, StepMeters
from shardwise.train.step_record import StepRecord
from shardwise.train.training import Training

if TYPE_CHECKING:
    from shardwise.train.compile.compiled_units import Compilation
    from shardwise.train.evaluator import Evaluator


@dataclass(kw_only=True, eq=False, repr=False)
class Trainer(Training):
    """Trains one model on one rank of a mesh; every rank runs the same steps.

    Attributes:
        reporter: records the steps and evaluations; None for a caller who reads each record.
        tokenizer_path: folder of the data's tokenizer, which tasks need; None if it is not known.
        log_every: steps between those that files and progress show; None without a reporter.
    """

    reporter: Reporter | None = None
    tokenizer_path: Path | None = None
    compilation: Compilation | None = None

    def __post_init__(self) -> None:
        self.meters = StepMeters(self)
        self.passes = Passes(self, self.meters)
        self.log_every = None if self.reporter is None else self.config.log.every or 1
        self._last_step = self.config.last_step
        self._last = min(self._last_step, self.config.train.last_step(0))
        self._stage_starts = {stage.at for stage in self.config.data.stages}

    @cached_property
    def evaluator(self) -> Evaluator:
        """Evaluates the model on the texts of the feed, and on tasks."""
        from shardwise.train.evaluator import Evaluator

        return Evaluator(self, self.reporter, self.tokenizer_path)

    def run(
        self,
        observe: Callable[[StepRecord, bool], object],
        checkpoints: CheckpointSaver,
        traced: Callable[[int], AbstractContextManager[None]],
    ) -> str | None:
        """Train to the last step, with the work of the observers after each step.

        Args:
            observe: lets the observers work after a step: gets its record, and whether it is the last one.
            checkpoints: one of the observers, which knows who asks the run to stop.

        Returns:
            who asked the run to stop before its last step; None if nobody did.
        """
        first = self.progress.step + 1
        last = self._last = min(self._last_step, self.config.train.last_step(self.progress.step))
        with closing(self.feed), self.passes.gathers_behind_forward():
            # Whatever made the weights: ranks that begin with others would train another model.
            self.compare_replicas()
            if self.config.train.eval_every and not self.progress.step:
                self.evaluator.before_steps()
            for step in range(first, last + 1):
                with traced(step):
                    record = self.step(checkpoints.flags)
                observe(record, step == last)
                if checkpoints.stopped_by is not None and step < last:
                    return checkpoints.stopped_by
        return None

    def compare_replicas(self) -> None:
        """Compare the copies of parameters over ranks; RunError if they differ. Collective."""
        self.progress.phase = "comparison of replicas"
        # Parameters that are still under way would differ without a fault.
        self.optimizer.gathers.wait()
        check_replicas(self.model, self.mesh, self.progress.step, self.optimizer)

    def step(self, rank_flags: Callable[[], Sequence[float]] | None = None) -> StepRecord:
        """One optimizer step on the next global batch.

        The host waits for the device once: it reads loss and norms before the update, which a loss that is not finite
        must prevent. The update is still under way when this returns.

        Args:
            rank_flags: gives flags of this rank, such as a request to stop. The largest of all ranks, `agreed_flags`
                of the result, are read in the same transfer as loss and norms, and so is the slowest rank.
        """
        start = time.perf_counter()
        step = self.progress.step + 1
        is_logged = self.is_logged(step)
        clock = self.meters.clock
        # Marks around the update are read in the next step, so the step before a logged one is measured too.
        clock.begin(measures=is_logged or self.is_logged(step + 1))
        self.progress.phase = "reading of data"
        self.feed.seconds = 0.0
        with clock.phase(DATA):
            micro_batches = self.feed.at(self.progress.position, following=self._last_step - step)
        # A caller who reads each record may read all of it.
        reads_all = self.log_every is None or is_logged
        lr = learning_rate(self.config.optimizer, self.config.train.steps, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        is_ahead = "update_in_backward" in self.config.train.switches
        if is_ahead:
            self.optimizer.update_in_backward()
        before = [self.optimizer.weight_norm()] if is_ahead and reads_all else []
        self.progress.phase = "forward and backward"
        losses_NK = self.passes.run(micro_batches, step)
        self.progress.phase = "gradient reduction"
        losses_NK = self.passes.over_ranks(losses_NK)
        flags = None if rank_flags is None else rank_flags()
        with clock.phase(OPTIMIZER):
            norms = self.optimizer.norms() if reads_all and not before else (self.optimizer.gradient_norm(), *before)
        numbers = self.meters.read(losses_NK, norms, flags, reads_all=reads_all)
        loss = sum(numbers.losses)
        if not (math.isfinite(loss) and math.isfinite(numbers.gradient_norm)):
            raise self.passes.non_finite_error(micro_batches, step, loss, numbers.gradient_norm)
        self.progress.phase = "optimizer update"
        # The loss and the norms are finite: from here on the parameters change.
        with record_function("optimizer"), clock.phase(OPTIMIZER):
            self.optimizer.step()
        if self.progress.step in self._stage_starts:
            # Other data have another loss: its first steps are no spike.
            self.progress.losses.clear()
        spike = self.progress.advance(loss, self.config.train.global_batch, self.config.train.sequence_length)
        seconds = time.perf_counter() - start
        return self.meters.record(
            numbers, lr=lr, spike=spike, seconds=seconds, input_seconds=self.feed.seconds, is_logged=is_logged
        )

    def is_logged(self, step: int) -> bool:
        """Return whether files and progress show this step; the same on every rank."""
        return self.log_every is not None and (step % self.log_every == 0 or step == self._last)
