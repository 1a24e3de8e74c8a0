"""Bit-equal embeddings and output head: gradients are added in the tree of parts of a sample, or of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from shardwise.distributed.mesh import Group
from shardwise.layers.bitwise.products import Section, column_products
from shardwise.layers.bitwise.replicated import SequenceParts, apply_by_sequence_part
from shardwise.layers.embedding import (
    ParallelEmbedding,
    ParallelLMHead,
    ReplicatedEmbedding,
    add_head_leaf,
    head_leaf,
)


def _by_part_of_samples(
    layer: ParallelEmbedding | ReplicatedEmbedding, rows: Callable[[Tensor], Tensor], ids: Tensor
) -> Tensor:
    """Return the rows of ids, part by part where the ranks that share samples have several."""
    group = layer.context_group
    if group is None or not (group.has_parts and layer.shares_samples):
        return rows(ids)
    return SequenceParts(layer, group).joined(rows, ids)


class BitEqualParallelEmbedding(ParallelEmbedding):
    """Looks up the ids of each part of the samples by themselves."""

    def forward(self, ids: Tensor) -> Tensor:
        return _by_part_of_samples(self, super().forward, ids)


class BitEqualReplicatedEmbedding(ReplicatedEmbedding):
    """Looks up the ids of each part of the samples, and of the sequence, by themselves."""

    def forward(self, ids: Tensor) -> Tensor:
        return _by_part_of_samples(self, self._rows, ids)

    def _rows(self, ids: Tensor) -> Tensor:
        is_cut = self.sequence_parallel_enabled
        return apply_by_sequence_part(
            F.embedding, self._local(ids), [self.weight], self.group, sequence_parallel=is_cut
        )


class BitEqualLMHead(ParallelLMHead):
    """Computes the logits of each part of the vocabulary by themselves.

    A tied head has a gradient of its own at every layout, which is added to the embedding's once a step.
    """

    def prepare(self) -> None:
        self._section = Section(len(self.weight))
        if self.is_tied:
            add_head_leaf(self.weight)

    @property
    def _used_weight(self) -> Tensor:
        """The weight, or the leaf by which its gradient as the head's weight is kept apart."""
        leaf = head_leaf(self.weight)
        return self.weight if leaf is None else leaf

    @property
    def _chunk_width(self) -> int:
        # Chunks are the same at every layout.
        return len(self.weight) * self.group.size

    def _multiply(self, x: Tensor) -> Tensor:
        (logits,) = column_products(x, self._used_weight, self.bias, [self._section], self.group)
        return logits

    def _loss(self, x: Tensor, targets_SB: Tensor, ignore_index: int, context_group: Group | None) -> Tensor:
        def loss(x: Tensor, targets_SB: Tensor) -> Tensor:
            # The weight is read here, as each part has a view of its own.
            return super(BitEqualLMHead, self)._loss(x, targets_SB, ignore_index, None)

        if context_group is None or not context_group.has_parts:
            return loss(x, targets_SB)
        return SequenceParts(self, context_group, {"weight": self._used_weight}).summed(loss, x, targets_SB)
