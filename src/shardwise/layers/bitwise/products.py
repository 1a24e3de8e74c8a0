"""Products of linear layers that are made of parts of fixed shape, which no layout changes by a bit.

A group with a `grain` of G ranks at most makes each sum over a dimension that it cuts of G parts. Each of its g ranks
computes G/g of them, with the shapes that one of G ranks would have, and the parts are added in one binary tree: first
those of a rank (`fold_products`), then those of the ranks (`collectives.tree_sum`).

Shapes per rank: P = G/g parts; T tokens; I input features; O output features; w features of a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group
from shardwise.layers.bitwise.part_products import (
    by_part,
    input_gradient_of_columns,
    multiply_parts,
    row_sums,
    sum_of_products,
    weight_gradient_of_columns,
    weight_gradient_of_rows,
)
from shardwise.layers.fp8 import GRADIENT, OPERAND, Scaling, rounded
from shardwise.layers.matmul import wrong_width

_ALONE = Group()  # over which nothing is gathered. A compiler cannot capture the making of a group


@dataclass(frozen=True)
class Section:
    """Rows of a column-parallel weight, one linear map, which bit-equal products cut into parts along the outputs."""

    rows: int
    repeats: int = 1  # parts of this rank that use the same rows, such as those of one key head
    copies: Group = field(default_factory=Group)  # ranks that hold the same rows

    def by_part(self, rows: Tensor, count: int) -> Tensor:
        """Return the rows `[rows, …]` of each of `count` parts, `[P, w, …]`."""
        by_rows: Tensor = rows.unflatten(0, (count // self.repeats, -1))
        return by_rows.repeat_interleave(self.repeats, dim=0) if self.repeats > 1 else by_rows

    def joined(self, gradients: Tensor) -> Tensor:
        """Return the gradient of the rows, `[rows, …]`, of those of the parts, `[P, w, …]`. Collective over copies."""
        if self.repeats > 1:
            gradients = collectives.tree_sum(gradients.unflatten(0, (-1, self.repeats)).transpose(0, 1))
        return collectives.all_reduce_(gradients.flatten(0, 1), self.copies)


def column_products(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sections: Sequence[Section],
    group: Group,
    scaling: Scaling | None = None,
    *,
    gathers: bool = False,
) -> tuple[Tensor, ...]:
    """Return the outputs of a column-parallel layer by section: x `[…, I]`, weight `[Σ rows, I]` → `[…, P·w]` each.

    The gradient of x is this rank's term of it, and those of rows with copies are complete. With `scaling` the operands
    of products are rounded to fp8, and multiplied in their own dtype. With `gathers` x is `[S/g, …]`, which is gathered
    in both passes, and its gradient is complete.
    """
    if x.shape[-1] != weight.shape[-1]:
        raise wrong_width(x, weight)
    gathered_over = group if gathers else _ALONE
    # Gradients are switched off within the function.
    trained = torch.is_grad_enabled()
    weight_scale = None if scaling is None else scaling.of_weight(weight)
    arguments = (x, weight, bias, tuple(sections), group.parts, trained, gathered_over, scaling, weight_scale)
    return cast(tuple[Tensor, ...], _ColumnProducts.apply(*arguments))  # type: ignore[no-untyped-call]


class _ColumnProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sections: tuple[Section, ...],
        count: int,
        trained: bool,
        gathered_over: Group,
        scaling: Scaling | None,
        weight_scale: Tensor | None,
    ) -> tuple[Tensor, ...]:
        if scaling is None or weight_scale is None:
            ctx.save_for_backward(x, weight)
        else:
            x = rounded(x, scaling.of_input(x), OPERAND)
            # As it was: ZeRO-3 frees it between the passes.
            ctx.save_for_backward(x, weight, weight_scale)
            weight = rounded(weight, weight_scale, OPERAND)
        ctx.scaling = scaling
        ctx.sections = sections
        ctx.count = count
        ctx.gathered_over = gathered_over
        x = collectives.all_gather(x, gathered_over)
        flat = x.reshape(-1, x.shape[-1])
        sizes = [section.rows for section in sections]
        biases = [None] * len(sections) if bias is None else bias.split(sizes)
        outputs = []
        for section, rows, section_bias in zip(sections, weight.split(sizes), biases, strict=True):
            y = multiply_parts(flat, rows, section_bias, count // section.repeats, trained=trained)
            if section.repeats > 1:
                y = y.unflatten(-1, (count // section.repeats, -1)).repeat_interleave(section.repeats, dim=1)
            outputs.append(y.reshape(*x.shape[:-1], -1))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *scales = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        count = ctx.count
        sections = ctx.sections
        group = ctx.gathered_over
        dy = _side_by_side([by_part(dy, count) for dy in grads], 2)
        unrounded = dy
        if ctx.scaling is not None:
            weight = rounded(weight, scales[0], OPERAND)
            dy = rounded(dy, ctx.scaling.of_gradient(dy), GRADIENT)
        pending: collectives.Pending | None = None
        dx = None
        dw = None
        db = None
        # x is gathered while its gradient is computed, which is summed while the others are computed.
        gathered = x.new_empty(group.size * len(x), *x.shape[1:]) if group.size > 1 else x
        gathering = collectives.all_gather_async(x.contiguous(), group, out=gathered) if needs_weight else None
        if needs_x:
            by_section = weight.split([section.rows for section in sections])
            parts = [section.by_part(rows, count) for section, rows in zip(sections, by_section, strict=True)]
            partial = sum_of_products([dy], [_side_by_side(parts, 1).transpose(1, 2)], count).view(gathered.shape)
            out = torch.empty_like(x) if group.size > 1 else partial
            pending = collectives.reduce_scatter_async(partial.contiguous(), group, out=out)
        if gathering is not None:
            gathering.wait()
            flat = gathered.reshape(-1, x.shape[-1])
            dw = _by_section(sections, weight_gradient_of_rows(dy.transpose(0, 1).flatten(1), flat, count), count)
        if needs_bias:
            db = _by_section(sections, row_sums(unrounded).flatten(), count)
        if pending is not None:
            dx = pending.wait()
        return dx, dw, db, None, None, None, None, None, None


def _side_by_side(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return the features of all sections along `dim`, part by part: `[P, T, w_k]` or `[P, w_k, I]` each."""
    if len(parts) == 1:
        return parts[0]
    # In memory the parts of a row are one after the other, so that one matmul can take all of them.
    order = (1, 0, 2) if dim == 2 else (0, 1, 2)
    return torch.cat([part.permute(order) for part in parts], dim).permute(order)


