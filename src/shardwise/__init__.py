"""Pretrain transformer language models across any mesh of devices.

The names below are the public API. Importing the package loads none of them and does not import torch: each is loaded
when it is first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.mesh import Group, Mesh
    from shardwise.optim import LAMB, ZeroRedundancyOptimizer
    from shardwise.parallel import (
        ColumnParallelLinear,
        Dropout,
        DropoutKey,
        GQAQKVColumnParallelLinear,
        LayerNorm,
        MergedColumnParallelLinear,
        ParallelEmbedding,
        ParallelLMHead,
        ReplicatedEmbedding,
        ReplicatedLinear,
        RMSNorm,
        RowParallelLinear,
        linear_cross_entropy,
        parallel_cross_entropy,
    )

__version__ = "0.1.0"

__all__ = [
    "LAMB",
    "ColumnParallelLinear",
    "Dropout",
    "DropoutKey",
    "GQAQKVColumnParallelLinear",
    "Group",
    "LayerNorm",
    "MergedColumnParallelLinear",
    "Mesh",
    "ParallelEmbedding",
    "ParallelLMHead",
    "RMSNorm",
    "ReplicatedEmbedding",
    "ReplicatedLinear",
    "RowParallelLinear",
    "ZeroRedundancyOptimizer",
    "linear_cross_entropy",
    "parallel_cross_entropy",
]

_HOME = {
    "LAMB": "shardwise.optim",
    "ZeroRedundancyOptimizer": "shardwise.optim",
    "Group": "shardwise.mesh",
    "Mesh": "shardwise.mesh",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, "shardwise.parallel")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
