"""A pipeline stage, and the pipeline rank that holds it."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config.sections import V_SHAPED, ParallelConfig


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
    """The pipeline rank of a stage. Ranks 0, 1, … get one stage each per round; in a V, odd rounds go backwards."""
    degree = parallel.pipeline
    round_, place = divmod(stage, degree)
    return degree - 1 - place if parallel.schedule in V_SHAPED and round_ % 2 else place
