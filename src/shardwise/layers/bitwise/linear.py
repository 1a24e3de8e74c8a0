"""Bit-equal column- and row-parallel layers.

With a grain of 1 nothing is cut: products are those of the ordinary layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group
from shardwise.layers.bitwise.products import Section, column_products, row_products
from shardwise.layers.bitwise.replicated import apply_by_sequence_part
from shardwise.layers.linear import RowParallelLinear, _ColumnParallel, scaling_in_training


class BitEqualColumnParallel(_ColumnParallel):
    """Computes the outputs of each part by themselves, and adds the gradients of its input in the tree of parts."""

    def prepare(self) -> None:
        # Here, as a compiler cannot capture the making of a group.
        groups = [self.group.split(copies) if copies > 1 else Group() for copies in self._copies]
        self._sections = [Section(*section) for section in zip(self._sizes, self._repeats, groups, strict=True)]
        self._copies = [copies * repeats for copies, repeats in zip(self._copies, self._repeats, strict=True)]
        self._holders *= self.group.parts

    def multiply(self, entered: Tensor) -> tuple[Tensor, ...]:
        if not self.group.has_parts:
            return super().multiply(entered)
        scaling = scaling_in_training(self)
        return column_products(entered, self.weight, self.bias, self._sections, self.group, scaling)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        if not self.group.has_parts:
            return super().project(x)
        if self._regathers(x):
            return column_products(x, self.weight, self.bias, self._sections, self.group, gathers=True)
        entered = collectives.gather_or_copy(x, self.group, sequence_parallel=self.sequence_parallel_enabled)
        return self.multiply(entered)


class BitEqualRowParallelLinear(RowParallelLinear):
    """Adds its products in the tree of parts, and the gradient of its bias in that of parts of the sequence."""

    def _products(self, terms: Sequence[tuple[RowParallelLinear, Tensor]]) -> Tensor:
        if not self.group.has_parts:
            return super()._products(terms)
        return row_products([(x, layer.weight) for layer, x in terms], self.group, scaling_in_training(self))

    def _add_bias(self, y: Tensor, bias: Tensor) -> Tensor:
        is_cut = self.sequence_parallel_enabled
        return apply_by_sequence_part(torch.add, y, [bias], self.group, sequence_parallel=is_cut)
