"""Sharded layers and losses: each holds its shard as a plain parameter and communicates over the group it is given."""

from shardwise.parallel.dropout import Dropout, DropoutKey
from shardwise.parallel.embedding import ParallelEmbedding, ReplicatedEmbedding
from shardwise.parallel.head import ParallelLMHead
from shardwise.parallel.linear import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    LayerOptions,
    LinearOptions,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from shardwise.parallel.loss import linear_cross_entropy, parallel_cross_entropy
from shardwise.parallel.norm import LayerNorm, QueryKeyNorm, RMSNorm

__all__ = [
    "ColumnParallelLinear",
    "Dropout",
    "DropoutKey",
    "GQAQKVColumnParallelLinear",
    "LayerNorm",
    "LayerOptions",
    "LinearOptions",
    "MergedColumnParallelLinear",
    "ParallelEmbedding",
    "ParallelLMHead",
    "QueryKeyNorm",
    "RMSNorm",
    "ReplicatedEmbedding",
    "ReplicatedLinear",
    "RowParallelLinear",
    "linear_cross_entropy",
    "parallel_cross_entropy",
]
