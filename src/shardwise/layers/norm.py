"""Normalisation over the hidden dimension, replicated in a tensor-parallel group, and of the heads that a rank has.

Under sequence parallelism each rank normalises its part of the sequence: the weight's gradient is then partial over
the group, which its placement says, so that the optimizer sums it once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.base.errors import ArgumentError
from shardwise.distributed import collectives, placement
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import Init, of_or_whole
from shardwise.layers.arguments import by_name
from shardwise.layers.linear import LayerOptions, ParameterMaker
from shardwise.layers.part_products import by_part, row_sums
from shardwise.layers.parts import Section, apply_by_part, apply_by_sequence_part, sequence_parts
from shardwise.layers.replicated import part_views


def _one_size(owner: str, shape: object) -> int:
    """Return the hidden size that a norm was given, by itself or as a shape of one size.

    Raises:
        ArgumentError: it is neither.
    """
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if len(sizes) != 1 or not isinstance(sizes[0], Integral):
        raise ArgumentError(
            f"normalized_shape ({shape!r}) must be one size, the hidden size: {owner} normalizes over the last dim"
        )
    return int(sizes[0])


class _Norm(placement.PlacedModule):
    """A norm over the last dim, whose parameters are whole on every rank.

    Args:
        leaves: initial value of each parameter, by its name.
        given: keyword arguments of the call.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float,
        sequence_parallel_enabled: bool,
        name: str | None,
        leaves: dict[str, float],
        given: Mapping[str, object],
    ) -> None:
        super().__init__()
        # torch's norms take `bias`; here it changes nothing if it is true for a norm with a bias, or false for another.
        has_bias = "bias" in leaves
        options = cast(LayerOptions, {key: value for key, value in given.items() if (key, value) != ("bias", has_bias)})
        maker = ParameterMaker(self, options, warns=sequence_parallel_enabled)
        self.normalized_shape = (_one_size(type(self).__name__, normalized_shape),)
        self.eps = eps
        self.group = maker.group
        self.sequence_parallel_enabled = sequence_parallel_enabled
        for leaf, value in leaves.items():
            shape = self.normalized_shape
            piece = placement.Piece.replicated(
                maker.name(name, leaf), shape, maker.group, Init.constant(value), partial=sequence_parallel_enabled
            )
            self.register_parameter(leaf, maker.parameter(shape, piece))

    def extra_repr(self) -> str:
        return f"{self.normalized_shape[0]}, eps={self.eps}"


class RMSNorm(_Norm):
    """`y = x / sqrt(mean(x²) + eps) · weight` (arXiv:1910.07467). x, y: `[…, H]`; no communication.

    Args:
        normalized_shape: H, or a shape of this one size, as torch takes it.
        eps: number added to the mean square.
        further: none; all other arguments are given by keyword.
        sequence_parallel_enabled: true if each rank has a part of the sequence; the gradients are then partial.
        unit_offset: true if 1 + weight takes the weight's place, which is 0 at first.
        name: canonical name of the layer, without `.weight`.
        options: see `LayerOptions`.
    """

    weight: nn.Parameter

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        *further: Any,
        sequence_parallel_enabled: bool = False,
        unit_offset: bool = False,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        # torch and neuronx-distributed mean different things by a third positional argument.
        given = by_name(type(self).__name__, further, (), options, last="eps")
        leaves = {"weight": 0.0 if unit_offset else 1.0}
        super().__init__(normalized_shape, eps, sequence_parallel_enabled, name, leaves, given)
        self.unit_offset = unit_offset

    def forward(self, x: Tensor) -> Tensor:
        sequence_parallel = self.sequence_parallel_enabled
        weight = _factor(self.weight, unit_offset=self.unit_offset)
        if self.group.grain is not None and _has_kernel(x, weight):

            def norm(part: Tensor, weight: Tensor) -> Tensor:
                return _rms_norm(part, weight, self.eps)

            return apply_by_sequence_part(norm, x, [weight], self.group, sequence_parallel=sequence_parallel)
        if self.group.grain is not None and sequence_parallel:
            (weight,) = part_views(weight, 1, self.group)
        return _rms_norm(x, weight, self.eps, sequence_parts(x, self.group, sequence_parallel))


def _factor(weight: Tensor, *, unit_offset: bool) -> Tensor:
    """Return what a normalised x is multiplied with; 1 + weight at least in float32, as bfloat16 would round it."""
    return 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32)) if unit_offset else weight


