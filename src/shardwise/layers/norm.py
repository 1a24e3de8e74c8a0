"""Normalisation over the hidden dimension, replicated in a tensor-parallel group, and of the heads that a rank has.

Under sequence parallelism each rank normalises its part of the sequence: the weight's gradient is then partial over
the group, which its placement says, so that the optimizer sums it once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.base.errors import ArgumentError
from shardwise.distributed import collectives, placement
from shardwise.distributed.placement import Init
from shardwise.layers.arguments import layer_sizes
from shardwise.layers.bitwise import choose_class
from shardwise.layers.linear import LayerOptions, ParameterMaker


class _Norm(placement.PlacedModule):
    """A norm over the last dim, whose parameters are whole on every rank.

    Args:
        leaves: initial value of each parameter, by its name.
        options: keyword arguments of the call.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float,
        sequence_parallel_enabled: bool,
        name: str | None,
        leaves: dict[str, float],
        options: LayerOptions,
    ) -> None:
        super().__init__()
        maker = ParameterMaker(self, options, warns=sequence_parallel_enabled)
        problem = (
            f"normalized_shape ({normalized_shape!r}) must be one size, the hidden size: the last dim is normalized"
        )
        self.normalized_shape = layer_sizes(normalized_shape, 1, problem)
        self.eps = eps
        self.group = maker.group
        self.sequence_parallel_enabled = sequence_parallel_enabled
        for leaf, value in leaves.items():
            shape = self.normalized_shape
            piece = placement.Piece.replicated(
                maker.name(name, leaf), shape, maker.group, Init.constant(value), partial=sequence_parallel_enabled
            )
            self.register_parameter(leaf, maker.parameter(shape, piece))
        choose_class(self)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape[0]}, eps={self.eps}"


class RMSNorm(_Norm):
    """`y = x / sqrt(mean(x²) + eps) · weight` (arXiv:1910.07467). x, y: `[…, H]`; no communication.

    Args:
        normalized_shape: H, or a shape of this one size, as torch takes it.
        eps: number added to the mean square.
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
        *,
        sequence_parallel_enabled: bool = False,
        unit_offset: bool = False,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        leaves = {"weight": 0.0 if unit_offset else 1.0}
        super().__init__(normalized_shape, eps, sequence_parallel_enabled, name, leaves, options)
        self.unit_offset = unit_offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, one_more(self.weight) if self.unit_offset else self.weight, self.eps)


def one_more(weight: Tensor) -> Tensor:
    """Return 1 + weight, at least in float32, as bfloat16 would round it."""
    return 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32))


class Sums:
    """The sums in which a norm is computed, over its width W, and in which the gradient of its weight is."""

    def over_tokens(self, terms: Tensor) -> Tensor:
        """`[…, W]` → `[W]`."""
        return terms.reshape(-1, terms.shape[-1]).sum(0)

    def over_width(self, terms: Tensor) -> Tensor:
        """`[…, W]` → `[…]`."""
        return terms.sum(-1)

    def of_squares(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`[…, W]` → the sums of squares over the width, `[…]` in a dtype."""
        norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=dtype)
        return norms.square()

    def products(self, terms: Tensor, weight: Tensor) -> Tensor:
        """`[…, W]`, `[W]` → the sums of products over the width, `[…]`."""
        return terms @ weight

    def spread(self, weight: Tensor) -> Tensor:
        """Return the weight of each element of x, where a rank's heads share weights."""
        return weight


_SUMS = Sums()


def rms_norm(x: Tensor, weight: Tensor, eps: float, sums: Sums = _SUMS) -> Tensor:
    """Return the norm of x; torch's own kernels have no use for `sums`."""
    if weight.dtype != x.dtype:
        return rms_norm(x.to(weight.dtype), weight, eps, sums).to(x.dtype)
    if has_kernel(x, weight):
        return F.rms_norm(x, weight.shape, weight, eps)
    return cast(Tensor, _RMSNorm.apply(x, weight, eps, sums))  # type: ignore[no-untyped-call]


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch has a kernel for the norm of x."""
    # Accelerators have a kernel, and the compiler makes one. Shorter dtypes torch computes in float32.
    is_float32 = x.dtype == weight.dtype == torch.float32
    return x.device.type != "cpu" or torch.compiler.is_compiling() or not is_float32


class _RMSNorm(torch.autograd.Function):
    """RMSNorm where torch has no kernel for it and would keep x and the normalised x: this keeps x and 1/rms.

    With r = 1 / sqrt(mean(x²) + eps) and u = x·r: dx = r·(dy·w - u·mean(dy·w·u)), dw = Σ dy·u.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, sums: Sums) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.eps = eps
        ctx.sums = sums
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
        dw = ctx.sums.over_tokens(dy_unit) if ctx.needs_input_grad[1] else None
        dx = None
        if ctx.needs_input_grad[0]:
            mean = ctx.sums.products(dy_unit, weight).div_(x.shape[-1]).unsqueeze(-1)
            dx = (dy * weight).addcmul_(unit, mean, value=-1).mul_(inverse)
        return dx, dw, None, None


