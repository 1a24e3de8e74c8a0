"""The matmuls of the sharded layers: torch's own, or oneDNN's where torch would run float32 at half the CPU's rate.

On a CPU torch gives float32 matmuls to MKL, which keeps to a narrow code path on processors that are not Intel's: on a
Zen 4 core it reaches 100 GFLOP/s where oneDNN reaches 230 (benchmarks/matmul.py). Elsewhere, and under
`torch.autocast`, these functions are the native operators; under `torch.compile` too, until `define_linear`.

By default a sharded layer communicates and multiplies in turn. `gather_and_multiply` and `multiply_and_sum` do both at
once. They cut the rows of the sequence into `PIECES`: a piece is multiplied while the next one is on its way (as in
arXiv:2305.06942 and arXiv:2406.06858). In the backward pass, the gradient of the weight is computed while the gradient
of the input is summed over the ranks (as in Megatron-LM, arXiv:1909.08053). On CUDA, torch has operators that gather
and sum in symmetric memory, over NVLink. The order of the collectives is the same on all ranks, and their bytes are
those of the plain layers.

A layer that *regathers* keeps this rank's rows of its input for the backward pass, not those of all ranks, and gathers
the others again while the gradient of the input is computed (arXiv:2205.05198 §4.2.2).

Weight gradients of bfloat16 layers may be added to `grad` by the matmul itself, as in Megatron-LM. Autograd's way is a
product in bfloat16 and its addition to `grad`: 12 bytes an element, and each micro-batch rounds the product. A device
that multiplies bfloat16 and adds to float32 in one kernel moves 8 bytes and does not round. Autograd is then given no
gradient, and calls the hooks of the weight all the same. If there is no gradient to add to, or autograd itself must
have the gradient, the same kernel makes it in float32, so that no layout and no stage of ZeRO rounds otherwise than the
others. Compiled graphs add by an operator, to gradients that are inputs of the graph (`graph_gradients`).

Shapes per rank, g = group size: S sequence, B batch, T tokens, I input features, O output features. A buffer in *piece
order* has the rows of all ranks' first pieces, then those of all second pieces: piece i, of rows a to b of each rank's
S/g, is its run `[g·a, g·b)`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.distributed import collectives, devices, torch_private
from shardwise.distributed.mesh import Group
from shardwise.distributed.torch_private import fused_all_gather_matmul, fused_matmul_reduce_scatter, onednn_linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x weightᵀ + bias`: x `[…, I]`, weight `[O, I]` → `[…, O]`; any strides.

    Raises:
        ValueError: x has another width than the rank's weight takes.
    """
    if x.shape[-1] != weight.shape[-1]:
        raise wrong_width(x, weight)
    if hasattr(weight, "products_add") and products_add(x, weight):
        return _adding_linear(x, weight, bias)
    if not by_onednn(x, weight):
        return F.linear(x, weight, bias)
    y = cast(Tensor, _Linear.apply(x, weight))  # type: ignore[no-untyped-call]
    if bias is None:
        return y
    return y + bias


def wrong_width(x: Tensor, weight: Tensor) -> ValueError:
    """Return the error for x `[…, I]` that has another width than the rank's weight `[O, I]` takes."""
    return ValueError(
        f"the width of a layer's input ({x.shape[-1]}) must be that of this rank's weight ({weight.shape[-1]}): a "
        "layer with input_is_parallel=True takes what a column-parallel layer with gather_output=False returns, every "
        "other layer the whole width"
    )


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Return `dyᵀ x`: dy `[T, O]`, x `[T, I]` → `[O, I]`."""
    # oneDNN is faster with the longer side as its second operand.
    if dy.shape[1] <= x.shape[1]:
        return linear(dy.t(), x.t())
    return linear(x.t(), dy.t()).t()


_TOKENS = 512  # tokens over which MKL adds in one run, whatever the size of the result


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x weightᵀ` without a gradient, for the inside of autograd functions: x `[T, I]`, weight `[O, I]`."""
    return onednn_linear(x, weight) if by_onednn(x, weight) else F.linear(x, weight)


def weight_gradient_in_runs(dy: Tensor, x: Tensor) -> Tensor:
    """Return `dyᵀ x`; by MKL, runs of `_TOKENS` tokens are added, so that several parts at once have the same bits."""
    has_one_run = dy.dtype not in (torch.float32, torch.float64) or torch.compiler.is_compiling()
    if dy.device.type != "cpu" or has_one_run or by_onednn(dy, x):
        return weight_gradient(dy, x)
    (first_dy, *dys) = dy.split(_TOKENS)
    (first_x, *xs) = x.split(_TOKENS)
    total = weight_gradient(first_dy, first_x)
    for run_dy, run_x in zip(dys, xs, strict=True):
        add_weight_gradient_(total, run_dy, run_x)
    return total


