"""Flat buckets: parameters, gradients and masters one after the other, cut evenly over the data-parallel ranks.

A parameter's `.data` and `.grad` become views into the bucket: one collective moves many of them, nothing is copied.
Rank r of n owns elements `[r·N/n, (r+1)·N/n)` of a bucket of N (padded to divide).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise import comm, placement
from shardwise._torch_private import version_of
from shardwise.comm import Pending
from shardwise.mesh import Group
from shardwise.plan.buckets import offsets_and_length, packed


@dataclass(frozen=True)
class Dtypes:
    """Of accumulated gradients (None: the parameter's), their reduction (None: as accumulated), masters and state."""

    gradient: torch.dtype | None
    reduce: torch.dtype | None
    optimizer: torch.dtype


class Bucket:
    """Some parameters of one parameter group and dtype, brought to the values of the group's first rank.

    Attributes:
        gradients, values: flat buffers of all N elements; `parameters[i]` and its gradient are views at `offsets[i]`.
        owned: this rank's part.
        gradient: the owned part of `gradients`.
        master: the owned part in the optimizer's dtype, `separate` unless the dtypes agree: then it is the parameters'
            own memory.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        *,
        shard: bool,
        dtypes: Dtypes,
    ) -> None:
        self.parameters, self.group = list(parameters), group
        self.sharded = shard and group.size > 1
        parts = group.size if self.sharded else 1
        self.offsets, self.numel = offsets_and_length([p.numel() for p in self.parameters], parts)
        first = parameters[0]
        self.gradients = torch.zeros(self.numel, dtype=dtypes.gradient or first.dtype, device=first.device)
        self.values = torch.zeros(self.numel, dtype=first.dtype, device=first.device)
        self.reduce_dtype = dtypes.reduce or self.gradients.dtype
        share = self.numel // parts
        start = share * group.rank if self.sharded else 0
        self.owned = slice(start, start + share)
        self._gradient_views = self._views(self.gradients)
        for p, view, gradient in zip(self.parameters, self._views(self.values), self._gradient_views, strict=True):
            view.copy_(p.detach())
            p.data = view
            if p.grad is not None:
                gradient.copy_(p.grad.to_dense())
                p.grad = None
            if p.grad_dtype != self.gradients.dtype:
                p.grad_dtype = self.gradients.dtype
        comm.broadcast_(self.values, group)
        self.attach_gradients()
        self.gradient = self.gradients[self.owned]
        mine = self.values[self.owned]
        dtype = mine.dtype if mine.dtype == torch.float64 else dtypes.optimizer
        self.separate = mine.dtype != dtype
        self.master = nn.Parameter(mine.to(dtype))
        self._pending: Pending | None = None
        self.reset()

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat buffer, in the parameter's own memory format."""
        formats = [torch.empty_like(p, device="meta").stride() for p in self.parameters]
        return [
            flat.as_strided(p.shape, strides, offset)
            for p, strides, offset in zip(self.parameters, formats, self.offsets, strict=True)
        ]

    def reset(self) -> None:
        """Forget what was said to be ready or reduced, once what is under way has arrived."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = None
        self.reduced = False
        self.ready: set[int] = set()

    def attach_gradients(self) -> None:
        """Make every `.grad` the bucket's view again."""
        for p, view in zip(self.parameters, self._gradient_views, strict=True):
            p.grad = view

    def adopt(self, index: int) -> None:
        """Take over a gradient that autograd made anew because somebody had dropped or replaced the view."""
        p, view = self.parameters[index], self._gradient_views[index]
        if p.grad is view:
            return
        if p.grad is None:
            view.zero_()
        else:
            view.copy_(p.grad.to_dense())
        p.grad = view

    def check_parameters(self) -> None:
        """Raise if somebody froze a parameter, or gave it other memory where an update would not reach it."""
        for p, o in zip(self.parameters, self.offsets, strict=True):
            moved = p.data_ptr() != self.values.data_ptr() + o * self.values.element_size()
            if moved or not p.requires_grad:
                change = "moved to other memory (by model.to(…) or .data = …)" if moved else "frozen"
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} was {change} after its optimizer was made: make it again"
                )

    def adopt_values(self) -> None:
        """Take over elements that somebody changed (load_state_dict, clamp_): those to which no master rounds."""
        if self.separate:
            mine, master = self.values[self.owned], self.master.detach()
            torch.where(mine == master.to(mine.dtype), master, mine.to(master.dtype), out=master)

    # ---- one optimizer step

    def start_reduction(self) -> None:
        """Start summing gradients over the group: a reduce-scatter into the owned part, or an all-reduce."""
        for index in range(len(self.parameters)):
            self.adopt(index)
        self.reduced = True
        if self.group.size > 1:
            wire = self.gradients.to(self.reduce_dtype)
            if self.sharded:
                self._pending = comm.reduce_scatter_async(wire, self.group, out=wire[self.owned])
            else:
                self._pending = comm.all_reduce_async(wire, self.group)
        self.note_gradients()

    def finish_reduction(self) -> None:
        """Wait for the sum; it is then in `gradient`."""
        self.check_gradients()
        if self._pending is not None:
            total = self._pending.wait()
            self._pending = None
            if total.dtype != self.gradient.dtype:
                self.gradient.copy_(total)
        self.note_gradients()

    def note_gradients(self) -> None:
        """Take the gradients as they are now for those of the step: `check_gradients` objects to later changes."""
        self._version = version_of(self.gradients)

    def check_gradients(self) -> None:
        """Raise if somebody changed or dropped gradients whose reduction has begun: ranks would use different ones."""
        dropped = any(p.grad is not view for p, view in zip(self.parameters, self._gradient_views, strict=True))
        if dropped or version_of(self.gradients) != self._version:
            change = "replaced" if dropped else "changed"
            raise RuntimeError(
                f"gradients were {change} after their reduction over the ranks began: clip "
                "them by optimizer.clip_grad_norm_(max_norm), drop them by optimizer.zero_grad(), and make any other "
                "change before the reduction, without accumulate(last=True)"
            )

    def start_gather(self) -> Pending | None:
        """Bring the updated master back to the parameters and start sending it to the group."""
        mine = self.values[self.owned]
        if self.separate:
            mine.copy_(self.master.detach())
        return comm.all_gather_async(mine, self.group, out=self.values) if self.sharded else None

    def gradient_of(self) -> Tensor:
        """The owned part of the gradients."""
        return self.gradient

    def master_of(self) -> Tensor:
        """The owned part of the masters."""
        return self.master.detach()

    # ---- where the model's elements lie in the owned part

    @property
    def share(self) -> slice:
        """The elements of the owned part that this rank answers for when each is to be stored once.

        All of them, or with state that every rank keeps whole, an equal part.
        """
        owned = len(self.master)
        if self.sharded:
            return slice(0, owned)
        part = -(-owned // self.group.size)
        return slice(min(self.group.rank * part, owned), min((self.group.rank + 1) * part, owned))

    @property
    def elements(self) -> int:
        """Elements of the owned part that are a parameter's, and no padding."""
        boxes = (placement.Box.whole(tuple(p.shape)) for p in self.parameters)
        return sum(length for index, box in enumerate(boxes) for _, length in self.owned_runs(index, box))

    def owned_runs(self, index: int, box: placement.Box) -> list[tuple[int, int]]:
        """A box of parameter `index`, as `(start, length)` runs of the owned part."""
        runs = []
        for offset, length in box.runs(tuple(self.parameters[index].shape)):
            low = max(self.offsets[index] + offset, self.owned.start)
            high = min(self.offsets[index] + offset + length, self.owned.stop)
            if low < high:
                runs.append((low - self.owned.start, high - low))
        return runs


def weak_hook(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A method for parameters to call that does not keep its object alive: they may outlive several optimizers."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(parameter)

    return hook


class PartialGradients:
    """The owned parts of gradients that must still be summed over some ranks, as placements say.

    Args:
        buckets: of this rank.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._views: dict[Group, list[Tensor]] = {}
        for bucket in buckets:
            for index, p in enumerate(bucket.parameters):
                for piece in placement.of_or_whole(p).pieces:
                    if piece.partial and piece.copies.size > 1:
                        runs = bucket.owned_runs(index, piece.local)
                        views = [bucket.gradient[start : start + length] for start, length in runs]
                        self._views.setdefault(piece.copies, []).extend(views)

    def sum_(self) -> None:
        """Sum them; one all-reduce for each group."""
        for group, views in self._views.items():
            if views:
                total = comm.all_reduce_(torch.cat(views), group)
                for view, part in zip(views, total.split([v.numel() for v in views]), strict=True):
                    view.copy_(part)


def make_buckets(
    parameters: Sequence[nn.Parameter],
    group: Group,
    cap_bytes: float,
    *,
    shard: bool,
    dtypes: Dtypes,
) -> list[Bucket]:
    """Buckets of at most `cap_bytes` of gradients, packed as `plan.buckets.packed` says.

    What ranks with other parameters hold too (a weight tied across a pipeline) is apart: its slices must be theirs.
    """
    sizes = [
        ((p.dtype, p.device, _ranks_beyond(p)), p.numel() * (dtypes.gradient or p.dtype).itemsize) for p in parameters
    ]
    return [
        Bucket([parameters[index] for index in indices], group, shard=shard, dtypes=dtypes)
        for indices in packed(sizes, cap_bytes)
    ]


def _ranks_beyond(parameter: nn.Parameter) -> tuple[int, ...]:
    """The ranks with copies of a parameter that is cut over others; those of the group that it is cut over are none."""
    record = placement.of_or_whole(parameter)
    for piece in record.pieces:
        if piece.copies.size > 1 and not set(piece.copies.ranks) <= set(record.group.ranks):
            return piece.copies.ranks
    return ()
