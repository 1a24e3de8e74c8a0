"""Collectives over explicit groups. Nothing else in the package calls `torch.distributed`'s collectives.

Whatever communicates is given its `Group`; there is no current one. At group size 1 every collective is the
identity, so a model without parallelism runs the same code. The autograd functions hold communication only: matmuls
stay native operators, which lets `torch.compile`, recompute and zero-bubble schedules take a model apart.

Shapes: `dim 0` is the one that is gathered and scattered (activations are sequence-first, `x_SBH`).

At the end, the agreement of ranks on an error: all know the problems of any of them, so that all raise or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.base.errors import ConfigError
from shardwise.distributed.devices import mark_time
from shardwise.distributed.mesh import Group, narrows, sends_to_all
from shardwise.distributed.torch_private import (
    traced_all_gather,
    traced_all_reduce,
    traced_all_to_all,
    traced_reduce_scatter,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")

# torch 2.13 renamed these two and warns about the old names, which are the only ones that older releases know.
_all_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _call(group: Group, operation: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Run a collective, or wait for one, and keep its time where the group's meter asks for it."""
    spans = group.meter.spans
    if spans is None:
        return operation(*args, **kwargs)
    start = mark_time(group.message_device)
    try:
        return operation(*args, **kwargs)
    finally:
        spans.append((start, mark_time(group.message_device)))


def check_divides(tensor: Tensor, dim: int, group: Group) -> None:
    """Raise a ValueError if the group cannot cut a dim, the first or the last, into equal parts."""
    length = tensor.shape[dim]
    if length % group.size:
        name = "dim 0" if dim == 0 else "the last dim"
        raise ValueError(f"{name} ({length}) must be a multiple of the group's size ({group.size})")


# ---- collectives on plain tensors
#
# What a compiled model calls, all_reduce_, all_gather and reduce_scatter, is traced as nodes of its graph. They name
# their group by `Group.graph_name`, so that no rank's graph differs from another's.


@dataclass(eq=False)
class Pending:
    """A collective under way."""

    result: Tensor  # tensor that `wait()` returns, complete by then
    work: dist.Work | None = None  # torch's handle; None: there is nothing to wait for
    finish: Callable[[], object] | None = None  # function that is called once, after the last byte arrived
    group: Group | None = None  # group whose meter counts the wait

    def wait(self) -> Tensor:
        if self.work is not None:
            if self.group is None:
                self.work.wait()
            else:
                _call(self.group, self.work.wait)
            self.work = None
        if self.finish is not None:
            self.finish()
            self.finish = None
        return self.result


def tree_sum(parts: Tensor) -> Tensor:
    """Return the sum of `[n, …]` over dim 0 as a collective adds the parts of n ranks: in a tree; n is a power of two.

    The sum of each aligned run of 2^k parts is a node of this tree: ranks that hold such runs can add up theirs alone,
    and the result is the same to the last bit for any number of ranks.
    """
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def _tree_sum_(parts: Tensor) -> Tensor:
    """Return the sum as `tree_sum` does, in the memory of the parts."""
    while len(parts) > 1:
        parts = parts[0::2].add_(parts[1::2])
    return parts[0]


def all_reduce_(tensor: Tensor, group: Group, *, op: str = "sum") -> Tensor:
    """Reduce over the group, in place. `op`: sum or max.

    Where the group `adds_in_tree`, a sum of floating-point numbers is that of `tree_sum`.
    """
    if group.size > 1:
        if group.adds_in_tree and op == "sum" and tensor.is_floating_point() and not narrows(group, tensor):
            return _tree_all_reduce_async(tensor, group, overlap=False).wait()
        if torch.compiler.is_compiling():
            return tensor.copy_(traced_all_reduce(tensor, op, group.graph_name))
        group.count("all_reduce", tensor.nbytes)
        _all_reduce_now(tensor, group, op)
    return tensor


