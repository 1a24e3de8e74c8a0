"""Flat buckets: parameters, gradients and masters one after the other, cut evenly over the data-parallel ranks.

A parameter's `.data` and `.grad` become views into the bucket, so that one collective moves many of them and nothing is
copied. Rank r of n owns elements `[r·N/n, (r+1)·N/n)` of a bucket of N elements, padded so that n divides N. The cut
follows no parameter's border: a rank may own the end of one parameter and the beginning of the next.

The stages of ZeRO say what a rank keeps whole between its uses: at stage 1 gradients and parameters, at stage 2
parameters alone, at stage 3 neither. What is not kept has memory only while it is used (`flat_memory.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, divisors, listing, nearest_numbers
from shardwise.base.tensor_box import Box
from shardwise.distributed import collectives, devices, placement
from shardwise.distributed.collectives import Pending
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import Piece
from shardwise.distributed.torch_private import version_of
from shardwise.optim.bucket_layout import (
    FIRST_PLACE,
    UnitPlace,
    bucket_bytes,
    inverse,
    memory_order,
    offsets_and_length,
    packed,
)
from shardwise.optim.flat_memory import allocate, has_memory, mark_gathered, mark_released, release
from shardwise.optim.gradient_groups import GroupSums


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of a bucket.

    Attributes:
        gradient: dtype of accumulated gradients; None: the parameter's.
        reduce: dtype of gradients while they are summed over the ranks; None: as accumulated.
        optimizer: dtype of masters and state.
    """

    gradient: torch.dtype | None
    reduce: torch.dtype | None
    optimizer: torch.dtype


