"""The bit-equal layers and losses: products and sums of a part are made by themselves, and added in the tree of parts.

With a grain of 1 nothing is cut: products are those of the ordinary layers.

A product of an expert has the rows of one micro-batch of one data-parallel rank, and one part of the width, at every
layout. Where ranks divide the experts, the rows of each rank are multiplied by themselves, and the gradients that a
rank's rows give add up by themselves until the step's end (`placement.FurtherGradient`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.config import BITWISE
from shardwise.distributed import collectives, placement
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import of_or_whole
from shardwise.layers.bitwise.part_products import (
    by_part,
    multiply_parts,
    row_sums,
    sum_of_products,
    weight_gradient_of_rows,
)
from shardwise.layers.bitwise.products import Section, column_products, row_products
from shardwise.layers.bitwise.replicated import (
    SequenceParts,
    apply_by_part,
    apply_by_sequence_part,
    part_views,
    sequence_parts,
)
from shardwise.layers.embedding import (
    ParallelEmbedding,
    ParallelLMHead,
    ReplicatedEmbedding,
    add_head_leaf,
    head_leaf,
)
from shardwise.layers.expert_rows import Journey, weighted_sums
from shardwise.layers.experts import Experts, Router
from shardwise.layers.linear import RowParallelLinear, _ColumnParallel, scaling_in_training
from shardwise.layers.loss import VocabularyShard
from shardwise.layers.norm import LayerNorm, QueryKeyNorm, RMSNorm, Sums, has_kernel, one_more, rms_norm


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


class BitEqualRouter(Router):
    """Chooses for each part of the sequence by itself."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        is_cut = self.sequence_parallel_enabled
        count = sequence_parts(x, self.group, is_cut)
        views = part_views(self.weight, count, self.group if is_cut else None)
        parts = [self._route(part, weight) for part, weight in zip(x.chunk(count), views, strict=True)]
        return tuple(map(torch.cat, zip(*parts, strict=True)))


class BitEqualExperts(Experts):
    """Multiplies the rows of each rank, and each part of the width, by themselves."""

    def prepare(self) -> None:
        for parameter in (self.gate_up, self.down):
            placement.add_further_gradients(parameter, self.ranks.group.size - 1)

    def _sum(self, x: Tensor, weights: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
        journey = Journey.of(experts, counts, self.ranks.group, once=False)
        if len(placement.further_gradients(self.gate_up)) != self.ranks.group.size - 1:
            raise RuntimeError(
                f"a layer of experts with {BITWISE} was copied, without the gradients that it keeps: "
                "build another layer and load the state_dict of this one"
            )
        gate_up, down = (
            [view.unflatten(0, (self.count, -1)) for view in _by_source(parameter)]
            for parameter in (self.gate_up, self.down)
        )
        arrived = journey.tokens_there(x, self.group.parts)
        weights, experts = journey.choices_there(weights)
        sources = torch.tensor([self.count * source for source in range(len(gate_up))], device=x.device)
        experts += sources.repeat_interleave(torch.tensor(journey.arriving, device=x.device))[:, None]
        return journey.sums_back(weighted_sums(arrived, weights, experts, gate_up, down))


def _by_source(parameter: nn.Parameter) -> tuple[Tensor, ...]:
    """Return a view of a parameter for the rows of each of the ranks that divide the experts."""
    further = placement.further_gradients(parameter)
    return cast(tuple[Tensor, ...], _Views.apply(parameter, further))  # type: ignore[no-untyped-call]


class _Views(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, further: Sequence[placement.FurtherGradient]) -> tuple[Tensor, ...]:
        ctx.further = further
        return tuple(parameter.view_as(parameter) for _ in range(1 + len(further)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        for gradient, of_source in zip(ctx.further, grads[1:], strict=True):
            gradient.add(of_source)
        return grads[0], None