def _by_section(sections: Sequence[Section], gradients: Tensor, count: int) -> Tensor:
    """Return the gradient of all rows, section by section, of those of the parts, `[P·w, …]`."""
    widths = [section.rows * section.repeats // count for section in sections]
    by_section = []
    for section, gradient in zip(sections, gradients.unflatten(0, (count, -1)).split(widths, dim=1), strict=True):
        by_section.append(section.joined(gradient))
    return torch.cat(by_section) if len(by_section) > 1 else by_section[0]


def row_products(terms: Sequence[tuple[Tensor, Tensor]], group: Group, scaling: Scaling | None = None) -> Tensor:
    """Return this rank's term of `Σ_k X_k A_kᵀ` of row-parallel layers: x `[…, P·w]`, weight `[O, P·w]` → `[…, O]`.

    `scaling`: as in `column_products`.
    """
    for x, weight in terms:
        if x.shape[-1] != weight.shape[-1]:
            raise wrong_width(x, weight)
    xs, weights = zip(*terms, strict=True)
    scales = [] if scaling is None else [scaling.of_weight(weight) for weight in weights]
    arguments = (group.parts, torch.is_grad_enabled(), scaling, len(terms), *xs, *weights, *scales)
    return cast(Tensor, _RowProducts.apply(*arguments))  # type: ignore[no-untyped-call]


class _RowProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        # Without gradients torch 2.13, traced, drops ctx where the arguments are as many as the parameters but ctx.
        count, trained, scaling, terms, *tensors = arguments
        xs = tensors[:terms]
        weights = tensors[terms : 2 * terms]
        scales = tensors[2 * terms :]
        if scaling is not None:
            xs = [rounded(x, scaling.of_input(x), OPERAND) for x in xs]
        ctx.save_for_backward(*xs, *weights, *scales)
        ctx.count = count
        ctx.scaling = scaling
        ctx.terms = terms
        weights = _rounded_weights(weights, scales)
        operands = [by_part(tensor, count) for tensor in (*xs, *weights)]
        y = sum_of_products(operands[:terms], operands[terms:], count, trained=trained)
        return y.view(*tensors[0].shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = ctx.count
        # Read once: where blocks are recomputed, each reading would compute them again.
        tensors = ctx.saved_tensors
        terms = ctx.terms
        xs = tensors[:terms]
        weights = _rounded_weights(tensors[terms : 2 * terms], tensors[2 * terms :])
        dy = grads[0].reshape(-1, grads[0].shape[-1])
        if ctx.scaling is not None:
            dy = rounded(dy, ctx.scaling.of_gradient(dy), GRADIENT)
        dxs: list[Tensor | None] = [None] * terms
        dws: list[Tensor | None] = [None] * terms
        for term, (x, weight) in enumerate(zip(xs, weights, strict=True)):
            if ctx.needs_input_grad[4 + term]:
                dxs[term] = input_gradient_of_columns(dy, weight, count).view(x.shape)
            if ctx.needs_input_grad[4 + terms + term]:
                dws[term] = weight_gradient_of_columns(dy, x.reshape(-1, x.shape[-1]), count)
        return None, None, None, None, *dxs, *dws, *[None] * (len(tensors) - 2 * terms)


def _rounded_weights(weights: Sequence[Tensor], scales: Sequence[Tensor]) -> list[Tensor]:
    if not scales:
        return list(weights)
    return [rounded(weight, scale, OPERAND) for weight, scale in zip(weights, scales, strict=True)]
