"""Bit-equal norms: gradients of weights are added in the tree of parts of the sequence, or of the heads."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.distributed import collectives
from shardwise.distributed.placement import of_or_whole
from shardwise.layers.bitwise.part_products import by_part, row_sums
from shardwise.layers.bitwise.products import Section
from shardwise.layers.bitwise.replicated import apply_by_part, apply_by_sequence_part, part_views, sequence_parts
from shardwise.layers.norm import (
    LayerNorm,
    QueryKeyNorm,
    RMSNorm,
    RMSNormOnCPU,
    factor,
    has_kernel,
    rms_norm,
    rms_norm_gradients,
)


class BitEqualRMSNorm(RMSNorm):
    """Normalises each part of the sequence by itself, or all at once where torch has no kernel."""

    def forward(self, x: Tensor) -> Tensor:
        is_cut = self.sequence_parallel_enabled
        weight = factor(self.weight, unit_offset=self.unit_offset)
        if has_kernel(x, weight):
            norm = partial(rms_norm, eps=self.eps)
            return apply_by_sequence_part(norm, x, [weight], self.group, sequence_parallel=is_cut)
        if is_cut:
            (weight,) = part_views(weight, 1, self.group)
        count = sequence_parts(x, self.group, is_cut)
        return cast(Tensor, _RMSNormByPart.apply(x, weight, self.eps, count))  # type: ignore[no-untyped-call]


class _RMSNormByPart(torch.autograd.Function):
    """`RMSNormOnCPU` whose sums are made of `count` parts of x along dim 0, each with the bits that it has alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, count: int) -> Tensor:
        ctx.count = count
        return RMSNormOnCPU.forward(ctx, x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = ctx.count

        def over_tokens(terms: Tensor) -> Tensor:
            return collectives.tree_sum(row_sums(terms.reshape(count, -1, terms.shape[-1])))

        def times(terms: Tensor, weight: Tensor) -> Tensor:
            return torch.cat([part @ weight for part in terms.chunk(count)])

        return *rms_norm_gradients(ctx, grads[0], over_tokens, times), None, None


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

        weight = factor(weight, unit_offset=self.unit_offset)
        return apply_by_part(norm, x, [weight], self.group.parts, self.group, dim=-2)

    def _norm_all_heads(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self._norm_together(query, key)

    def _sum_of_squares(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        norms = torch.linalg.vector_norm(x.unflatten(-1, (self.group.parts, -1)), dim=-1, dtype=dtype)
        return collectives.tree_sum(norms.square().movedim(-1, 0))

    def _scale(self, x: Tensor, name: str, inverse: Tensor) -> Tensor:
        weight = getattr(self, name)
        section = Section(len(weight), x.shape[-1] // len(weight), self._copies[name])
        return cast(Tensor, _ScaleByPart.apply(x, weight, inverse, section, self.group.parts))  # type: ignore[no-untyped-call]


class _ScaleByPart(torch.autograd.Function):
    """`x · inverse · weight`, whose gradients are sums of parts: x `[…, P·w]`, inverse `[…]` in at least float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, inverse: Tensor, section: Section, count: int) -> Tensor:
        ctx.save_for_backward(x, weight, inverse)
        ctx.section = section
        ctx.count = count
        return (x * inverse.unsqueeze(-1)).mul_(section.by_part(weight, count).flatten()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        dy = grads[0].to(inverse.dtype)
        dx = None
        dw = None
        d_inverse = None
        if ctx.needs_input_grad[1]:
            terms = (dy * x).mul_(inverse.unsqueeze(-1))
            dw = ctx.section.joined(row_sums(by_part(terms, ctx.count))).to(weight.dtype)
        # `inverse` is a function of x alone: where x needs no gradient, it needs none.
        if ctx.needs_input_grad[0]:
            scaled = dy * ctx.section.by_part(weight, ctx.count).flatten()
            d_inverse = collectives.tree_sum((scaled * x).unflatten(-1, (ctx.count, -1)).sum(-1).movedim(-1, 0))
            dx = scaled.mul_(inverse.unsqueeze(-1)).to(x.dtype)
        return dx, dw, d_inverse, None, None
