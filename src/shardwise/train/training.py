"""One rank's part of a training: what its trainer, its evaluations, its passes and its checkpoints share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from shardwise.config import CheckpointConfig, Config, Layout
from shardwise.distributed.mesh import Mesh
from shardwise.launch.environment import NODE
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.train.feed import Feed
from shardwise.train.step_record import Progress

if TYPE_CHECKING:
    from shardwise.pipeline.schedule import Pipeline  # imports torch's compiler, which is slow


@dataclass(kw_only=True, eq=False, repr=False)
class Training:
    """A training on one rank of a mesh."""

    config: Config
    layout: Layout
    mesh: Mesh
    model: nn.Module
    optimizer: ZeroRedundancyOptimizer
    feed: Feed
    progress: Progress
    pipeline: Pipeline | None = None


def memory_copy_interval(settings: CheckpointConfig) -> int:
    """Steps between copies of a training's state in memory; 0: none. By default those of a job's checkpoints."""
    default = settings.every if NODE in os.environ else 0
    return default if settings.memory_every is None else settings.memory_every