def _all_reduce_now(tensor: Tensor, group: Group, op: str) -> None:
    if narrows(group, tensor):
        _all_reduce_on_host(tensor, group, op)
    elif sends_to_all(group, tensor):
        _small_all_reduce(tensor, group, op, overlap=False).wait()
    else:
        reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        _call(group, dist.all_reduce, tensor, op=reduce_op, group=group.process_group)


def _all_reduce_on_host(tensor: Tensor, group: Group, op: str) -> None:
    """Reduce on the host, in place: each rank gets the numbers of all, which travel as bytes."""
    local = tensor.reshape(1, -1).view(torch.uint8).to(group.message_device)
    everyone = torch.empty((group.size, local.shape[1]), dtype=torch.uint8, device=local.device)
    _start_all_gather(local, group, everyone, overlap=False)
    by_rank = everyone.cpu().view(tensor.dtype)
    reduced = by_rank.amax(0) if op == "max" else tree_sum(by_rank) if group.adds_in_tree else by_rank.sum(0)
    tensor.copy_(reduced.view(tensor.shape))


def _send_to_all(local: Tensor, group: Group, out: Tensor, *, overlap: bool) -> dist.Work | None:
    """Start sending a contiguous tensor `[…]` to all ranks; `out` `[g, …]`, contiguous too, gets those of all."""
    copies = local.reshape(1, -1).expand(group.size, -1).contiguous()
    exchange = partial(dist.all_to_all_single, out.view(-1), copies.view(-1), group=group.process_group)
    work: dist.Work | None = exchange(async_op=True) if overlap else _call(group, exchange)
    return work


def _small_all_reduce(tensor: Tensor, group: Group, op: str, *, overlap: bool) -> Pending:
    parts = tensor.new_empty((group.size, *tensor.shape))
    work = _send_to_all(tensor, group, parts, overlap=overlap)

    def finish() -> None:
        if op == "max":
            tensor.copy_(parts.amax(dim=0))
        elif group.adds_in_tree and tensor.is_floating_point():
            tensor.copy_(_tree_sum_(parts))
        else:
            tensor.copy_(parts.sum(dim=0))

    return Pending(tensor, work, finish, group)


def all_reduce_async(tensor: Tensor, group: Group) -> Pending:
    """Start a sum over the group, in place."""
    if group.size == 1:
        return Pending(tensor)
    if group.adds_in_tree and tensor.is_floating_point():
        return _tree_all_reduce_async(tensor, group, overlap=True)
    group.count("all_reduce", tensor.nbytes)
    if sends_to_all(group, tensor):
        return _small_all_reduce(tensor, group, "sum", overlap=True)
    work = dist.all_reduce(tensor, group=group.process_group, async_op=True)
    return Pending(tensor, cast(dist.Work, work), group=group)


