"""What a run does after its steps, and how often. `train/build.py` lists the observers of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardwise.train.step_record import StepRecord


@dataclass(frozen=True)
class Observer:
    """Work after some steps of a run, which every rank does.

    Attributes:
        every: steps from one time to the next; 0 for never. The run's last step is one of these steps too.
        after_step: gets the record of the step, and whether it is the last one.
        takes_long: much time passes, so that the ranks have to agree anew on a stop or a checkpoint.
    """

    every: int
    after_step: Callable[[StepRecord, bool], object]
    takes_long: bool = False


def observe(observers: Sequence[Observer], record: StepRecord, *, is_last: bool) -> None:
    """Let the observers that are due work, in their order. Collective."""
    for observer in observers:
        if observer.every and (is_last or record.step % observer.every == 0):
            observer.after_step(record, is_last)
            if observer.takes_long:
                record = replace(record, agreed_flags=None)