def add_weight_gradient_(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add `dyᵀ x` to `total`, in place: dy `[T, O]`, x `[T, I]`, total `[O, I]`."""
    if writes_in_place(dy, x):
        torch.addmm(total, dy.t(), x, out=total)
    else:
        total.add_(weight_gradient(dy, x))


def writes_in_place(x: Tensor, weight: Tensor) -> bool:
    """Return whether a matmul of these tensors can write its result where it is wanted."""
    return not (by_onednn(x, weight) or _is_rewritten(x))


class _Linear(torch.autograd.Function):
    """Matmul by oneDNN. Its gradients are matmuls of the same kind, so that they have gradients too."""

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


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN does a layer's matmul of these tensors."""
    is_plain_float32 = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if not is_plain_float32 or x.device.type != "cpu":
        return False
    if torch.compiler.is_compiling():
        return _operator_is_defined
    return devices.cpu_prefers_onednn()


_operator_is_defined = False  # true once compiled graphs can have the operator


def define_linear() -> None:
    """Define the operator by which compiled graphs multiply as eager code does, where that is by oneDNN."""
    # The compiler's own use of oneDNN takes only weights that are constants.
    global _operator_is_defined
    if _operator_is_defined or not devices.cpu_prefers_onednn():
        return
    operator = torch.library.custom_op("shardwise::linear", _onednn_linear, mutates_args=())
    operator.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], len(weight)))
    _operator_is_defined = True


def _onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    return onednn_linear(x, weight)


PIECES = 4
"""Pieces of a sequence. The first piece of a gather, or the last one of a sum, runs during no matmul: that is a quarter
of the time."""

Overlap = Literal["pieces", "symmetric_memory"]


def usable(how: Overlap | None, x: Tensor, group: Group) -> Overlap | None:
    """Return `how` if a layer can overlap; None if it is alone in its group, or has no rows, or must not.

    It must not in compiled graphs and under autocast, where torch rewrites or casts the matmuls itself.
    """
    return how if can_regather(x, group) else None


def can_regather(x: Tensor, group: Group) -> bool:
    """Return whether a layer can regather x: not alone, without rows, in compiled graphs or under autocast."""
    return group.size > 1 and len(x) > 0 and not _is_rewritten(x)


def _is_rewritten(x: Tensor) -> bool:
    """Return whether torch rewrites or casts the matmuls of x itself."""
    return torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)


def gather_and_multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    how: Overlap | None,
    *,
    sequence_parallel: bool,
    regathers: bool = False,
) -> Tensor:
    """Return `X Aᵀ + b` of a column-parallel layer: weight `[O, I]`, x `[S/g, B, I]` → `[S, B, O]`.

    Without sequence parallelism x is `[S, B, I]`, whole on every rank, and only the backward pass communicates. Without
    `how` the values are those of the plain layer, to the bit.
    """
    arguments = (x, weight, bias, group, how, sequence_parallel, regathers)
    return cast(Tensor, _GatherAndMultiply.apply(*arguments))  # type: ignore[no-untyped-call]


def multiply_and_sum(
    terms: Sequence[tuple[Tensor, Tensor]], group: Group, how: Overlap, *, sequence_parallel: bool
) -> Tensor:
    """Return `Σ_r Σ_k X_k A_kᵀ` of row-parallel layers: terms (x `[S, B, I_k]`, weight `[O, I_k]`) → `[S/g, B, O]`.

    Without sequence parallelism the result is `[S, B, O]` on every rank, and only the forward pass communicates.
    """
    xs, weights = zip(*terms, strict=True)
    return cast(Tensor, _MultiplyAndSum.apply(group, how, sequence_parallel, *xs, *weights))  # type: ignore[no-untyped-call]