def _tree_all_reduce_async(tensor: Tensor, group: Group, *, overlap: bool) -> Pending:
    """Start a sum over the group in the order of `tree_sum`, in place: each rank sums a run of elements of all ranks.

    The bytes are those of a ring, but for a small tensor: a reduce-scatter, and once it is waited for, an all-gather.
    """
    if not torch.compiler.is_compiling() and sends_to_all(group, tensor):
        group.count("all_reduce", tensor.nbytes)
        return _small_all_reduce(tensor, group, "sum", overlap=overlap)
    flat = tensor.reshape(-1)
    run = -(-flat.numel() // group.size)
    padding = run * group.size - flat.numel()
    padded = torch.nn.functional.pad(flat, (0, padding)) if padding else flat
    if torch.compiler.is_compiling():
        parts = traced_all_to_all(padded, group.size, group.graph_name)
        gathered = traced_all_gather(tree_sum(parts.view(group.size, run)), group.size, group.graph_name)
        return Pending(tensor.copy_(gathered[: flat.numel()].view_as(tensor)))
    group.count("all_reduce", tensor.nbytes)
    parts = torch.empty_like(padded)
    work = _exchange(parts, padded, group, overlap=overlap)

    def finish() -> None:
        total = _tree_sum_(parts.view(group.size, run))
        _call(group, _all_gather_into, padded, total, group=group.process_group)
        if padded.data_ptr() != tensor.data_ptr():
            tensor.copy_(padded[: flat.numel()].view_as(tensor))

    return Pending(tensor, work if overlap else None, finish, group)


def all_gather(local: Tensor, group: Group, *, out: Tensor | None = None) -> Tensor:
    """Concatenate the ranks' tensors along dim 0: `[n, …]` on each of g ranks → `[g·n, …]`.

    `local` may be this rank's own slice of `out`: then nothing is copied on this rank.
    """
    if group.size == 1:
        return local if out is None else out
    if torch.compiler.is_compiling():
        gathered = traced_all_gather(local.contiguous(), group.size, group.graph_name)
        return gathered if out is None else out.copy_(gathered)
    if out is None:
        out = local.new_empty((local.shape[0] * group.size, *local.shape[1:]))
    group.count("all_gather", out.nbytes)
    _start_all_gather(local.contiguous(), group, out, overlap=False)
    return out


def _start_all_gather(local: Tensor, group: Group, out: Tensor, *, overlap: bool) -> dist.Work | None:
    if sends_to_all(group, local):
        return _send_to_all(local, group, out, overlap=overlap)
    work: dist.Work | None = _call(group, _all_gather_into, out, local, group=group.process_group, async_op=overlap)
    return work


def all_gather_async(local: Tensor, group: Group, *, out: Tensor) -> Pending:
    """Start an all-gather into `out`."""
    if group.size == 1:
        return Pending(out)
    group.count("all_gather", out.nbytes)
    return Pending(out, _start_all_gather(local, group, out, overlap=True), group=group)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks and keep this rank's run along dim 0: `[g·n, …]` → `[n, …]`.

    Where the group `adds_in_tree`, the sum is that of `tree_sum`.
    """
    if group.size == 1:
        return x
    check_divides(x, 0, group)
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return _traced_reduce_scatter(x, group)
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    return reduce_scatter_async(x, group, out=out, overlap=False).wait()


def _traced_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    if not group.scatter_by_all_to_all:
        return traced_reduce_scatter(x, group.size, group.graph_name)
    parts = traced_all_to_all(x, group.size, group.graph_name).view(group.size, -1, *x.shape[1:])
    return tree_sum(parts) if group.adds_in_tree else parts.sum(0)


def reduce_scatter_async(x: Tensor, group: Group, *, out: Tensor, overlap: bool = True) -> Pending:
    """Start a reduce-scatter into `out`, which may be this rank's own slice of `x`."""
    if group.size == 1:
        return Pending(out)
    group.count("reduce_scatter", x.nbytes)
    if not group.scatter_by_all_to_all:
        work = _call(group, _reduce_scatter_into, out, x, group=group.process_group, async_op=overlap)
        return Pending(out, work if overlap else None, group=group)
    # gloo: each rank sends every other rank its run and sums what it receives, in rank order (see `Group`).
    parts = torch.empty_like(x)
    work = _exchange(parts, x, group, overlap=overlap)

    def finish() -> None:
        by_rank = parts.view(group.size, *out.shape)
        if group.adds_in_tree:
            out.copy_(_tree_sum_(by_rank))
        else:
            torch.sum(by_rank, dim=0, out=out)

    return Pending(out, work if overlap else None, finish, group)


def all_to_all(
    x: Tensor, group: Group, sent: Sequence[int] | None = None, arriving: Sequence[int] | None = None
) -> Tensor:
    """Send runs of rows, `sent` of them to each rank, and return those that are `arriving` from each, in rank order.

    Without numbers, the runs are equal.
    """
    if sent is not None and arriving is not None and group.sends_equal_runs:
        return _all_to_all_of_equal_runs(x, group, sent, arriving)
    group.count("all_to_all", x.nbytes)
    rows = len(x) if arriving is None else sum(arriving)
    out = x.new_empty((rows, *x.shape[1:]))
    _exchange(out, x.contiguous(), group, arriving and [*arriving], sent and [*sent])
    return out


def _exchange(
    out: Tensor, x: Tensor, group: Group, arriving: Any = None, sent: Any = None, *, overlap: bool = False
) -> dist.Work | None:
    """Start an all-to-all; where the backend has none of these ranks, each gets the equal runs of all."""
    if group.has_all_to_all:
        exchange = partial(dist.all_to_all_single, group=group.process_group, async_op=overlap)
        return cast("dist.Work | None", _call(group, exchange, out, x, arriving, sent))
    everyone = x.new_empty((len(x) * group.size, *x.shape[1:]))
    _call(group, _all_gather_into, everyone, x, group=group.process_group)
    out.copy_(everyone.view(group.size, group.size, -1)[:, group.rank].reshape(out.shape))
    return None


def _all_to_all_of_equal_runs(x: Tensor, group: Group, sent: Sequence[int], arriving: Sequence[int]) -> Tensor:
    """Return what `all_to_all` does, by runs that are all as long as the longest one of any rank."""
    (longest,) = reduce_numbers([max(1, *sent, *arriving)], group)
    padded = x.new_zeros((group.size, longest, *x.shape[1:]))
    for row, run in zip(padded, x.split(list(sent)), strict=True):
        row[: len(run)] = run
    return torch.cat([row[:length] for row, length in zip(all_to_all(padded, group), arriving, strict=True)])


def shift_async(x: Tensor, group: Group, distance: int) -> Pending:
    """Start sending x to the rank `distance` places on; the result is x of the rank as many places back.

    The ranks' tensors have one shape. x may be read meanwhile.
    """
    group.count("send", x.nbytes)
    x = x.contiguous()
    arrived = torch.empty_like(x)
    source, target = (group.ranks[(group.rank + step) % group.size] for step in (-distance, distance))
    send = dist.P2POp(dist.isend, x, target, group.process_group)
    # A batch, as on accelerators a message may end when it is received: ranks that all send first would wait for ever.
    *sends, work = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, arrived, source, group.process_group)])
    return Pending(arrived, work, lambda: [send.wait() for send in sends], group)


