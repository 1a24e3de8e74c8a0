"""Helpers for tests of parallel code: real ranks on one machine, and a model's state in canonical form."""

from shardwise.testing.canonical import canonical_gradients, canonical_weights, gradient_errors
from shardwise.testing.ranks import RankError, RankPool

__all__ = ["RankError", "RankPool", "canonical_gradients", "canonical_weights", "gradient_errors"]
