"""What no formula knows of a model of the user's own is counted, once it is built."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from torch import nn

from shardwise.optim import ZeroRedundancyOptimizer
from shardwise.placement import placements

_MOMENTS = 2


@dataclass(frozen=True)
class StateMemory:
    """Bytes on one rank of what stays from step to step; what a micro-batch needs beside it is not known.

    Attributes:
        parameters: the local shards, with the padding of the flat buckets they lie in. gradients: one for each of these
        elements, in the gradient dtype.
        optimizer: AdamW's or LAMB's two moments, and a master where the optimizer's dtype is not the parameters'.
    """

    parameters: int
    gradients: int
    optimizer: int

    @staticmethod
    def of(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> StateMemory:
        """Of a model and its optimizer, whose moments the first step makes."""
        frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        return StateMemory(
            parameters=frozen + sum(bucket.values.nbytes for bucket in optimizer.buckets),
            gradients=sum(bucket.gradients.nbytes for bucket in optimizer.buckets),
            optimizer=sum((_MOMENTS + bucket.separate) * bucket.master.nbytes for bucket in optimizer.buckets),
        )

    @property
    def total(self) -> int:
        return sum(size for _, size in self.rows())

    def rows(self) -> list[tuple[str, int]]:
        """(kind, bytes), in the order in which they are shown."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def count_parameters(model: nn.Module) -> int:
    """Elements of the whole model's canonical tensors, each once, whatever part of them this rank holds."""
    shapes = {piece.name: piece.shape for _, _, placement in placements(model) for piece in placement.pieces}
    return sum(math.prod(shape) for shape in shapes.values())
