"""Matmuls of which a layout computes more or fewer parts, with the bits that one of G ranks would get for its part.

A kernel chooses the order of its sums by the shapes and strides of its operands: a product of two parts at once, or of
a part that is a slice of a wider tensor, may differ from the product of the part alone in the last bit. Each function
here has an *exact* form, a product for each part of operands that lie as they would on one of G ranks, and a faster
one. The faster form is used for the shapes for which it gave the bits of the exact form on random operands. Results in
bfloat16 always have the exact form: they are rounded from float32, and so hide another order of a sum in nearly all
elements, which no short trial finds.

Shapes: P parts; T tokens; I and O features; w features of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from shardwise.distributed.torch_private import has_data, onednn_linear
from shardwise.layers.matmul import by_onednn, linear, weight_gradient_in_runs, writes_in_place


def fold_products(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of products of parts, a power of two of them, in the order of `tree_sum`; overwrites them.

    At most 1 + log2 of their number are held at once.
    """
    sums: list[tuple[int, Tensor]] = []
    for part in parts:
        level = 0
        total = part
        while sums and sums[-1][0] == level:
            total = sums.pop()[1].add_(total)
            level += 1
        sums.append((level, total))
    return sums[0][1]


def by_part(x: Tensor, count: int) -> Tensor:
    """Return views of the parts of the last dim: `[…, P·w]` → `[P, T, w]`."""
    flat: Tensor = x.reshape(-1, x.shape[-1])
    parts: Tensor = flat.unflatten(-1, (count, -1)).transpose(0, 1)
    return parts


def alone(part: Tensor) -> Tensor:
    """Return a matrix as it would lie without the other parts: a slice of columns is copied."""
    is_dense = part.is_contiguous() or part.t().is_contiguous()
    return part if is_dense else part.contiguous()


_Form = Callable[..., Tensor]
_COMPARED_ELEMENTS = 256
"""Least number of random results that two forms must have in common. Another order of a sum shows in some of many
elements, whatever the values; a single small result may be equal by chance."""


_Shapes = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]
_has_equal_bits: dict[tuple[_Form, _Form, int, _Shapes, int], bool] = {}
"""Results of trials, by the exact form, the other one, the parts, the operands' shapes and the threads."""


def _in_faster_form(faster: _Form, exact: _Form, count: int, *operands: Tensor, tries: bool = True) -> Tensor:
    """Return what the faster form gives if it has the bits of the exact one, else what that gives.

    Without `tries` it is used only if it was tried before, for the same shapes.
    """
    shows_order = operands[0].dtype in (torch.float32, torch.float64)
    if not shows_order or torch.compiler.is_compiling() or not all(map(has_data, operands)):
        return exact(count, *operands)
    shapes = tuple((x.shape, x.stride(), x.dtype, x.device) for x in operands)
    trial = (exact, faster, count, shapes, torch.get_num_threads())
    if tries and trial not in _has_equal_bits:
        _has_equal_bits[trial] = _has_bits_of(exact, faster, count, shapes)
    return faster(count, *operands) if _has_equal_bits.get(trial, False) else exact(count, *operands)


def _product(at_once: _Form, by_part: _Form, count: int, *operands: Tensor, tries: bool = True) -> Tensor:
    return at_once(count, *operands) if count == 1 else _in_faster_form(at_once, by_part, count, *operands, tries=tries)


def _has_bits_of(exact: _Form, form: _Form, count: int, shapes: _Shapes) -> bool:
    """Return whether two forms give equal bits for random operands of these shapes and strides."""
    generator = torch.Generator(shapes[0][3]).manual_seed(0)
    compared = 0
    while compared < _COMPARED_ELEMENTS:
        operands = []
        for shape, stride, dtype, device in shapes:
            operands.append(torch.empty_strided(shape, stride, dtype=dtype, device=device).normal_(generator=generator))
        exact_result = exact(count, *operands)
        if not torch.equal(form(count, *operands), exact_result):
            return False
        compared += exact_result.numel() or _COMPARED_ELEMENTS
    return True


# ---- parts of the outputs, which are rows of the weight, or of the inputs, which are its columns


def multiply_parts(x: Tensor, weight: Tensor, bias: Tensor | None, count: int, *, trained: bool = True) -> Tensor:
    """Return `x weightᵀ + bias` by parts of the rows: x `[T, I]`, weight `[P·w, I]` → `[T, P·w]`.

    A training has few numbers of tokens. Without `trained`, where texts of any length come, no form is tried.
    """
    biases = () if bias is None else (bias,)
    return _product(_outputs_at_once, _outputs_by_part, count, x, weight, *biases, tries=trained)


