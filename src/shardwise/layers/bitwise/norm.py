"""Bit-equal norms: gradients of weights are added in the tree of parts of the sequence, or of the heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.distributed import collectives
from shardwise.distributed.placement import of_or_whole
from shardwise.layers.bitwise.part_products import by_part, row_sums
from shardwise.layers.bitwise.products import Section
from shardwise.layers.bitwise.replicated import apply_by_part, apply_by_sequence_part, part_views, sequence_parts
from shardwise.layers.norm import LayerNorm, QueryKeyNorm, RMSNorm, Sums, has_kernel, one_more, rms_norm


class BitEqualRMSNorm(RMSNorm):
    """Normalises each part of the sequence by itself, or all at once where torch has no kernel."""

    def forward(self, x: Tensor) -> Tensor:
        is_cut = self.sequence_parallel_enabled
        weight = one_more(self.weight) if self.unit_offset else self.weight
        if has_kernel(x, weight):
            norm = partial(rms_norm, eps=self.eps)
            return apply_by_sequence_part(norm, x, [weight], self.group, sequence_parallel=is_cut)
        if is_cut:
            (weight,) = part_views(weight, 1, self.group)
        return rms_norm(x, weight, self.eps, _SumsOfSequence(sequence_parts(x, self.group, is_cut)))


@dataclass(frozen=True)
class _SumsOfSequence(Sums):
    """Sums of `count` parts along dim 0, each with the bits that it has alone."""

    count: int

    def over_tokens(self, terms: Tensor) -> Tensor:
        return collectives.tree_sum(row_sums(terms.reshape(self.count, -1, terms.shape[-1])))

    def products(self, terms: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([part @ weight for part in terms.chunk(self.count)])


class BitEqualLayerNorm(LayerNorm):
    """Normalises each part of the sequence by itself."""

    def forward(self, x: Tensor) -> Tensor:
        def norm(part: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.layer_norm(part, self.normalized_shape, weight, bias, self.eps)

        is_cut = self.sequence_parallel_enabled
        return apply_by_sequence_part(norm, x, [self.weight, self.bias], self.group, sequence_parallel=is_cut)


class BitEqualQueryKeyNorm(QueryKeyNorm):
    """Normalises the heads of each part by themselves, or adds the squares of all heads in the tree of parts."""

    def prepare(self) -> None:
        # The ranks with the same queries' weights, and keys': a view has no record of them, and no graph makes a group.
        self._copies = {name: of_or_whole(weight).pieces[0].copies for name, weight in self.named_parameters()}

    def _norm_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        def norm(part: Tensor, shared: Tensor) -> Tensor:
            return rms_norm(part.contiguous(), shared, self.eps)

        weight = one_more(weight) if self.unit_offset else weight
        return apply_by_part(norm, x, [weight], self.group.parts, self.group, dim=-2)

    def _norm_all_heads(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self._norm_together(query, key)

    def _sums(self, name: str, x: Tensor) -> Sums:
        rows = len(getattr(self, name))
        return _SumsOfHeads(Section(rows, x.shape[-1] // rows, self._copies[name]), self.group.parts)


@dataclass(frozen=True)
class _SumsOfHeads(Sums):
    """Sums of `count` parts along the width, whose weights are a section's."""

    section: Section
    count: int

    def over_tokens(self, terms: Tensor) -> Tensor:
        return self.section.joined(row_sums(by_part(terms, self.count)))

    def over_width(self, terms: Tensor) -> Tensor:
        return collectives.tree_sum(terms.unflatten(-1, (self.count, -1)).sum(-1).movedim(-1, 0))

    def of_squares(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        norms = torch.linalg.vector_norm(x.unflatten(-1, (self.count, -1)), dim=-1, dtype=dtype)
        return collectives.tree_sum(norms.square().movedim(-1, 0))

    def spread(self, weight: Tensor) -> Tensor:
        return self.section.by_part(weight, self.count).flatten()
