"""The work of a run after its steps: an observer is one entry of the list here. Garbage is collected there too."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwise.train.step_record import StepRecord

if TYPE_CHECKING:
    from shardwise.train.checkpoint_saving import CheckpointSaver
    from shardwise.train.compile.run_graphs import RunGraphs
    from shardwise.train.reporter import Reporter
    from shardwise.train.trainer import Trainer


@dataclass(frozen=True)
class Observer:
    """Work after some steps of a run, which every rank does."""

    every: int  # steps from one time to the next; 0 for never. The run's last step is one of these steps too
    after_step: Callable[[StepRecord, bool], object]  # gets the record of the step, and whether it is the last one
    takes_long: bool = False  # much time passes, so that the ranks have to agree anew on a stop or a checkpoint


def run_observers(observers: Sequence[Observer], record: StepRecord, is_last: bool) -> None:
    """Let the observers that are due work, in their order. Collective."""
    for observer in observers:
        if observer.every and (is_last or record.step % observer.every == 0):
            observer.after_step(record, is_last)
            if observer.takes_long:
                record = replace(record, agreed_flags=None)


def build_observers(
    trainer: Trainer, reporter: Reporter, checkpoints: CheckpointSaver, graphs: RunGraphs | None
) -> list[Observer]:
    """The observers of a run, which work in this order."""
    config = trainer.config
    progress = trainer.progress

    def report(record: StepRecord, _: bool) -> None:
        if record.is_logged:
            record = replace(record, checkpoint_seconds=checkpoints.take_seconds())
        reporter.step(record)

    def keep_graphs(record: StepRecord, is_last: bool) -> None:
        # All graphs of training are captured in a run's first step, and those of evaluation in an evaluation.
        is_evaluated = config.train.eval_every and (is_last or record.step % config.train.eval_every == 0)
        if graphs is not None and (is_evaluated or record.step == progress.before + 1):
            reporter.captured(*graphs.keep_new())

    def hash_state(*_: object) -> None:
        progress.phase = "hash of the state"
        if checkpoints.state_hashes is not None:
            checkpoints.state_hashes.now()

    return [
        Observer(1, report),
        Observer(config.log.state_hash_every, hash_state),
        Observer(config.log.drift_every, lambda *_: trainer.compare_replicas(), takes_long=True),
        Observer(config.train.eval_every, lambda *_: trainer.evaluator.texts(), takes_long=True),
        Observer(1, keep_graphs),
        Observer(config.evaluation.tasks_every, lambda *_: trainer.evaluator.tasks(), takes_long=True),
        Observer(1, lambda record, is_last: checkpoints.after_step(is_last, record.agreed_flags)),
    ]


# ---- garbage, which is collected between steps

_STEPS_BEFORE_FREEZE = 2  # steps after which the objects that a training keeps are all there
_FULL_EVERY = 100
"""Steps between two searches of all objects, which take up to a tenth of a second where none are frozen."""


class SteppedCollection:
    """Garbage collection of a training: by `after_step` alone; afterwards the collector is as it was before.

    By itself the collector runs whenever enough objects were made: at any place of a step, on each rank at another one,
    and all ranks wait for the one that collects.
    Objects that exist after the first steps are not looked at again, unless the program had objects frozen before.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._was_enabled = gc.isenabled()
        self._has_frozen = False

    def __enter__(self) -> SteppedCollection:
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self) -> None:
        """Collect young garbage, which takes microseconds where there is none, and at times all garbage."""
        self._steps += 1
        if self._steps == _STEPS_BEFORE_FREEZE and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._has_frozen = True
        else:
            gc.collect(1 if self._steps % _FULL_EVERY else 2)