def _outputs_at_once(_count: int, x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
    return linear(x, weight, *bias)


def _outputs_by_part(count: int, x: Tensor, *rows: Tensor) -> Tensor:
    parts = zip(*(tensor.chunk(count) for tensor in rows), strict=True)
    return torch.cat([linear(x, *part) for part in parts], dim=-1)


def weight_gradient_of_rows(dy: Tensor, x: Tensor, count: int) -> Tensor:
    """Return `dyᵀ x` by parts of dy's features: dy `[T, P·w]`, x `[T, I]` → `[P·w, I]`."""
    return _product(_gradient_at_once, _rows_by_part, count, dy, x)


def weight_gradient_of_columns(dy: Tensor, x: Tensor, count: int) -> Tensor:
    """Return `dyᵀ x` by parts of x's features: dy `[T, O]`, x `[T, P·w]` → `[O, P·w]`."""
    return _product(_gradient_at_once, _columns_by_part, count, dy, x)


def _gradient_at_once(_count: int, dy: Tensor, x: Tensor) -> Tensor:
    return weight_gradient_in_runs(dy, x)


def _rows_by_part(count: int, dy: Tensor, x: Tensor) -> Tensor:
    return torch.cat([weight_gradient_in_runs(alone(part), x) for part in dy.chunk(count, dim=1)])


def _columns_by_part(count: int, dy: Tensor, x: Tensor) -> Tensor:
    return torch.cat([weight_gradient_in_runs(dy, alone(part)) for part in x.chunk(count, dim=1)], dim=1)


def input_gradient_of_columns(dy: Tensor, weight: Tensor, count: int) -> Tensor:
    """Return `dy weight` by parts of the columns: dy `[T, O]`, weight `[O, P·w]` → `[T, P·w]`."""
    return _product(_inputs_at_once, _inputs_by_part, count, dy, weight)


def _inputs_at_once(_count: int, dy: Tensor, weight: Tensor) -> Tensor:
    return linear(dy, weight.t())


def _inputs_by_part(count: int, dy: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([linear(dy, alone(part).t()) for part in weight.chunk(count, dim=1)], dim=1)


# ---- sums over parts


def sum_of_products(xs: Sequence[Tensor], weights: Sequence[Tensor], count: int, *, trained: bool = True) -> Tensor:
    """Return `Σ_k X_k A_kᵀ` summed over parts as `fold_products` does: xs and weights `[P, …, w_k]` → `[T, O]`.

    `trained`: as in `multiply_parts`.
    """
    if count == 1 and len(xs) == 1:
        return linear(xs[0][0], weights[0][0])
    return _in_faster_form(_sum_in_matmuls, _sum_by_part, count, *xs, *weights, tries=trained)


def _sum_in_matmuls(count: int, *operands: Tensor) -> Tensor:
    """Add in the matmul what the tree adds first."""
    terms = len(operands) // 2
    sums: list[Tensor] = []
    for number in range(count):
        parts = [operand[number] for operand in operands]
        # With a weight of odd strides oneDNN takes a thousand times as long.
        parts[terms:] = map(alone, parts[terms:])
        first = linear(parts[0], parts[terms]) if terms > 1 or number % 2 == 0 else None
        if first is None:
            sums[-1] = _add_linear(sums[-1], parts[0], parts[terms])
            continue
        for x, weight in zip(parts[1:terms], parts[terms + 1 :], strict=True):
            first = _add_linear(first, x, weight)
        sums.append(first)
    return fold_products(sums)


def _sum_by_part(count: int, *operands: Tensor) -> Tensor:
    return fold_products(_part_of_sum([alone(operand[number]) for operand in operands]) for number in range(count))


def _part_of_sum(operands: Sequence[Tensor]) -> Tensor:
    terms = len(operands) // 2
    total = linear(operands[0], operands[terms])
    for x, weight in zip(operands[1:terms], operands[terms + 1 :], strict=True):
        total.add_(linear(x, weight))
    return total


def row_sums(dy: Tensor) -> Tensor:
    """Return the sum over tokens of each part: `[P, T, w]` → `[P, w]`."""
    return torch.stack([alone(part).sum(0) for part in dy])


def _add_linear(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return `total + x weightᵀ`, and may overwrite total: x `[T, I]`, weight `[O, I]`, total `[T, O]`."""
    if writes_in_place(x, weight):
        return torch.addmm(total, x, weight.t(), out=total)
    if by_onednn(x, weight) and not torch.compiler.is_compiling():
        return onednn_linear(x, weight, total)
    return total.add_(linear(x, weight))