def broadcast_(tensor: Tensor, group: Group, *, source: int = 0) -> Tensor:
    """Copy the tensor of the rank at index `source` of the group to all, in place."""
    if group.size > 1:
        group.count("broadcast", tensor.nbytes)
        _call(group, dist.broadcast, tensor, src=group.ranks[source], group=group.process_group)
    return tensor


def reduce_numbers(values: Sequence[int], group: Group, *, op: str = "max") -> list[int]:
    """Reduce whole numbers over the ranks: the largest, one by one, or with `op` sum their sums; the host waits.

    For agreements, most of which find that all is well: what each rank sends and receives does not grow with the ranks,
    as all their objects do.
    """
    if group.size == 1:
        return list(values)
    numbers = torch.tensor(values, dtype=torch.int64, device=group.message_device)
    group.note("reduce_numbers")
    _all_reduce_now(numbers, group, op)
    reduced: list[int] = numbers.tolist()
    return reduced


def any_rank(flag: bool, group: Group) -> bool:
    """True on every rank if a flag is set on any of them."""
    return reduce_numbers([flag], group) == [1]


def all_gather_objects(value: _R, group: Group) -> list[_R]:
    """All-gather every rank's picklable value, in group order: for reports, never on the hot path.

    Over the world, only where ranks are known to have something to tell: each of them unpacks what all of them sent.
    """
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    group.note("all_gather_objects")
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def gather_objects(value: _R, group: Group) -> list[_R] | None:
    """Every rank's picklable value on the group's first rank, in group order; None on the others."""
    if group.size == 1:
        return [value]
    values: list[Any] | None = [None] * group.size if group.rank == 0 else None
    group.note("gather_objects")
    dist.gather_object(value, values, dst=group.ranks[0], group=group.process_group)
    return values


