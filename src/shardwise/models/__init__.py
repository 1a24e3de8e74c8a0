"""The model families. Each is one short file that reads like the architecture, built from the sharded layers below."""

from __future__ import annotations

import torch

from shardwise.config import ModelConfig
from shardwise.mesh import Mesh
from shardwise.models.llama import Llama

__all__ = ["Llama", "build_model"]


def build_model(config: ModelConfig, mesh: Mesh, *, sequence_parallel: bool, seed: int, dtype: torch.dtype) -> Llama:
    """This rank's shard of the model that `config.family` names, with weights drawn from (seed, canonical name)."""
    return Llama(config, mesh.tp, sequence_parallel=sequence_parallel, seed=seed, device=mesh.device, dtype=dtype)
