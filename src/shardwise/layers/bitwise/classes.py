"""All bit-equal classes."""

from __future__ import annotations

from shardwise.layers.bitwise.embedding import BitEqualLMHead, BitEqualParallelEmbedding, BitEqualReplicatedEmbedding
from shardwise.layers.bitwise.linear import BitEqualColumnParallel, BitEqualRowParallelLinear
from shardwise.layers.bitwise.loss import BitEqualShard
from shardwise.layers.bitwise.norm import BitEqualLayerNorm, BitEqualQueryKeyNorm, BitEqualRMSNorm

_CLASSES = (
    BitEqualColumnParallel,
    BitEqualRowParallelLinear,
    BitEqualRMSNorm,
    BitEqualLayerNorm,
    BitEqualQueryKeyNorm,
    BitEqualParallelEmbedding,
    BitEqualReplicatedEmbedding,
    BitEqualLMHead,
    BitEqualShard,
)
BIT_EQUAL: dict[type, type] = {kind.__bases__[0]: kind for kind in _CLASSES}
"""Ordinary class → bit-equal class."""