def broadcast_object(value: _R, group: Group) -> _R:
    """Broadcast the first rank's picklable value to every rank."""
    if group.size == 1:
        return value
    values = [value]
    group.note("broadcast_object")
    dist.broadcast_object_list(values, src=group.ranks[0], group=group.process_group)
    return values[0]


def send(tensor: Tensor, group: Group, to: int) -> Pending:
    """Start sending to the rank at index `to` of the group."""
    group.count("send", tensor.nbytes)
    tensor = tensor.contiguous()
    work = dist.isend(tensor, dst=group.ranks[to], group=group.process_group)
    return Pending(tensor, cast(dist.Work, work), group=group)


def receive(out: Tensor, group: Group, source: int) -> Tensor:
    """Wait for what the rank at index `source` of the group sends, into `out`."""
    _call(group, dist.recv, out, src=group.ranks[source], group=group.process_group)
    return out


def exchange_async(
    sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]], group: Group, device: torch.device
) -> Pending:
    """Start copying tensors between ranks: `sent[r]`, in order, into what rank r gives as `received[this rank]`.

    Each rank gives one list for each rank of the group, itself included. The two lists of a pair of ranks agree in
    shapes and dtypes, which may differ from tensor to tensor. One all-to-all of bytes, in buffers on `device`: `sent`
    is copied at once, and `received` is complete after the wait.
    """
    if group.size == 1:
        for source, target in zip(sent[0], received[0], strict=True):
            target.copy_(source)
        return Pending(torch.empty(0, device=device))
    sent_bytes = [sum(map(_slot_bytes, tensors)) for tensors in sent]
    received_bytes = [sum(map(_slot_bytes, tensors)) for tensors in received]
    outgoing = torch.zeros(sum(sent_bytes), dtype=torch.uint8, device=device)
    incoming = torch.zeros(sum(received_bytes), dtype=torch.uint8, device=device)
    for slot, tensor in _slots(outgoing, sent):
        slot.copy_(tensor)
    work: dist.Work | None = None
    if group.sends_equal_runs:
        incoming = _all_to_all_of_equal_runs(outgoing, group, sent_bytes, received_bytes)
    else:
        group.count("all_to_all", max(len(outgoing), len(incoming)))
        work = _exchange(incoming, outgoing, group, received_bytes, sent_bytes, overlap=True)

    def finish() -> None:
        for slot, tensor in _slots(incoming, received):
            tensor.copy_(slot)

    return Pending(incoming, work, finish, group)


def _slot_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor on the wire, with the padding that lets any dtype follow."""
    return -(-tensor.nbytes // 8) * 8


def _slots(buffer: Tensor, tensors: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    start = 0
    for tensor in chain.from_iterable(tensors):
        yield buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape), tensor
        start += _slot_bytes(tensor)


def barrier(group: Group) -> None:
    """Wait until every rank of the group has called this. Torch's barrier warns where it has to guess the device."""
    any_rank(False, group)


# ---- collectives with a gradient (the f and g of Megatron-LM, arXiv:1909.08053 §3 and arXiv:2205.05198 §4.2.2)
#
# Each is the gradient of its partner, so that gradients of gradients are right too. What is joined or split, all ranks
# use alike.


def _split(x: Tensor, group: Group, dim: int) -> Tensor:
    check_divides(x, dim, group)
    return x.chunk(group.size, dim=dim)[group.rank].contiguous()


_PAIRS: dict[str, tuple[Callable[[Tensor, Group], Tensor], str]] = {
    "copy": (lambda x, _: x.view_as(x), "reduce"),
    "reduce": (lambda x, group: all_reduce_(x.contiguous().clone(), group), "copy"),
    "gather": (all_gather, "scatter_sum"),
    "scatter_sum": (reduce_scatter, "gather"),
    "join_first": (all_gather, "split_first"),
    "split_first": (partial(_split, dim=0), "join_first"),
    "join_last": (lambda x, group: torch.cat(all_gather(x.unsqueeze(0), group).unbind(0), dim=-1), "split_last"),
    "split_last": (partial(_split, dim=-1), "join_last"),
}
"""Each operation by its name, with the name of the one that its gradient goes through."""


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, name: str) -> Tensor:
        ctx.group = group
        ctx.name = name
        y = _PAIRS[name][0](x, group)
        # torch 2.11, traced, drops the gradient of an output that was written in place or is an unchanged input.
        return y.view_as(y) if torch.compiler.is_compiling() else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _apply(_PAIRS[ctx.name][1], grads[0], ctx.group), None, None