class LayerNorm(_Norm):
    """`y = (x - mean) / sqrt(var + eps) · weight + bias` (arXiv:1607.06450). x, y: `[…, H]`; no communication.

    Args:
        normalized_shape, sequence_parallel_enabled, name, options: as in `RMSNorm`.
        eps: number added to the variance.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        sequence_parallel_enabled: bool = False,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(normalized_shape, eps, sequence_parallel_enabled, name, {"weight": 1.0, "bias": 0.0}, options)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class QueryKeyNorm(placement.PlacedModule):
    """Layer of RMSNorm (arXiv:1910.07467) for queries and keys before attention (arXiv:2302.05442 §2).

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
        choose_class(self)

    def _weight(self, maker: ParameterMaker, name: str, size: int, head_dim: int) -> nn.Parameter:
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
        query, key = self._norm_all_heads(query, key)
        return query.view(q.shape), key.view(k.shape)

    def _norm_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, one_more(weight) if self.unit_offset else weight, self.eps)

    def _norm_all_heads(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.group.size > 1:
            return self._norm_together(query, key)
        return rms_norm(query, self.query_weight, self.eps), rms_norm(key, self.key_weight, self.eps)

    def _norm_together(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        # Squares of bfloat16 are summed in float32; float64 keeps its precision.
        exact = torch.promote_types(query.dtype, torch.float32)
        query_sums = self._sums("query_weight", query)
        key_sums = self._sums("key_weight", key)
        squares = [query_sums.of_squares(query, exact), key_sums.of_squares(key, exact)]
        totals = collectives.reduce_from_group(torch.stack(squares), self.group)
        inverses = []
        for x, total in zip((query, key), totals, strict=True):
            # A head that several ranks or parts have counts once for each of them, in both numbers.
            elements = x.shape[-1] * self.group.size
            inverses.append((total / elements + self.eps).rsqrt())
        # Each rank uses the inverse for its own heads: its gradient is summed before it is multiplied any further.
        query_inverse, key_inverse = collectives.copy_to_group(torch.stack(inverses), self.group)
        query = _Scale.apply(query, self.query_weight, query_inverse, query_sums)  # type: ignore[no-untyped-call]
        key = _Scale.apply(key, self.key_weight, key_inverse, key_sums)  # type: ignore[no-untyped-call]
        return query, key

    def _sums(self, name: str, x: Tensor) -> Sums:
        """Return the sums over all heads of x, whose weight has this name."""
        return _SUMS

    def extra_repr(self) -> str:
        return f"{self.over}, {len(self.query_weight)} and {len(self.key_weight)} of {self.group}, eps={self.eps}"


class _Scale(torch.autograd.Function):
    """`x · inverse · weight` with x `[…, W]`, inverse `[…]` in at least float32. Only these are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, inverse: Tensor, sums: Sums) -> Tensor:
        ctx.save_for_backward(x, weight, inverse)
        ctx.sums = sums
        return (x * inverse.unsqueeze(-1)).mul_(sums.spread(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        dy = grads[0].to(inverse.dtype)
        dx = None
        dw = None
        d_inverse = None
        if ctx.needs_input_grad[1]:
            dw = ctx.sums.over_tokens((dy * x).mul_(inverse.unsqueeze(-1))).to(weight.dtype)
        # `inverse` is a function of x alone: where x needs no gradient, it needs none.
        if ctx.needs_input_grad[0]:
            scaled = dy * ctx.sums.spread(weight)
            d_inverse = ctx.sums.over_width(scaled * x)
            dx = scaled.mul_(inverse.unsqueeze(-1)).to(x.dtype)
        return dx, dw, d_inverse, None
