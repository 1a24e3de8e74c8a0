"""Pretrain transformer language models across any mesh of devices.

The names below are the public API. Importing the package loads none of them and does not import torch: each is loaded
when it is first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.api.checkpoints import export_checkpoint, load_checkpoint, save_checkpoint
    from shardwise.api.recipes import load_recipe
    from shardwise.api.runs import Run, train
    from shardwise.base.errors import ConfigError, RunError, ShardwiseError, StoppedError
    from shardwise.checkpoint.canonical_tensors import canonical_tensors
    from shardwise.config import Config
    from shardwise.config.routing import Routing
    from shardwise.distributed.mesh import Group, Mesh
    from shardwise.distributed.placement import Init, Piece, PlacedModule, make_parameter
    from shardwise.layers.dropout import Dropout, DropoutKey
    from shardwise.layers.embedding import ParallelEmbedding, ParallelLMHead, ReplicatedEmbedding
    from shardwise.layers.experts import Experts
    from shardwise.layers.linear import (
        ColumnParallelLinear,
        GQAQKVColumnParallelLinear,
        LayerOptions,
        LinearOptions,
        MergedColumnParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )
    from shardwise.layers.loss import linear_cross_entropy, parallel_cross_entropy
    from shardwise.layers.norm import LayerNorm, QueryKeyNorm, RMSNorm
    from shardwise.models.batch_first import batch_first
    from shardwise.optim.lamb import LAMB
    from shardwise.optim.muon import Muon
    from shardwise.optim.zero import ZeroRedundancyOptimizer
    from shardwise_plan.api import plan

__version__ = "0.2.0"

__all__ = [
    "LAMB",
    "ColumnParallelLinear",
    "Config",
    "ConfigError",
    "Dropout",
    "DropoutKey",
    "Experts",
    "GQAQKVColumnParallelLinear",
    "Group",
    "Init",
    "LayerNorm",
    "LayerOptions",
    "LinearOptions",
    "MergedColumnParallelLinear",
    "Mesh",
    "Muon",
    "ParallelEmbedding",
    "ParallelLMHead",
    "Piece",
    "PlacedModule",
    "QueryKeyNorm",
    "RMSNorm",
    "ReplicatedEmbedding",
    "ReplicatedLinear",
    "Routing",
    "RowParallelLinear",
    "Run",
    "RunError",
    "ShardwiseError",
    "StoppedError",
    "ZeroRedundancyOptimizer",
    "batch_first",
    "canonical_tensors",
    "export_checkpoint",
    "linear_cross_entropy",
    "load_checkpoint",
    "load_recipe",
    "make_parameter",
    "parallel_cross_entropy",
    "plan",
    "save_checkpoint",
    "train",
]

_HOME = {
    "LAMB": "shardwise.optim.lamb",
    "ColumnParallelLinear": "shardwise.layers.linear",
    "Config": "shardwise.config",
    "ConfigError": "shardwise.base.errors",
    "Dropout": "shardwise.layers.dropout",
    "DropoutKey": "shardwise.layers.dropout",
    "Experts": "shardwise.layers.experts",
    "GQAQKVColumnParallelLinear": "shardwise.layers.linear",
    "Group": "shardwise.distributed.mesh",
    "Init": "shardwise.distributed.placement",
    "LayerNorm": "shardwise.layers.norm",
    "LayerOptions": "shardwise.layers.linear",
    "LinearOptions": "shardwise.layers.linear",
    "MergedColumnParallelLinear": "shardwise.layers.linear",
    "Mesh": "shardwise.distributed.mesh",
    "Muon": "shardwise.optim.muon",
    "ParallelEmbedding": "shardwise.layers.embedding",
    "ParallelLMHead": "shardwise.layers.embedding",
    "Piece": "shardwise.distributed.placement",
    "PlacedModule": "shardwise.distributed.placement",
    "QueryKeyNorm": "shardwise.layers.norm",
    "RMSNorm": "shardwise.layers.norm",
    "ReplicatedEmbedding": "shardwise.layers.embedding",
    "ReplicatedLinear": "shardwise.layers.linear",
    "Routing": "shardwise.config.routing",
    "RowParallelLinear": "shardwise.layers.linear",
    "Run": "shardwise.api.runs",
    "RunError": "shardwise.base.errors",
    "ShardwiseError": "shardwise.base.errors",
    "StoppedError": "shardwise.base.errors",
    "ZeroRedundancyOptimizer": "shardwise.optim.zero",
    "batch_first": "shardwise.models.batch_first",
    "canonical_tensors": "shardwise.checkpoint.canonical_tensors",
    "export_checkpoint": "shardwise.api.checkpoints",
    "linear_cross_entropy": "shardwise.layers.loss",
    "load_checkpoint": "shardwise.api.checkpoints",
    "load_recipe": "shardwise.api.recipes",
    "make_parameter": "shardwise.distributed.placement",
    "parallel_cross_entropy": "shardwise.layers.loss",
    "plan": "shardwise_plan.api",
    "save_checkpoint": "shardwise.api.checkpoints",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "train":  # the package of the training is the function too (`base/registered.py`)
        return import_module(f"{__name__}.{name}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
