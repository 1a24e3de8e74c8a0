"""What no formula knows of a model of the user's own is counted, once it is built."""

from __future__ import annotations

import math

from torch import nn

from shardwise.optim import ZeroRedundancyOptimizer
from shardwise.placement import placements

_MOMENTS = 2


def state_memory(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> dict[str, int]:
    """Bytes on this rank of what stays from step to step, by kind; a micro-batch needs more, which is not known.

    `parameters` are the local shards with the padding of their flat buckets, `gradients` one for each of these
    elements, `optimizer` the two moments of AdamW or LAMB, which the first step makes, and a master copy where the
    optimizer's dtype is not the parameters'.
    """
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    return {
        "parameters": frozen + sum(bucket.values.nbytes for bucket in optimizer.buckets),
        "gradients": sum(bucket.gradients.nbytes for bucket in optimizer.buckets),
        "optimizer": sum((_MOMENTS + bucket.separate) * bucket.master.nbytes for bucket in optimizer.buckets),
    }


def count_parameters(model: nn.Module) -> int:
    """Elements of the whole model's canonical tensors, each once, whatever part of them this rank holds."""
    shapes = {piece.name: piece.shape for _, _, placement in placements(model) for piece in placement.pieces}
    return sum(math.prod(shape) for shape in shapes.values())