def _apply(name: str, x: Tensor, group: Group) -> Tensor:
    if group.size == 1:
        return x
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return cast(Tensor, _Collective.apply(x, group, name))  # type: ignore[no-untyped-call]
    # In a backward pass a node of the graph would cost the host as much time as an operator, for nothing.
    return _PAIRS[name][0](x, group)


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Identity; its gradient is summed over the group. Enters a region whose ranks each use all of `x`."""
    return _apply("copy", x, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Sum over the group; the gradient passes unchanged. Leaves a region whose ranks each hold a partial sum."""
    return _apply("reduce", x, group)


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """`[S/g, …]` → `[S, …]` along dim 0; the gradient is reduce-scattered (each rank used all of it)."""
    return _apply("gather", x, group)


def scatter_sum_sequence(x: Tensor, group: Group) -> Tensor:
    """`[S, …]` partial sums → `[S/g, …]` sums along dim 0; the gradient is gathered."""
    return _apply("scatter_sum", x, group)


def gather_or_copy(x: Tensor, group: Group, *, sequence_parallel: bool) -> Tensor:
    """Apply `gather_sequence` or `copy_to_group`, the collective before a layer whose ranks each use all of x."""
    return _apply("gather" if sequence_parallel else "copy", x, group)


def scatter_or_reduce(x: Tensor, group: Group, *, sequence_parallel: bool) -> Tensor:
    """Sum what a layer leaves on each rank: for its own rows (`scatter_sum_sequence`) or all (`reduce_from_group`)."""
    return _apply("scatter_sum" if sequence_parallel else "reduce", x, group)


def split_sequence(x: Tensor, group: Group) -> Tensor:
    """`[S, …]`, equal on all ranks → this rank's `[S/g, …]`; the gradient is gathered."""
    return _apply("split_first", x, group)


def gather_last(x: Tensor, group: Group) -> Tensor:
    """All-gather along the last dim, `[…, N/g]` → `[…, N]`; each rank keeps its own part of the gradient."""
    return _apply("join_last", x, group)


def split_last(x: Tensor, group: Group) -> Tensor:
    """Keep this rank's run of the last dim, `[…, N]`, equal on all ranks → `[…, N/g]`; the gradient is gathered."""
    return _apply("split_last", x, group)


_Item = TypeVar("_Item")


def union(items: Iterable[_Item], group: Group) -> list[_Item]:
    """All-gather the items of a group's ranks, each item once, in the same order on every rank.

    Where no rank has one, as in a healthy job, the ranks exchange a flag and no more.
    """
    local_items = list(items)
    if not any_rank(bool(local_items), group):
        return []
    by_rank = all_gather_objects(local_items, group)
    # Not a set, whose order may differ from rank to rank.
    return list(dict.fromkeys(chain.from_iterable(by_rank)))


def broadcast_value(parameter: nn.Parameter, group: Group) -> None:
    """Broadcast a parameter's value from the group's first rank, whatever its dtype and memory format."""
    if group.size == 1 or not parameter.numel():
        return
    value = parameter.detach()
    contiguous = value.contiguous()
    # As bytes: backends lack broadcasts of some dtypes.
    broadcast_(contiguous.view(-1).view(torch.uint8), group)
    if contiguous is not value:
        value.copy_(contiguous)


def raise_on_all_ranks(problems: list[str], group: Group) -> None:
    """Collective: gather the problems of a group's ranks, and raise them on every rank as one ConfigError, or none."""
    if all_problems := union(problems, group):
        raise ConfigError(all_problems)
