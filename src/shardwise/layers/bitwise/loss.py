"""The bit-equal loss: products and sums over a vocabulary that is cut into parts."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.distributed import collectives
from shardwise.layers.bitwise.part_products import (
    by_part,
    multiply_parts,
    row_sums,
    sum_of_products,
    weight_gradient_of_rows,
)
from shardwise.layers.bitwise.replicated import sequence_parts
from shardwise.layers.loss import VocabularyShard


class BitEqualShard(VocabularyShard):
    """Makes each sum over the vocabulary of parts, and each chunk of the same rows of each part of the sequence."""

    def _row_sums(self, x_NV: Tensor) -> Tensor:
        return collectives.tree_sum(x_NV.unflatten(1, (self.group.parts, -1)).sum(dim=2).t())

    def _without_padding(self, x_NV: Tensor) -> Tensor:
        # With 0 for padding: all parts have one width.
        return x_NV.masked_fill(torch.arange(x_NV.shape[1], device=x_NV.device) >= self.columns, 0.0)

    def chunk_width(self, weight_vH: Tensor) -> int:
        # Chunks are the same at every layout.
        return len(weight_vH) * self.group.size

    def sequence_parts(self, x_SBH: Tensor, is_cut: bool) -> int:
        return sequence_parts(x_SBH, self.group, is_cut)

    def logits(self, x_NH: Tensor, weight_vH: Tensor, trained: bool) -> Tensor:
        return multiply_parts(x_NH, weight_vH, None, self.group.parts, trained=trained)

    def input_gradient(self, dlogits_Nv: Tensor, weight_vH: Tensor) -> Tensor:
        count = self.group.parts
        weight_PHv = weight_vH.unflatten(0, (count, -1)).transpose(1, 2)
        return sum_of_products([by_part(dlogits_Nv, count)], [weight_PHv], count)

    def add_weight_gradient_(self, dw_vH: Tensor, dlogits_Nv: Tensor, x_NH: Tensor) -> None:
        dw_vH.add_(weight_gradient_of_rows(dlogits_Nv, x_NH, self.group.parts))

    def bias_gradient(self, dlogits_Nv: Tensor) -> Tensor:
        return row_sums(by_part(dlogits_Nv, self.group.parts)).flatten()