class _GatherAndMultiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group,
        how: Overlap | None,
        sequence_parallel: bool,
        regathers: bool,
    ) -> Tensor:
        ctx.group = group
        ctx.how = how
        ctx.sequence_parallel = sequence_parallel
        ctx.regathers = regathers
        # Recompute gives the backward pass a detached weight, which has no `grad`.
        ctx.weights = [weight]
        if not sequence_parallel:
            ctx.save_for_backward(x, weight)
            return linear(x, weight, bias)
        if how is None:
            gathered = collectives.all_gather(x, group)
            y = linear(gathered, weight, bias)
        else:
            (y,), gathered = _gather_and_multiply(x, [weight], group, how)
            if bias is not None:
                y.add_(bias)
        ctx.save_for_backward(x if regathers else gathered, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathering: _Gathering | None = None
        pending: collectives.Pending | None = None
        dx: Tensor | None = None
        dw: Tensor | None = None
        db: Tensor | None = None
        if ctx.regathers and needs_weight:
            gathering = _Gathering(x, ctx.group, ctx.how)
        if needs_x:
            # Every rank has a part of this sum, over its own output features.
            partial = linear(dy, weight.t()).contiguous()
            if ctx.sequence_parallel:
                out = partial.new_empty(partial.shape[0] // ctx.group.size, *partial.shape[1:])
                pending = collectives.reduce_scatter_async(partial, ctx.group, out=out)
            else:
                pending = collectives.all_reduce_async(partial, ctx.group)
        # The gradients of weight and bias are computed while that of x is summed.
        if needs_weight:
            gathered = x if gathering is None else gathering.wait()
            dw = _weight_gradient(_as_gathered(dy, ctx), gathered, ctx.weights[0])
        if needs_bias:
            db = dy.flatten(0, -2).sum(0)
        if pending is not None:
            dx = pending.wait()
        return dx, dw, db, None, None, None, None


class _MultiplyAndSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, how: Overlap, sequence_parallel: bool, *terms: Tensor) -> Tensor:
        ctx.group = group
        ctx.how = how
        ctx.sequence_parallel = sequence_parallel
        ctx.save_for_backward(*terms)
        count = len(terms) // 2
        xs = terms[:count]
        weights = terms[count:]
        ctx.weights = weights
        if sequence_parallel:
            collectives.check_divides(xs[0], 0, group)
        if sequence_parallel and how == "symmetric_memory":
            return _fused_sum(xs, weights, group)
        pending = []
        if sequence_parallel:
            for piece in _pieces(len(xs[0]) // group.size):
                partial = _product([_rows(x, piece, group) for x in xs], weights)
                out = partial.new_empty(piece.stop - piece.start, *partial.shape[2:])
                pending.append(collectives.reduce_scatter_async(partial.flatten(0, 1), group, out=out))
        else:
            for piece in _pieces(len(xs[0])):
                partial = _product([x[piece] for x in xs], weights)
                pending.append(collectives.all_reduce_async(partial, group))
        return torch.cat([collective.wait() for collective in pending])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        terms = ctx.saved_tensors
        count = len(terms) // 2
        xs = terms[:count]
        transposed = [weight.t() for weight in terms[count:]]
        if ctx.sequence_parallel:
            dxs, dy = _gather_and_multiply(dy, transposed, ctx.group, ctx.how)
        else:
            dxs = [linear(dy, weight) for weight in transposed]
        dws: list[Tensor | None] = []
        for x, weight, is_needed in zip(xs, ctx.weights, ctx.needs_input_grad[3 + count :], strict=True):
            dws.append(_weight_gradient(dy, _as_gathered(x, ctx), weight) if is_needed else None)
        return None, None, None, *dxs, *dws


def _gather_and_multiply(
    x: Tensor, weights: Sequence[Tensor], group: Group, how: Overlap
) -> tuple[list[Tensor], Tensor]:
    """x `[S/g, B, I]` of each rank → `X Aᵀ` for each weight, `[S, B, O]`, and X as `_as_gathered` has it."""
    if how == "symmetric_memory":
        # torch's operator communicates by itself, so its bytes are counted here and not in `collectives`.
        assert group.process_group is not None, "several ranks"
        group.count("all_gather", x.nbytes * group.size)
        gathered, products = fused_all_gather_matmul(x, [weight.t() for weight in weights], group.process_group)
        return products, gathered
    # All are on their way before the first product: they arrive in this order, one while another is multiplied.
    gathering = _Gathering(x, group, how)
    products = [x.new_empty(*gathering.result.shape[:-1], len(weight)) for weight in weights]
    for piece, collective in zip(gathering.pieces, gathering.pending, strict=True):
        arrived = collective.wait().unflatten(0, (group.size, -1))
        for product, weight in zip(products, weights, strict=True):
            _rows(product, piece, group).copy_(linear(arrived, weight))
    return products, gathering.result


class _Gathering:
    """X `[S, B, I]` on its way from the `[S/g, B, I]` of each rank, in the order that `_as_gathered` gives.

    Attributes:
        pieces: rows of each rank that travel together.
        pending: the gather of each piece.
        result: X, complete after `wait()`.
    """

    def __init__(self, x: Tensor, group: Group, how: Overlap | None) -> None:
        rows, *row_shape = x.shape
        self.pieces = _pieces(rows) if how == "pieces" else [slice(0, rows)]
        self.result = x.new_empty(group.size * rows, *row_shape)
        # Collectives need contiguous tensors.
        x = x.contiguous()
        self.pending = []
        for piece in self.pieces:
            out = self.result[group.size * piece.start : group.size * piece.stop]
            self.pending.append(collectives.all_gather_async(x[piece], group, out=out))

    def wait(self) -> Tensor:
        for collective in self.pending:
            collective.wait()
        return self.result


def _fused_sum(xs: Sequence[Tensor], weights: Sequence[Tensor], group: Group) -> Tensor:
    """Return `Σ_r Σ_k X_k A_kᵀ` by torch's operator, as one product over the inputs of all k."""
    assert group.process_group is not None, "several ranks"
    # Side by side, the inputs of all k are one matrix: Σ_k X_k A_kᵀ = [X_1 X_2 …] [A_1 A_2 …]ᵀ.
    x = torch.cat(list(xs), -1)
    weight = torch.cat(list(weights), -1)
    group.count("reduce_scatter", x.shape[:-1].numel() * len(weight) * x.element_size())
    return fused_matmul_reduce_scatter(x, weight.t(), group.process_group)


def _product(xs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    products = [linear(x, weight) for x, weight in zip(xs, weights, strict=True)]
    total = products[0]
    for product in products[1:]:
        total += product
    return total


def _weight_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    """Return `dyᵀ x`: dy `[S, B, O]`, x `[S, B, I]` → `[O, I]`; None if it was added to the weight's gradient."""
    dy_TO = dy.flatten(0, -2)
    x_TI = x.flatten(0, -2)
    if is_made_by_products(x, weight):
        return _add_or_return(weight, dy_TO, x_TI)
    if by_onednn(dy_TO, x_TI):
        return weight_gradient(dy_TO, x_TI)
    # As autograd multiplies, to the bit.
    return dy_TO.t() @ x_TI


def _pieces(rows: int) -> list[slice]:
    """Return the rows of each piece: of `PIECES`, or of fewer if there are fewer rows."""
    count = min(PIECES, rows)
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def _rows(x_S: Tensor, piece: slice, group: Group) -> Tensor:
    """Return a piece of every rank's rows: `[S, …]` → `[g, b - a, …]`, a view."""
    by_rank: Tensor = x_S.unflatten(0, (group.size, -1))
    return by_rank[:, piece]


def _as_gathered(x_S: Tensor, ctx: Any) -> Tensor:
    """Return `[S, …]` with its rows in the order of a gathered tensor: a sum over rows needs both operands alike."""
    if not ctx.sequence_parallel or ctx.how != "pieces":
        return x_S
    pieces = _pieces(x_S.shape[0] // ctx.group.size)
    return torch.cat([_rows(x_S, piece, ctx.group).flatten(0, 1) for piece in pieces])


# ---- gradients that matmuls add to `grad`


def let_products_add(weights: Iterable[nn.Parameter], *, in_place: bool = True) -> None:
    """Let products of linear layers make the gradients of these weights `[O, I]` in float32.

    Args:
        weights: weights whose gradients are summed in float32.
        in_place: True if products add to `grad`. Only `backward()` may then compute the gradients:
            `torch.autograd.grad` finds none.
    """
    for weight in weights:
        cast(Any, weight).products_add = "in place" if in_place else "returned"


def add_without_cast(weights: Iterable[nn.Parameter]) -> None:
    """Let matmuls in backward passes add to these weights' gradients, which have another dtype, without a cast.

    Each weight must be used once in a backward pass: the gradients of several uses would be added in their own dtype.
    """
    for weight in weights:
        weight.grad_dtype = None


def products_add(x: Tensor, weight: Tensor) -> bool:
    """Return whether `_adding_linear` computes a linear layer of x `[…, I]` and a weight."""
    if not torch.is_grad_enabled() or not is_made_by_products(x, weight):
        return False
    return not torch.compiler.is_compiling() or graph_gradient_of(weight) is not None


def is_made_by_products(x: Tensor, weight: Tensor) -> bool:
    """Return whether `_add_or_return` makes the gradient of a weight, for a layer's input x `[…, I]`."""
    is_bfloat16 = x.dtype == weight.dtype == torch.bfloat16
    return is_bfloat16 and hasattr(weight, "products_add") and not torch.is_autocast_enabled(x.device.type)


def _adding_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x weightᵀ + bias`, where products add: x `[…, I]`, weight `[O, I]` → `[…, O]`."""
    if torch.compiler.is_compiling():
        return cast(Tensor, _GraphLinear.apply(x, weight, bias, graph_gradient_of(weight)))  # type: ignore[no-untyped-call]
    return cast(Tensor, _AddingLinear.apply(x, weight, bias))  # type: ignore[no-untyped-call]


class _AddingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Recompute gives the backward pass a detached weight, which has no `grad`.
        ctx.weight = weight
        ctx.owns_input = getattr(weight, "owns_input", False) and not torch_private.others_keep_tensors()
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy_TO = dy.reshape(-1, dy.shape[-1])
        x_TI = x.reshape(-1, x.shape[-1])
        dw = _add_or_return(ctx.weight, dy_TO, x_TI) if ctx.needs_input_grad[1] else None
        # From here on the input's memory is free, where this layer alone has it.
        is_free = ctx.owns_input and not torch_private.graph_is_kept()
        out = x_TI.detach() if is_free else None
        dx = torch.mm(dy_TO, weight, out=out).view(x.shape) if ctx.needs_input_grad[0] else None
        db = dy_TO.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, db


class _GraphLinear(torch.autograd.Function):
    """The same in a compiled graph, whose input `total` is the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, total)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, total = ctx.saved_tensors
        dy = grads[0]
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dy_TO = dy.reshape(-1, dy.shape[-1])
        torch.ops.shardwise.add_product_(total, dy_TO.t(), x.reshape(-1, x.shape[-1]))
        db = dy_TO.sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, db, None


def graph_gradient_of(weight: Tensor) -> Tensor | None:
    """Return the gradient of a weight that a graph of a linear layer takes as its input, if it does."""
    return getattr(weight, "graph_gradient", None)


@contextmanager
def graph_gradients(gradients: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, matmuls of linear layers in a graph take as inputs the gradients to which their products add in place.

    Args:
        gradients: pairs of a parameter and its gradient in float32.
    """
    weights = []
    for weight, gradient in gradients:
        if getattr(weight, "products_add", None) == "in place":
            # Autograd refuses a saved tensor that has changed, as these do with each micro-batch: this one counts only
            # the changes that are made by itself.
            cast(Any, weight).graph_gradient = gradient.data
            weights.append(weight)
    try:
        yield
    finally:
        for weight in weights:
            del cast(Any, weight).graph_gradient


def _add_or_return(weight: Tensor, dy_TO: Tensor, x_TI: Tensor) -> Tensor | None:
    """Add `dyᵀ x` to the gradient of a weight that `is_made_by_products`, or return it in float32 for autograd.

    ZeRO-2 and 3 have no memory for a gradient before the first one of a step.
    """
    total = gradient_to_add_to(weight)
    if total is not None:
        add_product_(total, dy_TO.t(), x_TI)
        return None
    gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    add_product_(gradient, dy_TO.t(), x_TI)
    return gradient


def gradient_to_add_to(weight: Tensor) -> Tensor | None:
    """Return the float32 gradient of a weight if a backward pass adds to it by itself, or None."""
    # Views of a weight have no gradient, and torch warns of each question for it.
    total = weight.grad if getattr(weight, "products_add", None) == "in place" else None
    return total if total is not None and total.dtype == torch.float32 else None


def adds_in_one_kernel(total: Tensor, a: Tensor) -> bool:
    """Return whether `add_product_` adds the product of a bfloat16 matrix a to a float32 `total` in one kernel."""
    has_dtypes = a.dtype == torch.bfloat16 and total.dtype == torch.float32
    return has_dtypes and not _is_rewritten(total) and adds_products(total.device)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a b` to `total`, in place: a `[O, T]` and b `[T, I]` in bfloat16, total `[O, I]` in float32."""
    if adds_products(total.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


@functools.cache
def define_add_product() -> None:
    """Define the operator of compiled graphs."""

    @torch.library.custom_op("shardwise::add_product_", mutates_args=("total",))
    def operator(total: Tensor, a: Tensor, b: Tensor) -> None:
        add_product_(total, a, b)


@functools.cache
def adds_products(device: torch.device) -> bool:
    """True if one matmul kernel of the device adds the product of bfloat16 matrices to a float32 one."""
    try:
        matrix = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        total = torch.ones(16, 16, dtype=torch.float32, device=device)
        torch.addmm(total, matrix, matrix, out_dtype=torch.float32, out=total)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError):  # the first without the device's torch
        return False
    return torch_private.has_data(total) and bool((total == 17.0).all())