def _rms_norm(x: Tensor, weight: Tensor, eps: float, parts: int = 1) -> Tensor:
    """Return the norm of x; where torch has no kernel for it, see `_RMSNorm` for `parts`."""
    if weight.dtype != x.dtype:
        return _rms_norm(x.to(weight.dtype), weight, eps, parts).to(x.dtype)
    if _has_kernel(x, weight):
        return F.rms_norm(x, weight.shape, weight, eps)
    return cast(Tensor, _RMSNorm.apply(x, weight, eps, parts))  # type: ignore[no-untyped-call]


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    # Accelerators have a kernel, and the compiler makes one. Shorter dtypes torch computes in float32.
    is_float32 = x.dtype == weight.dtype == torch.float32
    return x.device.type != "cpu" or torch.compiler.is_compiling() or not is_float32


class _RMSNorm(torch.autograd.Function):
    """RMSNorm where torch has no kernel for it and would keep x and the normalised x: this keeps x and 1/rms.

    With r = 1 / sqrt(mean(x²) + eps) and u = x·r: dx = r·(dy·w - u·mean(dy·w·u)), dw = Σ dy·u.

    Sums are made of `parts` of x along dim 0, each with the bits that it has alone.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, parts: int) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.eps = eps
        ctx.parts = parts
        y: Tensor = (x * inverse).mul_(weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            # This gradient is differentiated again, and the saved tensor is no function of x.
            inverse = x.square().mean(dim=-1, keepdim=True).add(ctx.eps).rsqrt()
        dy = grads[0]
        unit = x * inverse
        dy_unit = dy * unit
        dw = None
        if ctx.needs_input_grad[1]:
            dw = collectives.tree_sum(row_sums(dy_unit.reshape(ctx.parts, -1, x.shape[-1])))
        dx = None
        if ctx.needs_input_grad[0]:
            # Σ dy·u·w over the width, as one product of a matrix and a vector for each part.
            mean = torch.cat([part @ weight for part in dy_unit.chunk(ctx.parts)]).div_(x.shape[-1]).unsqueeze(-1)
            dx = (dy * weight).addcmul_(unit, mean, value=-1).mul_(inverse)
        return dx, dw, None, None


class LayerNorm(_Norm):
    """`y = (x - mean) / sqrt(var + eps) · weight + bias` (arXiv:1607.06450). x, y: `[…, H]`; no communication.

    Args:
        normalized_shape: H, or a shape of this one size, as torch takes it.
        eps: number added to the variance.
        further: torch's next positional arguments: `elementwise_affine` and `bias`, which must be True, `device` and
            `dtype`.
        sequence_parallel_enabled: true if each rank has a part of the sequence; the gradients are then partial.
        name: canonical name of the layer, without `.weight`.
        options: see `LayerOptions`.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *further: Any,
        sequence_parallel_enabled: bool = False,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        given = by_name(type(self).__name__, further, ("elementwise_affine", "bias", "device", "dtype"), options)
        super().__init__(normalized_shape, eps, sequence_parallel_enabled, name, {"weight": 1.0, "bias": 0.0}, given)

    def forward(self, x: Tensor) -> Tensor:
        def norm(part: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.layer_norm(part, self.normalized_shape, weight, bias, self.eps)

        return apply_by_sequence_part(
            norm, x, [self.weight, self.bias], self.group, sequence_parallel=self.sequence_parallel_enabled
        )


class QueryKeyNorm(placement.PlacedModule):
    """RMSNorm (arXiv:1910.07467) of queries and keys before attention (arXiv:2302.05442 §2).

    Forward: q `[S, B, n, d]` and k `[S, B, m, d]`, the heads that this rank has → the same shapes, normalised.

    Args:
        sizes: widths n·d of the queries and m·d of the keys in the whole model.
        eps: number added to the mean square.
        head_dim: d.
        over: elements that are normalised together. `head`: each head by itself, with weights `[d]` that are whole on
            every rank. A rank sees only its own heads, so that the gradients are partial over the group, with and
            without sequence parallelism; no communication. `all_heads`: all heads of a token, with weights `[n·d]` and
            `[m·d]` that are cut as the rows of the projections are, with copies of key heads where ranks share one.
            Communicates an all-reduce of the sums of squares, `[2, S, B]` in float32, forward, and one of their
            gradients.
        names: canonical names of the two layers, without `.weight`.
        unit_offset: as in `RMSNorm`; with `head` alone.
        options: see `LayerOptions`.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        eps: float,
        *,
        head_dim: int,
        over: Literal["head", "all_heads"],
        names: tuple[str, str],
        unit_offset: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        if unit_offset and over != "head":
            raise ArgumentError(f'over ({over!r}) must be "head" with unit_offset')
        self.unit_offset = unit_offset
        maker = ParameterMaker(self, options, warns=False)
        self.group = maker.group
        self.eps = eps
        self.over = over
        self.query_weight = self._weight(maker, names[0], sizes[0], head_dim)
        self.key_weight = self._weight(maker, names[1], sizes[1], head_dim)
        # The ranks with the same queries' weights, and keys': a view has no record of them, and no graph makes a group.
        has_parts = self.group.grain is not None
        self._copies = [of_or_whole(w).pieces[0].copies if has_parts else Group() for w in self.parameters()]

    def _weight(self, maker: ParameterMaker, name: str, size: int, head_dim: int) -> nn.Parameter:
        """Make the weight of the queries or of the keys."""
        full = maker.name(name, "weight")
        init = Init.constant(0.0 if self.unit_offset else 1.0)
        if self.over == "head":
            piece = placement.Piece.replicated(full, (head_dim,), self.group, init, partial=True)
        else:
            # Ranks that share each head, where they outnumber the heads.
            copies = max(self.group.size * head_dim // size, 1)
            piece = placement.Piece.rows(full, (size,), self.group, init, copies=copies)
        return maker.parameter(piece.box.size, piece)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.over == "head":
            return self._norm_heads(q, self.query_weight), self._norm_heads(k, self.key_weight)
        query = q.flatten(-2)
        key = k.flatten(-2)
        if self.group.size == 1 and self.group.grain is None:
            query = _rms_norm(query, self.query_weight, self.eps)
            key = _rms_norm(key, self.key_weight, self.eps)
        else:
            query, key = self._norm_together(query, key)
        return query.view(q.shape), key.view(k.shape)

    def _norm_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise each head by itself."""

        def norm(part: Tensor, shared: Tensor) -> Tensor:
            return _rms_norm(part.contiguous(), shared, self.eps)

        weight = _factor(weight, unit_offset=self.unit_offset)
        if self.group.grain is None:
            return _rms_norm(x, weight, self.eps)
        return apply_by_part(norm, x, [weight], self.group.parts, self.group, dim=-2)

    def _norm_together(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise over the heads of all ranks."""
        # Squares of bfloat16 are summed in float32; float64 keeps its precision.
        exact = torch.promote_types(query.dtype, torch.float32)
        squares = [self._sum_of_squares(x, exact) for x in (query, key)]
        totals = collectives.reduce_from_group(torch.stack(squares), self.group)
        inverses = []
        for x, total in zip((query, key), totals, strict=True):
            # A head that several ranks or parts have counts once for each of them, in both numbers.
            elements = x.shape[-1] * self.group.size
            inverses.append((total / elements + self.eps).rsqrt())
        # Each rank uses the inverse for its own heads: its gradient is summed before it is multiplied any further.
        query_inverse, key_inverse = collectives.copy_to_group(torch.stack(inverses), self.group)
        query_copies, key_copies = self._copies
        query = self._scale(query, self.query_weight, query_inverse, query_copies)
        return query, self._scale(key, self.key_weight, key_inverse, key_copies)

    def _sum_of_squares(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        norms = torch.linalg.vector_norm(x.unflatten(-1, (self.group.parts, -1)), dim=-1, dtype=dtype)
        return collectives.tree_sum(norms.square().movedim(-1, 0))

    def _scale(self, x: Tensor, weight: Tensor, inverse: Tensor, copies: Group) -> Tensor:
        """Multiply x by `inverse`, 1 / the root mean square of all heads, and by the weight."""
        section = Section(len(weight), x.shape[-1] // len(weight), copies)
        return cast(Tensor, _Scale.apply(x, weight, inverse, section, self.group.parts))  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return f"{self.over}, {len(self.query_weight)} and {len(self.key_weight)} of {self.group}, eps={self.eps}"


class _Scale(torch.autograd.Function):
    """`x · inverse · weight` with x `[…, W]`, weight `[W]`, inverse `[…]` in at least float32. Only these are kept."""

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
