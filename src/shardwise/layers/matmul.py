"""The matmuls of the sharded layers: torch's own, or oneDNN's where torch would run float32 at half the CPU's rate.

On a CPU torch gives float32 matmuls to MKL, which keeps to a narrow code path on processors that are not Intel's: on a
Zen 4 core it reaches 100 GFLOP/s where oneDNN reaches 230 (benchmarks/matmul.py). Elsewhere, and under
`torch.autocast`, these functions are the native operators; under `torch.compile` too, until `define_linear`.

Legend: T tokens, K input features, N output features.

Tensor-parallel matmuls that run while the group's collectives do.

By default a sharded layer communicates and multiplies in turn. Here the rows of the sequence are cut into `PIECES`: a
piece is multiplied while the next one is on its way (as in arXiv:2305.06942 and arXiv:2406.06858). In the backward
pass, the gradient of the weight is computed while the gradient of the input is summed over the ranks (Megatron-LM,
arXiv:1909.08053, does the latter). On CUDA, torch has operators that do the former in symmetric memory, over NVLink.

The order of the collectives is the same on all ranks, and their bytes are those of the plain layers.

Shapes per rank, g = group size: S sequence, B batch, I input features, O output features. A buffer in *piece order* has
the rows of all ranks' first pieces, then those of all second pieces: piece i, of rows a to b of each rank's S/g, is its
run `[g·a, g·b)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Group
from shardwise.distributed.torch_private import fused_all_gather_matmul, fused_matmul_reduce_scatter, onednn_linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x weightᵀ + bias`: x `[…, K]`, weight `[N, K]` → `[…, N]`; any strides.

    Raises:
        ValueError: x has another width than the rank's weight takes.
    """
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"the width of a layer's input ({x.shape[-1]}) must be that of this rank's weight ({weight.shape[-1]}): a "
            "layer with input_is_parallel=True takes what a column-parallel layer with gather_output=False returns, "
            "every other layer the whole width"
        )
    if not _by_onednn(x, weight):
        return F.linear(x, weight, bias)
    y = cast(Tensor, _Linear.apply(x, weight))  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """`dyᵀ x`: dy `[T, N]`, x `[T, K]` → `[N, K]`. The longer side goes second, where oneDNN is faster."""
    return linear(dy.t(), x.t()) if dy.shape[1] <= x.shape[1] else linear(x.t(), dy.t()).t()


