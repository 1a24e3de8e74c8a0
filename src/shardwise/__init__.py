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
    from shardwise.models.batch_first import batch_first, pipelined
    from shardwise.optim.lamb import LAMB
    from shardwise.optim.muon import Muon
    from shardwise.optim.zero import ZeroRedundancyOptimizer
    from shardwise_plan.api import plan

__version__ = "0.2.0"

__all__ = [
    "LAMB", "ColumnParallelLinear", "Config", "ConfigError", "Dropout", "DropoutKey", "Experts",
    "GQAQKVColumnParallelLinear", "Group", "Init", "LayerNorm", "LayerOptions", "LinearOptions",
    "MergedColumnParallelLinear", "Mesh", "Muon", "ParallelEmbedding", "ParallelLMHead", "Piece", "PlacedModule",
    "QueryKeyNorm", "RMSNorm", "ReplicatedEmbedding", "ReplicatedLinear", "Routing", "RowParallelLinear", "Run",
    "RunError", "ShardwiseError", "StoppedError", "ZeroRedundancyOptimizer", "batch_first", "canonical_tensors",
    "export_checkpoint", "linear_cross_entropy", "load_checkpoint", "load_recipe", "make_parameter",
    "parallel_cross_entropy", "pipelined", "plan", "save_checkpoint", "train",
]  # fmt: skip

_NAMES = {
    "shardwise.api.checkpoints": "export_checkpoint load_checkpoint save_checkpoint",
    "shardwise.api.recipes": "load_recipe",
    "shardwise.api.runs": "Run",
    "shardwise.base.errors": "ConfigError RunError ShardwiseError StoppedError",
    "shardwise.checkpoint.canonical_tensors": "canonical_tensors",
    "shardwise.config": "Config",
    "shardwise.config.routing": "Routing",
    "shardwise.distributed.mesh": "Group Mesh",
    "shardwise.distributed.placement": "Init Piece PlacedModule make_parameter",
    "shardwise.layers.dropout": "Dropout DropoutKey",
    "shardwise.layers.embedding": "ParallelEmbedding ParallelLMHead ReplicatedEmbedding",
    "shardwise.layers.experts": "Experts",
    "shardwise.layers.linear": "ColumnParallelLinear GQAQKVColumnParallelLinear LayerOptions LinearOptions "
    "MergedColumnParallelLinear ReplicatedLinear RowParallelLinear",
    "shardwise.layers.loss": "linear_cross_entropy parallel_cross_entropy",
    "shardwise.layers.norm": "LayerNorm QueryKeyNorm RMSNorm",
    "shardwise.models.batch_first": "batch_first pipelined",
    "shardwise.optim.lamb": "LAMB",
    "shardwise.optim.muon": "Muon",
    "shardwise.optim.zero": "ZeroRedundancyOptimizer",
    "shardwise_plan.api": "plan",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


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
