"""Flat buckets: parameters, gradients and masters one after the other, cut evenly over the data-parallel ranks.

A parameter's `.data` and `.grad` become views into the bucket, so that one collective moves many of them and nothing is
copied. Rank r of n owns elements `[r·N/n, (r+1)·N/n)` of a bucket of N elements, padded so that n divides N. The cut
follows no parameter's border: a rank may own the end of one parameter and the beginning of the next.

Here a rank keeps gradients and parameters whole between their uses, as at the stages 0 and 1 of ZeRO. What stages 2 and
3 do otherwise is in `freed_buckets.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from shardwise.base.tensor_box import Box
from shardwise.distributed import collectives, placement
from shardwise.distributed.collectives import Pending
from shardwise.distributed.placement import Piece
from shardwise.distributed.torch_private import has_data, version_of
from shardwise.layers.embedding import head_leaf
from shardwise.optim.bucket_layout import FIRST_PLACE, UnitPlace, inverse_order, memory_order, offsets_and_length
from shardwise.optim.sharding import Cut, OptimizerDtypes

Leaf = Tensor | placement.FurtherGradient
"""The owner of a gradient in a bucket."""


class Bucket:
    """Some parameters of one parameter group and dtype, brought to the values of the group's first rank.

    Attributes:
        frees_values: True if all N elements have memory only while they are used.
        group: ranks over which the bucket is cut.
        copies: ranks that own the same part.
        values: flat buffer of all N elements; `parameters[i]` is a view at `offsets[i]`.
        gradients: flat buffer of the same length for the gradients.
        numel: N, padding included.
        orders: dimensions of each parameter from the slowest to the fastest in memory.
        shard: owned part of `values`, which has memory at all times.
        gradient: owned part of the reduced gradients.
        master: owned part in the optimizer's dtype, such as float32 master weights of bfloat16 parameters.
        order: sorts buckets by their first use in a forward pass; those of vectors serve all blocks, and are first.
        separate: True if the master has another dtype than the parameters; False if it has the same values.
        on_host: True if the master, and so the optimizer's state, is in pinned memory of the host; else a master that
            is not separate is the parameters' own memory.
        head_gradients: flat buffer for the gradients of weights as those of an output head (`head_leaf`);
            None if the bucket has no such weight.
        reduced: True once this step's reduction has begun.
        ready: indices of the parameters whose gradients are complete in this step.
    """

    frees_values: ClassVar[bool] = False
    has_values = True
    """True while `values` are complete on this rank."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        cut: Cut,
        *,
        dtypes: OptimizerDtypes,
        place: UnitPlace = FIRST_PLACE,
        on_host: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.stage = place.stage
        self.group = group = cut.ranks
        self.copies = cut.copies
        self.order = (has_matrices(parameters), place)
        self.offsets, self.numel = offsets_and_length([p.numel() for p in self.parameters], group.size)
        dtype = parameters[0].dtype
        device = parameters[0].device
        self.gradients = torch.zeros(self.numel, dtype=dtypes.gradient or dtype, device=device)
        self.values = torch.zeros(self.numel, dtype=dtype, device=device)
        self.reduce_dtype = dtypes.reduce or self.gradients.dtype
        share = self.numel // group.size
        self.owned = slice(share * group.rank, share * (group.rank + 1))
        # `empty_like` gives the strides of a dense tensor: a parameter may be a view with gaps.
        self.orders = [memory_order(p.shape, torch.empty_like(p, device="meta").stride()) for p in self.parameters]
        self._find_leaves()
        self._take_parameters()
        # Replicas begin with equal values, whatever each rank drew.
        for ranks in (self.copies, group):
            collectives.broadcast_(self.values, ranks)
        self.gradient, self.shard = self._own()
        master_dtype = dtypes.of_master(dtype)
        self.separate = dtype != master_dtype
        master = self.shard.to(master_dtype)
        self.on_host = on_host
        self.master = nn.Parameter(_pinned_copy(master) if on_host else master)
        self._versions = list(map(version_of, self.parameters))
        self._pending: list[Pending] = []
        self.reset()
        self.attach_gradients()

    def _find_leaves(self) -> None:
        """Find the tensors that get gradients, and the views into which these are summed."""
        self._gradient_views = self._views(self.gradients)
        self.head_gradients: Tensor | None = None
        self._leaves: list[tuple[Leaf, Tensor]] = [*zip(self.parameters, self._gradient_views, strict=True)]
        leaves = list(map(head_leaf, self.parameters))
        if any(leaf is not None for leaf in leaves):
            self.head_gradients = torch.zeros_like(self.gradients)
            for leaf, view in zip(leaves, self._views(self.head_gradients), strict=True):
                if leaf is not None:
                    leaf.grad_dtype = self.gradients.dtype
                    self._leaves.append((leaf, view))
        further = list(map(placement.further_gradients, self.parameters))
        self._further_gradients = [torch.zeros_like(self.gradients) for _ in further[0]]
        for flat, *gradients in zip(self._further_gradients, *further, strict=True):
            for gradient, view in zip(gradients, self._views(flat), strict=True):
                gradient.grad_dtype = self.gradients.dtype
                self._leaves.append((gradient, view))
        self._gradient_buffers = [self.gradients, *self._further_gradients]
        if self.head_gradients is not None:
            self._gradient_buffers.append(self.head_gradients)
        self._places = {leaf: place for place, (leaf, _) in enumerate(self._leaves)}
        self._group_sums: dict[Leaf, GroupSums] = {}

    def _take_parameters(self) -> None:
        for p, view, gradient in zip(self.parameters, self._views(self.values), self._gradient_views, strict=True):
            if not placement.draw_deferred(p, view):
                view.copy_(p.detach())
            p.data = view
            if p.grad is not None:
                gradient.copy_(p.grad.to_dense())
                p.grad = None
            if p.grad_dtype != self.gradients.dtype:
                p.grad_dtype = self.gradients.dtype

    @property
    def value_bytes(self) -> int:
        """Bytes of the parameters that stay from step to step."""
        return self.values.nbytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient buffers that stay from step to step."""
        return sum(flat.nbytes for flat in self._gradient_buffers)

    def _own(self) -> tuple[Tensor, Tensor]:
        return self.gradients[self.owned], self.values[self.owned]

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of a flat buffer, with the parameter's own strides.

        A `channels_last` parameter is dense, but not in the order of its indices. `view` would give it other strides,
        and its kernels would become slower ones.
        """
        return [
            in_order(flat[offset : offset + p.numel()], tuple(p.shape), order)
            for p, order, offset in zip(self.parameters, self.orders, self.offsets, strict=True)
        ]

    # ---- gradients, until they are reduced

    def reset(self) -> None:
        """Begin a new step: nothing is ready or reduced. Waits for a reduction that is under way."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        self.reduced = False
        self.ready: set[int] = set()

    def attach_gradients(self) -> None:
        """Make every `.grad` the bucket's view again."""
        for leaf, view in self._leaves:
            leaf.grad = view

    def zero_gradients(self) -> None:
        """Set all gradients to 0, those of groups that have ended too, and make every `.grad` the bucket's view."""
        for flat in self._gradient_buffers:
            flat.zero_()
        self._group_sums.clear()
        self.attach_gradients()

    def provide_gradients(self) -> None:
        """Give every leaf a `.grad` in the bucket, for a pass that adds to it by itself; waits for a reduction."""
        if self.is_reducing:
            self.finish_reduction()
        self.attach_gradients()

    def adopt(self, index: int) -> None:
        """Copy a gradient into the bucket that lies elsewhere: the bucket had no memory, or the caller replaced it.

        Args:
            index: number of the parameter; those of the heads' leaves follow.
        """
        leaf, view = self._leaves[index]
        if leaf.grad is view:
            return
        if leaf.grad is not None:
            view.copy_(leaf.grad.to_dense())
        else:
            view.zero_()
        leaf.grad = view

    def keep_local(self, index: int) -> None:
        """Keep the gradient of parameter `index` for this rank alone, in the dtype in which further ones add up."""
        self.adopt(index)

    def end_group(self, leaves: set[Tensor] | None) -> None:
        """Keep the gradients of the group of micro-batches that ends, of some leaves or of all: see `GroupSums`."""
        chosen: set[Leaf] | None = None
        if leaves is not None:
            chosen = {*leaves, *(gradient for leaf in leaves for gradient in placement.further_gradients(leaf))}
        for leaf, view in self._leaves:
            if chosen is None or leaf in chosen:
                self.adopt(self._places[leaf])
                self._group_sums.setdefault(leaf, GroupSums(view)).end_group()

    def spoil(self, norm: Tensor) -> None:
        """Make a gradient NaN if a norm `[]` is not finite; else change nothing. The host does not wait for it."""
        self.gradients[0] += norm * 0
        self.note_gradients()

    # ---- parameters that the user changes

    def check_parameters(self) -> None:
        """Raise if a parameter was frozen, or moved to other memory, which an update would not reach."""
        for p, offset in zip(self.parameters, self.offsets, strict=True):
            moved = self.has_values and p.data_ptr() != self.values.data_ptr() + offset * self.values.element_size()
            if moved or not p.requires_grad:
                change = "moved to other memory (by model.to(…) or .data = …)" if moved else "frozen"
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} was {change} after its optimizer was made: make it again"
                )

    def adopt_values(self) -> None:
        """Copy parameter elements into the masters that were changed since the last step (load_state_dict, clamp_).

        An unchanged element is what its master rounds to; that master keeps its lower bits.
        """
        if self.separate or self.on_host:
            master = self.master.detach()
            values = self.shard.to(master.device)
            is_unchanged = values == master.to(values.dtype)
            torch.where(is_unchanged, master, values.to(master.dtype), out=master)
            self._versions = list(map(version_of, self.parameters))

    def adopt_changes(self) -> None:
        """Let the masters adopt what the user wrote since the last step, as the parameters' versions tell.

        An in-place change raises the version of a parameter. A change through `.data` does not, and neither does one
        by a kernel that torch does not know: only a comparison shows it.
        """
        if self._versions != list(map(version_of, self.parameters)):
            self.adopt_values()

    def differs_from_masters(self) -> Tensor | None:
        """Return whether a parameter is not what its master rounds to, a bool `[]` on the device.

        None if the device has not both, or if they are the same memory.
        """
        if not self.separate or self.on_host:
            return None
        return (self.shard != self.master.detach().to(self.shard.dtype)).any()

    # ---- the reduction of the gradients

    def start_reduction(self) -> None:
        """Start summing gradients over the ranks: a reduce-scatter into the owned part, or an all-reduce."""
        for index in range(len(self._leaves)):
            self.adopt(index)
        for sums in self._group_sums.values():
            sums.join()
        terms = [self.gradients, *self._further_gradients]
        while len(terms) > 1:  # in the order of `collectives.tree_sum`
            terms = [left.add_(right) for left, right in zip(terms[::2], terms[1::2], strict=True)]
        self.reduced = True
        self._pending.append(self._start_sum(self.gradients))
        if self.head_gradients is not None:
            self._pending.append(self._start_sum(self.head_gradients))
        self.note_gradients()

    def _start_sum(self, gradients: Tensor) -> Pending:
        if self.group.size == self.copies.size == 1:
            return Pending(gradients[self.owned])
        wire = gradients.to(self.reduce_dtype)
        if self.group.size > 1:
            return collectives.reduce_scatter_async(wire, self.group, out=wire[self.owned])
        return collectives.all_reduce_async(wire, self.copies)

    @property
    def is_reducing(self) -> bool:
        """True from `start_reduction` to `finish_reduction`."""
        return bool(self._pending)

    def finish_reduction(self) -> None:
        """Wait for the sum, if one is under way; it is then in `gradient`, added to those before of this step."""
        self.check_gradients()
        if not self._pending:
            return
        for number, pending in enumerate(self._pending):
            total = pending.wait()
            if self.group.size > 1:
                collectives.all_reduce_(total, self.copies)
            if number == 0:
                self._take_sum(total)
            else:
                # That of the heads, only now: over a pipeline, these two sums are those of two ranks.
                self.gradient.add_(total)
        self._pending.clear()
        self.note_gradients()

    def _take_sum(self, total: Tensor) -> None:
        # A sum in the dtype of the gradients was made where it belongs.
        if total.dtype != self.gradient.dtype:
            self.gradient.copy_(total)

    def note_gradients(self) -> None:
        """Remember the gradients' version: `check_gradients` objects to changes after this."""
        self._version = version_of(self.gradients)

    def check_gradients(self) -> None:
        """Raise if gradients were changed or dropped after their reduction began: ranks would use different ones."""
        dropped = False
        for p, view in zip(self.parameters, self._gradient_views, strict=True):
            dropped = dropped or p.grad is not view
        if dropped or version_of(self.gradients) != self._version:
            change = "replaced" if dropped else "changed"
            raise RuntimeError(
                f"gradients were {change} after their reduction over the ranks began: clip "
                "them by optimizer.clip_grad_norm_(max_norm), drop them by optimizer.zero_grad(), and make any other "
                "change before the reduction, without accumulate(last=True)"
            )

    def gather_gradients(self) -> None:
        """Bring the reduced gradients to every rank, in `.grad`. For comparisons; `zero_gradients` ends it."""
        if self.group.size > 1:
            self.provide_gradients()
            collectives.all_gather(self.gradient, self.group, out=self.gradients)
            self.note_gradients()

    # ---- parameters

    def start_gather(self) -> Pending | None:
        """Bring the updated master back to the parameters and start sending it to the group, unless they are freed."""
        self._round_masters()
        if self.group.size == 1:
            return None
        return collectives.all_gather_async(self.shard, self.group, out=self.values)

    def _round_masters(self) -> None:
        master = self.master.detach()
        if self.on_host and self.separate:
            # The device rounds the weights once they have arrived.
            master = master.to(self.shard.device, non_blocking=True)
        if self.on_host or self.separate:
            self.shard.copy_(master, non_blocking=True)

    # ---- the model's elements in the owned part

    @property
    def share(self) -> slice:
        """The run of the owned part that this rank saves, so that over all ranks each element is saved once.

        It is the whole owned part; if several ranks own it, an equal part of it.
        """
        owned = len(self.master)
        part = -(-owned // self.copies.size)
        return slice(min(self.copies.rank * part, owned), min((self.copies.rank + 1) * part, owned))

    @property
    def elements(self) -> int:
        """The number of elements of the owned part without padding."""
        boxes = (Box.whole(tuple(p.shape)) for p in self.parameters)
        return sum(length for index, box in enumerate(boxes) for _, length in self.owned_runs(index, box))

    def owned_runs(self, index: int, box: Box, within: slice | None = None) -> Iterator[tuple[int, int]]:
        """Yield a box of parameter `index` as `(start, length)` runs of the owned part, or of a slice of it."""
        within = within or slice(0, self.owned.stop - self.owned.start)
        to_owned = self.offsets[index] - self.owned.start
        runs = box.permuted(self.orders[index]).runs(
            self._memory_shape(index), slice(within.start - to_owned, within.stop - to_owned)
        )
        for offset, length in runs:
            start = max(to_owned + offset, within.start)
            end = min(to_owned + offset + length, within.stop)
            yield start, end - start

    def owned_boxes(
        self, index: int, pieces: Iterable[Piece], within: slice | None
    ) -> Iterator[tuple[Piece, Box, tuple[int, ...], int]]:
        """Yield the part of parameter `index` in the owned part, or a slice of it, as boxes of one run each, in order.

        Yields:
            a piece of the parameter, a box of the piece's canonical tensor, the box's dimensions from the slowest to
            the fastest in memory, and the run's start in the owned part.
        """
        order_in_memory = self.orders[index]
        dimension_places = inverse_order(order_in_memory)
        for piece in pieces:
            # A transposed piece is a matrix, whose dimensions 0 and 1 change places.
            order = tuple(1 - dim for dim in order_in_memory) if piece.transposed else order_in_memory
            for start, length in self.owned_runs(index, piece.local, within):
                offset = start + self.owned.start - self.offsets[index]
                for box in Box.of_run(offset, length, self._memory_shape(index)):
                    yield piece, piece.canonical(box.permuted(dimension_places)), order, start
                    start += box.numel

    def _memory_shape(self, index: int) -> tuple[int, ...]:
        shape = self.parameters[index].shape
        return tuple(shape[dim] for dim in self.orders[index])


def has_matrices(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether a parameter is more than a vector, such as a norm or a bias."""
    return any(len(placement.of_or_whole(p).pieces[0].shape) > 1 for p in parameters)


class GroupSums:
    """Gradients of groups of micro-batches, added in pairs, so that the order of the sum is the same at any layout.

    The micro-batches of a step are D groups of neighbours (`train.data_grain`), of which each data-parallel rank has a
    run. The gradients of a group are added one after the other, those of two neighbouring groups then, and so on: the
    sum over a rank's groups is a node of the binary tree whose upper levels the ranks add (`collectives.tree_sum`).
    """

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient
        self._sums: list[tuple[int, Tensor]] = []
        """At most log2 of the number of groups that have ended, each of another level."""

    def end_group(self) -> None:
        """Keep the gradient of the group that has ended; the next one begins at 0."""
        total = self._gradient.clone()
        level = 0
        while self._sums and self._sums[-1][0] == level:
            total = self._sums.pop()[1].add_(total)
            level += 1
        self._sums.append((level, total))
        self._gradient.zero_()

    def join(self) -> None:
        """Add the sums of all groups before to the gradient of the last one."""
        while self._sums:
            self._gradient.add_(self._sums.pop()[1])


def in_order(run: Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Return a view `[*shape]` of a bucket's run `[N]` in which dimensions lie in `order`, the slowest first."""
    return run.view([shape[dim] for dim in order]).permute(inverse_order(order))


def weak_hook(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Make a parameter's gradient hook that calls a method, and does not keep the optimizer of the method alive."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        bound_method = reference()
        if bound_method is not None:
            bound_method(parameter)

    return hook


def _pinned_copy(tensor: Tensor) -> Tensor:
    """A device's tensor copied to the host's pinned memory, from and to which the host need not wait for copies."""
    host = tensor.cpu()
    return host.pin_memory() if has_data(host) else host