class _Linear(torch.autograd.Function):
    """Its gradients are matmuls of the same kind, so that they have gradients too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if torch.compiler.is_compiling():
            return cast(Tensor, torch.ops.shardwise.linear(x, weight))
        return onednn_linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dy = grads[0]
        dx = linear(dy, weight.t()) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))
        return dx, dw


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and (_defined if torch.compiler.is_compiling() else devices.cpu_prefers_onednn())
    )


_defined = False
"""Whether compiled graphs have the operator."""


def define_linear() -> None:
    """Define the operator by which compiled graphs multiply as eager code does, where that is by oneDNN.

    The compiler's own use of oneDNN takes weights that are constants.
    """
    global _defined
    if _defined or not devices.cpu_prefers_onednn():
        return
    operator = torch.library.custom_op("shardwise::linear", _onednn_linear, mutates_args=())
    operator.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], len(weight)))
    _defined = True


def _onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    return onednn_linear(x, weight)


PIECES = 4
"""The first piece of a gather, or the last one of a sum, runs behind no matmul: that is a quarter of the time."""

Overlap = Literal["pieces", "symmetric_memory"]


def usable(how: Overlap | None, x: Tensor, group: Group) -> Overlap | None:
    """`how` where a layer can overlap; None alone in its group, without rows, and where torch sees or casts matmuls."""
    plain = torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)
    return None if group.size == 1 or not len(x) or plain else how


def gather_and_multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, how: Overlap, *, sequence_parallel: bool
) -> Tensor:
    """`X Aᵀ + b` of a column-parallel layer: weight `[O, I]`, x `[S/g, B, I]` → `[S, B, O]`.

    Without sequence parallelism x is `[S, B, I]`, whole on every rank, and only the backward pass communicates.
    """
    return cast(Tensor, _GatherAndMultiply.apply(x, weight, bias, group, how, sequence_parallel))  # type: ignore[no-untyped-call]


def multiply_and_sum(
    terms: Sequence[tuple[Tensor, Tensor]], group: Group, how: Overlap, *, sequence_parallel: bool
) -> Tensor:
    """`Σ_r Σ_k X_k A_kᵀ` of row-parallel layers: terms (x `[S, B, I_k]`, weight `[O, I_k]`) → `[S/g, B, O]`.

    Without sequence parallelism the result is `[S, B, O]` on every rank, and only the forward pass communicates.
    """
    xs, weights = zip(*terms, strict=True)
    return cast(Tensor, _MultiplyAndSum.apply(group, how, sequence_parallel, *xs, *weights))  # type: ignore[no-untyped-call]


class _GatherAndMultiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, how: Overlap, sequence_parallel: bool
    ) -> Tensor:
        ctx.group, ctx.how, ctx.sequence_parallel = group, how, sequence_parallel
        if not sequence_parallel:
            ctx.save_for_backward(x, weight)
            return linear(x, weight, bias)
        (y,), gathered = _gather_and_multiply(x, [weight], group, how)
        ctx.save_for_backward(gathered, weight)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        pending = collectives.Pending(dy)
        dw = None
        if ctx.needs_input_grad[0]:
            dx = linear(dy, weight.t()).contiguous()
            if ctx.sequence_parallel:
                out = dx.new_empty(dx.shape[0] // ctx.group.size, *dx.shape[1:])
                pending = collectives.reduce_scatter_async(dx, ctx.group, out=out)
            else:
                pending = collectives.all_reduce_async(dx, ctx.group)
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(_as_gathered(dy, ctx), x)
        db = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return pending.wait() if ctx.needs_input_grad[0] else None, dw, db, None, None, None


class _MultiplyAndSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, how: Overlap, sequence_parallel: bool, *terms: Tensor) -> Tensor:
        ctx.group, ctx.how, ctx.sequence_parallel = group, how, sequence_parallel
        ctx.save_for_backward(*terms)
        xs, weights = terms[: len(terms) // 2], terms[len(terms) // 2 :]
        if sequence_parallel:
            collectives.check_divides(xs[0], 0, group)
        if sequence_parallel and how == "symmetric_memory":
            return _fused_sum(xs, weights, group)
        pending = []
        rows = xs[0].shape[0] // (group.size if sequence_parallel else 1)
        for piece in _pieces(rows):
            partial = _product([_rows(x, piece, group) if sequence_parallel else x[piece] for x in xs], weights)
            if sequence_parallel:
                out = partial.new_empty(piece.stop - piece.start, *partial.shape[2:])
                pending.append(collectives.reduce_scatter_async(partial.flatten(0, 1), group, out=out))
            else:
                pending.append(collectives.all_reduce_async(partial, group))
        return torch.cat([one.wait() for one in pending])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        terms = ctx.saved_tensors
        count = len(terms) // 2
        xs, weights = terms[:count], terms[count:]
        turned = [weight.t() for weight in weights]
        if ctx.sequence_parallel:
            dxs, dy = _gather_and_multiply(dy, turned, ctx.group, ctx.how)
        else:
            dxs = [linear(dy, weight) for weight in turned]
        dws = [
            _weight_gradient(dy, _as_gathered(x, ctx)) if needed else None
            for x, needed in zip(xs, ctx.needs_input_grad[3 + count :], strict=True)
        ]
        return None, None, None, *dxs, *dws


def _gather_and_multiply(
    x: Tensor, weights: Sequence[Tensor], group: Group, how: Overlap
) -> tuple[list[Tensor], Tensor]:
    """x `[S/g, B, I]` of each rank → `X Aᵀ` for each weight, `[S, B, O]`; and X as `_as_gathered` orders it."""
    if how == "symmetric_memory":
        assert group.process_group is not None, "several ranks"
        group.count("all_gather", x.nbytes * group.size)
        gathered, products = fused_all_gather_matmul(x, [weight.t() for weight in weights], group.process_group)
        return products, gathered
    g, (rows, *tail) = group.size, x.shape
    x, gathered = x.contiguous(), x.new_empty(g * rows, *tail)
    pieces = _pieces(rows)
    pending = [collectives.all_gather_async(x[p], group, out=gathered[g * p.start : g * p.stop]) for p in pieces]
    products = [x.new_empty(g * rows, *tail[:-1], len(weight)) for weight in weights]
    for piece, one in zip(pieces, pending, strict=True):
        arrived = one.wait().unflatten(0, (g, -1))
        for y, weight in zip(products, weights, strict=True):
            _rows(y, piece, group).copy_(linear(arrived, weight))
    return products, gathered


def _fused_sum(xs: Sequence[Tensor], weights: Sequence[Tensor], group: Group) -> Tensor:
    assert group.process_group is not None, "several ranks"
    x, weight = torch.cat(list(xs), -1), torch.cat(list(weights), -1)
    group.count("reduce_scatter", x.shape[:-1].numel() * len(weight) * x.element_size())
    return fused_matmul_reduce_scatter(x, weight.t(), group.process_group)


def _product(xs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """`Σ_k X_k A_kᵀ`."""
    first, *others = (linear(x, weight) for x, weight in zip(xs, weights, strict=True))
    for other in others:
        first += other
    return first


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return weight_gradient(dy.flatten(0, -2), x.flatten(0, -2))


def _pieces(rows: int) -> list[slice]:
    """The rows of each piece: `PIECES`, or fewer where there are fewer rows."""
    count = min(PIECES, rows)
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def _rows(whole: Tensor, piece: slice, group: Group) -> Tensor:
    """A piece of every rank's rows: `[S, …]` → `[g, b - a, …]`, a view."""
    rows: Tensor = whole.unflatten(0, (group.size, -1))
    return rows[:, piece]


def _as_gathered(whole: Tensor, ctx: Any) -> Tensor:
    """`[S, …]` in the order in which the layer's other operand has its rows: a sum over rows needs them alike."""
    if not ctx.sequence_parallel or ctx.how == "symmetric_memory":
        return whole
    rows = whole.shape[0] // ctx.group.size
    return torch.cat([_rows(whole, piece, ctx.group).flatten(0, 1) for piece in _pieces(rows)])
