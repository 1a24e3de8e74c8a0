"""Pretrain transformer language models across any mesh of devices.

The names below are the public API. Importing the package loads none of them and does not import torch: each is loaded
when it is first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.api.checkpoints import export_checkpoint, load_checkpoint, save_checkpoint
    from shardwise.api.planning import plan
    from shardwise.api.recipes import load_recipe
    from shardwise.api.runs import Run, train
    from shardwise.checkpoint import canonical_tensors
    from shardwise.config import Config
    from shardwise.errors import ConfigError, RunError, ShardwiseError, StoppedError
    from shardwise.mesh import Group, Mesh
    from shardwise.optim import LAMB, ZeroRedundancyOptimizer
    from shardwise.parallel import (
        ColumnParallelLinear,
        Dropout,
        DropoutKey,
        GQAQKVColumnParallelLinear,
        LayerNorm,
        LayerOptions,
        LinearOptions,
        MergedColumnParallelLinear,
        ParallelEmbedding,
        ParallelLMHead,
        QueryKeyNorm,
        ReplicatedEmbedding,
        ReplicatedLinear,
        RMSNorm,
        RowParallelLinear,
        linear_cross_entropy,
        parallel_cross_entropy,
    )
    from shardwise.placement import Init, Piece, PlacedModule, make_parameter

__version__ = "0.1.0"

__all__ = [
    "LAMB",
    "ColumnParallelLinear",
    "Config",
    "ConfigError",
    "Dropout",
    "DropoutKey",
    "GQAQKVColumnParallelLinear",
    "Group",
    "Init",
    "LayerNorm",
    "LayerOptions",
    "LinearOptions",
    "MergedColumnParallelLinear",
    "Mesh",
    "ParallelEmbedding",
    "ParallelLMHead",
    "Piece",
    "PlacedModule",
    "QueryKeyNorm",
    "RMSNorm",
    "ReplicatedEmbedding",
    "ReplicatedLinear",
    "RowParallelLinear",
    "Run",
    "RunError",
    "ShardwiseError",
    "StoppedError",
    "ZeroRedundancyOptimizer",
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
    "LAMB": "shardwise.optim",
    "ZeroRedundancyOptimizer": "shardwise.optim",
    "Config": "shardwise.config",
    "ConfigError": "shardwise.errors",
    "Group": "shardwise.mesh",
    "Init": "shardwise.placement",
    "Mesh": "shardwise.mesh",
    "Piece": "shardwise.placement",
    "PlacedModule": "shardwise.placement",
    "Run": "shardwise.api.runs",
    "RunError": "shardwise.errors",
    "ShardwiseError": "shardwise.errors",
    "StoppedError": "shardwise.errors",
    "canonical_tensors": "shardwise.checkpoint",
    "export_checkpoint": "shardwise.api.checkpoints",
    "load_checkpoint": "shardwise.api.checkpoints",
    "load_recipe": "shardwise.api.recipes",
    "make_parameter": "shardwise.placement",
    "save_checkpoint": "shardwise.api.checkpoints",
}
_CALLABLE = ("plan", "train")
"""Packages that are functions too (`callables.py`)."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _CALLABLE:
        return import_module(f"{__name__}.{name}")
    value = getattr(import_module(_HOME.get(name, "shardwise.parallel")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
