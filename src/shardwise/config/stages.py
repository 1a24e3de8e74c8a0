"""A pipeline stage, and the pipeline rank that holds it."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config.schedules import SCHEDULES
from shardwise.config.sections import ParallelConfig


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks; the first stage also holds the embedding, and the last one the head.

    Attributes:
        index: number of the stage from 0, in the order of the model.
        rank: the pipeline rank that holds it.
        layers: numbers of the blocks that it holds.
        stages: number of stages of the model.
    """

    index: int
    rank: int
    layers: range
    stages: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1


def rank_of(parallel: ParallelConfig, stage: int) -> int:
    """Return the pipeline rank that holds a stage, given by its index in the order of the model.

    Stages are dealt out in rounds, one to each rank. In a V-shaped schedule every second round goes from the last rank
    to the first, so that rank r of p holds the stages r and 2p-1-r.
    """
    round_number, place = divmod(stage, parallel.pipeline)
    if SCHEDULES[parallel.schedule].is_v_shaped and round_number % 2 == 1:
        return parallel.pipeline - 1 - place
    return place
