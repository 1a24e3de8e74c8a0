"""Helpers for tests of parallel code: real ranks on one machine, and a model's state in canonical form."""

from shardwise.testing.canonical import canonical_gradients, canonical_weights, gradient_errors, step_with_gradients
from shardwise.testing.ranks import RankError, RankPool
from shardwise.testing.text import random_text

__all__ = [
    "RankError",
    "RankPool",
    "canonical_gradients",
    "canonical_weights",
    "gradient_errors",
    "random_text",
    "step_with_gradients",
]
