"""Weights and gradients in canonical form, to compare layouts with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise.checkpoint import canonical
from shardwise.mesh import Group
from shardwise.optim import ZeroRedundancyOptimizer


def canonical_weights(model: nn.Module, pipeline: Group | None = None) -> dict[str, Tensor]:
    """All canonical weights, on every rank; without `pipeline` those of this rank's stages."""
    return {name: tensor.clone() for name, tensor in canonical(model, pipeline=pipeline)}


def canonical_gradients(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> dict[str, Tensor]:
    """All canonical gradients of the present step on every rank: sums over data parallelism, not averages."""
    optimizer.reduce_gradients()
    for bucket in optimizer.buckets:
        if bucket.sharded:
            comm.all_gather(bucket.gradient, bucket.group, out=bucket.gradients)
    return {name: tensor.clone() for name, tensor in canonical(model, _gradient)}


def gradient_errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """By canonical name, `‖Δ‖ / max(‖g‖, 1e-3 · ‖all g‖ / √tensors)`: a zero gradient is held to the model's scale."""
    scale = torch.stack([g.norm() for g in wanted.values()]).norm() / len(wanted) ** 0.5
    return {name: float((found[name] - g).norm() / torch.maximum(g.norm(), 1e-3 * scale)) for name, g in wanted.items()}


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