@dataclass(frozen=True)
class Sharding:
    """The cut of buckets over the data-parallel ranks, which are `ranks` × `copies`.

    Attributes:
        stage: of ZeRO. 0: nothing is cut; 1: masters and the optimizer's state; 2: gradients too; 3: parameters too.
        ranks: ranks over which each bucket is cut; one rank at stage 0.
        copies: ranks that own the same part of each bucket.
    """

    stage: int
    ranks: Group
    copies: Group

    @staticmethod
    def of(stage: int, data: Group, replicate: int) -> Sharding:
        """Cut over runs of neighbouring data-parallel ranks, `replicate` of them, which hold copies of each other."""
        if stage == 0:
            return Sharding(stage, Group(), data)
        if data.size % replicate:
            raise ConfigError(
                f"replicate ({replicate}) must divide the number of data-parallel ranks ({data.size}): set it to "
                f"{listing(map(str, nearest_numbers(replicate, divisors(data.size))), 'or')}"
            )
        ranks = data.split(data.size // replicate)
        place = data.rank % ranks.size
        copies = data.pick(tuple(range(place, data.size, ranks.size)), "copies") if replicate > 1 else Group()
        return Sharding(stage, ranks, copies)


class Bucket:
    """Some parameters of one parameter group and dtype, brought to the values of the group's first rank.

    Attributes:
        group: ranks over which the bucket is cut.
        copies: ranks that own the same part.
        sharded: True if each rank owns a part; False if each rank owns all.
        frees_gradients: True if gradients of all N elements have memory only until they are reduced.
        frees_values: True if all N elements have memory only while they are used (`begin_gather`).
        values: flat buffer of all N elements; `parameters[i]` is a view at `offsets[i]`.
        gradients: flat buffer of the same length for the gradients.
        numel: N, padding included.
        orders: dimensions of each parameter from the slowest to the fastest in memory.
        owned: elements that this rank updates.
        shard: owned part of `values`, which has memory at all times.
        gradient: owned part of the reduced gradients.
        master: owned part in the optimizer's dtype, such as float32 master weights of bfloat16 parameters.
        stage: number of the pipeline stage.
        order: sorts buckets by their first use in a forward pass; those of vectors serve all blocks, and are first.
        has_values: True while `values` are complete on this rank.
        keeps_values: True if freed values are whole, and may be changed, until `keeps_values` is set to False.
        separate: True if the master has another dtype than the parameters; False if it has the same values.
        on_host: True if the master, and so the optimizer's state, is in pinned memory of the host; else a master that
            is not separate is the parameters' own memory.
        head_gradients: flat buffer for the gradients of weights as those of an output head (`placement.head_leaf`);
            None if the bucket has no such weight.
        group_sums: sums over groups of micro-batches, by the parameter or leaf of a head whose gradients they are.
        reduced: True once this step's reduction has begun.
        ready: indices of the parameters whose gradients are complete in this step.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        sharding: Sharding,
        *,
        dtypes: Dtypes,
        place: UnitPlace = FIRST_PLACE,
        on_host: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.stage = place.stage
        self.group = group = sharding.ranks
        self.copies = sharding.copies
        self.sharded = group.size > 1
        self.frees_gradients = self.sharded and sharding.stage >= 2
        # Vectors, such as norms and biases, are too small to be worth a gather.
        has_matrices = any(len(placement.of_or_whole(p).pieces[0].shape) > 1 for p in self.parameters)
        self.frees_values = self.sharded and sharding.stage == 3 and has_matrices
        self.order = (has_matrices, place)
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
        has_gradients = any(p.grad is not None for p in self.parameters)
        self._take_parameters()
        # Replicas begin with equal values, whatever each rank drew.
        for ranks in (self.copies, group):
            collectives.broadcast_(self.values, ranks)
        self.gradient = self.gradients[self.owned]
        if self.frees_gradients:
            self.gradient = self.gradient.clone()
        self.shard = self.values[self.owned]
        if self.frees_values:
            self.shard = self.shard.clone()
        master_dtype = dtype if dtype == torch.float64 else dtypes.optimizer
        self.separate = dtype != master_dtype
        master = self.shard.to(master_dtype)
        self.on_host = on_host
        self.master = nn.Parameter(devices.to_host(master) if on_host else master)
        self._versions = self._parameter_versions()
        self._pending: Pending | None = None
        self._pending_heads: Pending | None = None
        self._gather: Pending | None = None
        self.has_values = True
        self.keeps_values = False
        self._is_summed = False
        self.reset()
        if self.frees_gradients and not has_gradients:
            self._release_gradients()
        self.attach_gradients()
        if self.frees_values:
            self.release_values()

    def _find_leaves(self) -> None:
        """Find the tensors that get gradients, the views into which these are summed, and the gaps between views."""
        ends = [offset + p.numel() for offset, p in zip(self.offsets, self.parameters, strict=True)]
        starts = [*self.offsets[1:], self.numel]
        self._gaps = [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
        self._gradient_views = self._views(self.gradients)
        self.head_gradients: Tensor | None = None
        self._heads: list[tuple[Tensor, Tensor]] = []
        if any(placement.head_leaf(p) is not None for p in self.parameters):
            self.head_gradients = torch.zeros_like(self.gradients)
            leaves = map(placement.head_leaf, self.parameters)
            views = self._views(self.head_gradients)
            self._heads = [(leaf, view) for leaf, view in zip(leaves, views, strict=True) if leaf is not None]
        for leaf, _ in self._heads:
            leaf.grad_dtype = self.gradients.dtype
        self._leaves: list[tuple[Tensor, Tensor]] = [
            *zip(self.parameters, self._gradient_views, strict=True),
            *self._heads,
        ]
        self._places = {leaf: place for place, (leaf, _) in enumerate(self._leaves)}
        self.group_sums = {leaf: GroupSums(view) for leaf, view in self._leaves}

    def _take_parameters(self) -> None:
        """Make the parameters and their gradients, if they have some, views of this bucket."""
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
        return self.shard.nbytes if self.frees_values else self.values.nbytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient buffers that stay from step to step."""
        if self.frees_gradients:
            return self.gradient.nbytes
        return self.gradients.nbytes + (0 if self.head_gradients is None else self.head_gradients.nbytes)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of a flat buffer, with the parameter's own strides.

        A `channels_last` parameter is dense, but not in the order of its indices. `view` would give it other strides,
        and its kernels would become slower ones.
        """
        return [
            in_order(flat[offset : offset + p.numel()], tuple(p.shape), order)
            for p, order, offset in zip(self.parameters, self.orders, self.offsets, strict=True)
        ]

    def reset(self) -> None:
        """Begin a new step: nothing is ready or reduced. Waits for a reduction that is under way."""
        for pending in (self._pending, self._pending_heads):
            if pending is not None:
                pending.wait()
        self._pending = None
        self._pending_heads = None
        self.reduced = False
        self.ready: set[int] = set()

    def attach_gradients(self) -> None:
        """Make every `.grad` the bucket's view again, or None while the gradients have no memory."""
        for leaf, view in self._leaves:
            leaf.grad = view if has_memory(self.gradients) else None

    def zero_gradients(self) -> None:
        """Set all gradients to 0, those of groups that have ended too, and make every `.grad` the bucket's view."""
        if self.frees_gradients:
            self._release_gradients()
            self._is_summed = False
        else:
            for flat in self._gradient_buffers:
                flat.zero_()
        for sums in self.group_sums.values():
            sums.drop()
        self.attach_gradients()

    @property
    def _gradient_buffers(self) -> list[Tensor]:
        return [self.gradients] if self.head_gradients is None else [self.gradients, self.head_gradients]

    def provide_gradients(self) -> None:
        """Give the gradients memory, filled with 0, if they have none; waits for their reduction."""
        if self._allocate_gradients():
            for flat in self._gradient_buffers:
                flat.zero_()

    def _allocate_gradients(self) -> bool:
        """Give the gradients memory, if they have none, of arbitrary values but for 0 between the parameters."""
        if self._pending is not None:
            self.finish_reduction()
        if has_memory(self.gradients):
            return False
        for flat in self._gradient_buffers:
            allocate(flat)
            for gap in self._gaps:
                flat[gap].zero_()
        return True

    def _release_gradients(self) -> None:
        for flat in self._gradient_buffers:
            release(flat)

    def adopt(self, index: int) -> None:
        """Copy a gradient into the bucket that lies elsewhere: the bucket had no memory, or the caller replaced it.

        Args:
            index: number of the parameter; those of the heads' leaves follow.
        """
        leaf, view = self._leaves[index]
        if leaf.grad is view:
            return
        if self.frees_gradients:
            self._allocate_gradients()
        if leaf.grad is not None:
            view.copy_(leaf.grad.to_dense())
        else:
            view.zero_()
        leaf.grad = view

    def end_group(self, leaf: Tensor) -> None:
        """Keep the gradient of a parameter or leaf of a head of the group of micro-batches that ends."""
        if self.frees_gradients:
            self.adopt(self._places[leaf])
        self.group_sums[leaf].end_group()

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
            self._versions = self._parameter_versions()

    def adopt_changes(self) -> None:
        """Let the masters adopt what the user wrote since the last step, as the parameters' versions tell."""
        if self.frees_values:
            if self.keeps_values:
                self.take_values()
        elif self._versions != self._parameter_versions():
            self.adopt_values()

    @property
    def has_comparable_values(self) -> bool:
        """True if the device can compare all parameters with their masters: it has both, and each has other bits."""
        return self.separate and not self.on_host and not self.frees_values

    def differs_from_masters(self) -> Tensor:
        """Return whether a parameter is not what its master rounds to: a bool `[]` on the device."""
        return (self.shard != self.master.detach().to(self.shard.dtype)).any()

    def _parameter_versions(self) -> list[int]:
        return [version_of(p) for p in self.parameters]

    # ---- one optimizer step

    def start_reduction(self) -> None:
        """Start summing gradients over the ranks: a reduce-scatter into the owned part, or an all-reduce."""
        for index in range(len(self._leaves)):
            self.adopt(index)
        for sums in self.group_sums.values():
            sums.join()
        self.reduced = True
        self._pending = self._start_sum(self.gradients)
        if self.head_gradients is not None:
            self._pending_heads = self._start_sum(self.head_gradients)
        if self.frees_gradients:
            # The next backward pass may add to gradients before this sum is complete: they begin elsewhere.
            for leaf, _ in self._leaves:
                leaf.grad = None
        self.note_gradients()

    def _start_sum(self, gradients: Tensor) -> Pending:
        if self.group.size == self.copies.size == 1:
            return Pending(gradients[self.owned])
        wire = gradients.to(self.reduce_dtype)
        if self.sharded:
            return collectives.reduce_scatter_async(wire, self.group, out=wire[self.owned])
        return collectives.all_reduce_async(wire, self.copies)

    @property
    def is_reducing(self) -> bool:
        """True from `start_reduction` to `finish_reduction`."""
        return self._pending is not None

    def finish_reduction(self) -> None:
        """Wait for the sum, if one is under way; it is then in `gradient`, added to those before of this step."""
        self.check_gradients()
        if self._pending is None:
            return
        total = self._finish_sum(self._pending)
        self._pending = None
        if self._is_summed:
            self.gradient.add_(total)
        elif self.frees_gradients or total.dtype != self.gradient.dtype:
            self.gradient.copy_(total)
        if self._pending_heads is not None:
            # Only now: over a pipeline, these two sums are those of two ranks.
            self.gradient.add_(self._finish_sum(self._pending_heads))
            self._pending_heads = None
        if self.frees_gradients:
            self._release_gradients()
            self._is_summed = True
        self.note_gradients()

    def _finish_sum(self, pending: Pending) -> Tensor:
        total = pending.wait()
        return collectives.all_reduce_(total, self.copies) if self.sharded else total

    def note_gradients(self) -> None:
        """Remember the gradients' version: `check_gradients` objects to changes after this."""
        self._version = version_of(self.gradients)

    def check_gradients(self) -> None:
        """Raise if gradients were changed or dropped after their reduction began: ranks would use different ones."""
        if self.frees_gradients:
            return
        dropped = any(p.grad is not view for p, view in zip(self.parameters, self._gradient_views, strict=True))
        if dropped or version_of(self.gradients) != self._version:
            change = "replaced" if dropped else "changed"
            raise RuntimeError(
                f"gradients were {change} after their reduction over the ranks began: clip "
                "them by optimizer.clip_grad_norm_(max_norm), drop them by optimizer.zero_grad(), and make any other "
                "change before the reduction, without accumulate(last=True)"
            )

    def gather_gradients(self) -> None:
        """Bring the reduced gradients to every rank, in `.grad`. For comparisons; `zero_gradients` ends it."""
        if self.sharded:
            if self.frees_gradients:
                self.provide_gradients()
            collectives.all_gather(self.gradient, self.group, out=self.gradients)
            self.attach_gradients()
            self.note_gradients()

    # ---- parameters

    def start_gather(self) -> Pending | None:
        """Bring the updated master back to the parameters and start sending it to the group, unless they are freed."""
        master = self.master.detach()
        if self.on_host and self.separate:
            # The device rounds the weights once they have arrived.
            master = master.to(self.shard.device, non_blocking=True)
        if self.on_host or self.separate:
            self.shard.copy_(master, non_blocking=True)
        if self.frees_values and not self.keeps_values:
            self.release_values()
            return None
        if not self.sharded:
            return None
        return collectives.all_gather_async(self.shard, self.group, out=self.values)

    def begin_gather(self) -> None:
        """Start bringing all elements of freed parameters to this rank, if they have no memory."""
        if not has_memory(self.values):
            allocate(self.values)
            self._gather = collectives.all_gather_async(self.shard, self.group, out=self.values)

    def finish_gather(self) -> None:
        """Wait until the parameters are complete, and let them be read."""
        self.begin_gather()
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
            self.has_values = True
            for p in self.parameters:
                mark_gathered(p)

    def release_values(self) -> None:
        """Release the memory of freed parameters but for the owned part; waits for a gather that is under way."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
        if has_memory(self.values):
            release(self.values)
            self.has_values = False
            for p in self.parameters:
                mark_released(p)

    def take_values(self) -> None:
        """Take over changes of gathered parameters to the owned part and the masters."""
        self.shard.copy_(self.values[self.owned])
        self.adopt_values()

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
        dimension_places = inverse(order_in_memory)
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


def in_order(run: Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Return a view `[*shape]` of a run `[N]` in which the dimensions lie in `order`, the slowest first."""
    return run.view([shape[dim] for dim in order]).permute(inverse(order))


def weak_hook(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Make a hook that calls a method and does not keep its object alive: parameters may outlive several optimizers."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        bound_method = reference()
        if bound_method is not None:
            bound_method(parameter)

    return hook


def make_buckets(
    parameters: Sequence[nn.Parameter],
    sharding: Sharding,
    cap_bytes: float | None,
    *,
    dtypes: Dtypes,
    places: Mapping[nn.Parameter, UnitPlace],
    offload: bool = False,
) -> list[Bucket]:
    """Make buckets of at most `cap_bytes` of gradients each (None: `bucket_bytes`), packed by `bucket_layout.packed`.

    A parameter that ranks of other pipeline stages hold too (a tied weight) has a bucket to itself: the same elements
    must be owned by corresponding ranks of both stages, and the other parameters of the stages differ. So has one with
    `head_gradients`, which are as long as the bucket.

    Args:
        places: pipeline stage and unit of each parameter; one that has none is in the first unit.
        offload: True to keep an accelerator's masters in the host's memory.
    """
    sizes = []
    for i, p in enumerate(parameters):
        place = places.get(p, FIRST_PLACE)
        is_alone = bool(_ranks_beyond(p)) or placement.head_leaf(p) is not None
        kind = (p.dtype, p.device, place.stage, is_alone and i + 1)
        sizes.append((kind, p.numel() * (dtypes.gradient or p.dtype).itemsize, place.unit))
    if cap_bytes is None:
        accelerator = any(p.device.type not in ("cpu", "meta") for p in parameters)
        ranks = sharding.ranks.size * sharding.copies.size
        cap_bytes = bucket_bytes(sum(size for _, size, _ in sizes), ranks, accelerator=accelerator)
    return [
        Bucket(
            [parameters[index] for index in indices],
            sharding,
            dtypes=dtypes,
            place=min(places.get(parameters[index], FIRST_PLACE) for index in indices),
            on_host=offload and parameters[indices[0]].device.type not in ("cpu", "meta"),
        )
        for indices in packed(sizes, cap_bytes)
    ]


def _ranks_beyond(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the ranks that hold copies of a parameter beyond the group that it is cut over, if there are any."""
    record = placement.of_or_whole(parameter)
    for piece in record.pieces:
        if piece.copies.size > 1 and not set(piece.copies.ranks) <= set(record.group.ranks):
            return piece.copies.ranks
    return ()
