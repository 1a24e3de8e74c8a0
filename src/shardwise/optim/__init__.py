"""Optimizers over sharded state, and learning-rate schedules."""

from shardwise.optim.lamb import LAMB
from shardwise.optim.schedule import learning_rate
from shardwise.optim.zero import ZeroRedundancyOptimizer

__all__ = ["LAMB", "ZeroRedundancyOptimizer", "learning_rate"]
