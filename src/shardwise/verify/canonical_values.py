"""Weights and gradients in canonical form, for comparisons of layouts."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from shardwise.checkpoint.canonical_tensors import canonical_tensors
from shardwise.distributed.mesh import Group
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.train.step_record import StepRecord
from shardwise.train.trainer import Trainer


def canonical_weights(
    model: nn.Module, pipeline: Group | None = None, *, optimizer: ZeroRedundancyOptimizer | None = None
) -> dict[str, Tensor]:
    """Return all canonical weights to compare layouts, on every rank; without `pipeline` those of this rank's stages.

    optimizer: the one that has parts of the weights, with ZeRO-3.
    """
    with nullcontext() if optimizer is None else optimizer.gathered():
        return {name: tensor.clone() for name, tensor in canonical_tensors(model, pipeline=pipeline)}


def canonical_gradients(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> dict[str, Tensor]:
    """Return all canonical gradients of the present step to compare layouts, on every rank: sums, not averages."""
    optimizer.reduce_gradients()
    for bucket in optimizer.buckets:
        # A rank has the sums of its own part alone; the other parts hold gradients of this rank's samples.
        bucket.gather_gradients()
    return {name: tensor.clone() for name, tensor in canonical_tensors(model, _gradient)}


def step_with_gradients(trainer: Trainer) -> tuple[StepRecord, dict[str, Tensor]]:
    """Take a step; return its record, and by canonical name the gradients of this rank's stages before the update."""
    gradients: dict[str, Tensor] = {}
    optimizer = trainer.optimizer

    def keep(*_: object) -> None:
        # In a hook, as the update that follows overwrites or frees the gradients.
        gradients.update(canonical_gradients(trainer.model, optimizer))

    hook = optimizer.register_step_pre_hook(keep)
    try:
        return trainer.step(), gradients
    finally:
        hook.remove()


def gradient_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the errors of a layout's gradients, `‖Δ‖ / max(‖g‖, 1e-3 · ‖all g‖ / √tensors)` by canonical name.

    The scale of the whole model bounds the denominator from below: tiny gradients consist of rounding.
    """
    scale = torch.stack([g.norm() for g in expected.values()]).norm() / len(expected) ** 0.5
    errors: dict[str, float] = {}
    for name, g in expected.items():
        errors[name] = float((actual[name] - g).norm() / torch.maximum(g.norm(), 1e-3 * scale))
    return errors


def _gradient(parameter: nn.Parameter) -> Tensor:
    # A router's bias has none.
    if not parameter.requires_grad:
        return torch.zeros_like(parameter)
    assert parameter.grad is not None
    return parameter.grad
