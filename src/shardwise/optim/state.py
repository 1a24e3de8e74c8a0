"""Optimizer state by canonical tensor, as a checkpoint stores it, whatever layout and buckets hold it.

ZeRO-1 keeps state as flat runs of buckets. A run of a local tensor is a few boxes of it, and each box is, through the
parameter's placement, a box of a canonical tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardwise.base.tensor_box import Box
from shardwise.config.optimizer_specs import OptimizerSpec
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import Piece, placements
from shardwise.optim.buckets import Bucket, in_order
from shardwise.optim.wrapped_class import is_number, kept_state, unstorable
from shardwise.optim.zero import ZeroRedundancyOptimizer

MASTER = "master"
"""State's name for masters that are not the parameters' own memory, such as fp32 master weights."""
Number: TypeAlias = float | str
"""A number as JSON has it: infinities and NaN, which JSON lacks, are texts that `float` reads."""
STEP = "step"
"""The number by which torch's classes count the steps of a parameter."""
OPTION = "group."
"""Begins the names of numbers that a class keeps in its parameter groups, such as `group.step` of pytorch_optimizer."""


@dataclass(frozen=True)
class StateSlice:
    """A slice of an optimizer's state: a box of a canonical tensor that is one run of a bucket's owned part."""

    bucket: Bucket
    piece: Piece  # piece of the canonical tensor that has the elements
    box: Box  # elements as a box of the canonical tensor
    order: tuple[int, ...]  # dimensions of the box from the slowest to the fastest in the run
    start: int  # offset of the run in the bucket's owned part

    def of(self, flat: Tensor) -> Tensor:
        """Return the box in a flat tensor over the bucket's owned part: a writable view of shape `box.size`."""
        return in_order(flat[self.start : self.start + self.box.numel], self.box.size, self.order)


def state_slices(
    model: nn.Module, optimizer: ZeroRedundancyOptimizer, *, only_share: bool = True
) -> Iterator[StateSlice]:
    """Yield the slices of buckets that this rank saves: over the data-parallel ranks, each element of the model once.

    Ranks that hold copies of a piece (a norm, a replicated K/V head) all yield it.

    Args:
        only_share: False yields all that this rank owns, which other ranks (`Bucket.copies`) may own too.
    """
    records = {parameter: record for _, parameter, record in placements(model, optimizer.tensor)}
    for bucket in optimizer.buckets:
        within = bucket.share if only_share else None
        for index, parameter in enumerate(bucket.parameters):
            for piece, box, order, start in bucket.owned_boxes(index, records[parameter].pieces, within):
                yield StateSlice(bucket, piece, box, order, start)


def weight_slices(
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer | None,
    tensor: Group | None = None,
    *,
    only_share: bool = False,
) -> Iterator[tuple[Piece, Box, Tensor, bool]]:
    """Yield this rank's weights: of parameters that ZeRO-3 frees the parts that this rank owns, of others all.

    Yields:
        a piece, a box of its canonical tensor, a view of the box's values, and True for a part of a freed parameter.

    Args:
        only_share: of a part that several ranks own, only the share that this rank saves.
    """
    freed: set[nn.Parameter] = set()
    if optimizer is not None:
        freed = {p for bucket in optimizer.buckets if bucket.frees_values for p in bucket.parameters}
    for _, parameter, record in placements(model, tensor):
        for piece in record.pieces:
            if piece.box.numel and parameter not in freed:
                yield piece, piece.box, piece.of(parameter.detach()), False
    if optimizer is not None and freed:
        for part in state_slices(model, optimizer, only_share=only_share):
            if part.bucket.frees_values:
                yield part.piece, part.box, part.of(part.bucket.shard), True


def state_tensors(optimizer: ZeroRedundancyOptimizer) -> dict[str, dict[Bucket, Tensor]]:
    """Return the optimizer's state by name: a flat tensor over the owned part of each bucket.

    Names are those of the wrapped class, such as `exp_avg`, and `master` if masters are separate.
    """
    flats: dict[str, dict[Bucket, Tensor]] = {}
    for bucket in optimizer.buckets:
        for name, value in optimizer.inner.state[bucket.master].items():
            if isinstance(value, Tensor) and value.shape == bucket.master.shape:
                flats.setdefault(name, {})[bucket] = value
        if bucket.separate:
            flats.setdefault(MASTER, {})[bucket] = bucket.master.detach()
    return flats


def names_by_bucket(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> dict[Bucket, list[str]]:
    """Return the canonical names of the tensors of which each bucket holds a part."""
    names = {parameter: [piece.name for piece in record.pieces] for _, parameter, record in placements(model)}
    return {bucket: [name for p in bucket.parameters for name in names[p]] for bucket in optimizer.buckets}


def state_numbers(optimizer: ZeroRedundancyOptimizer) -> list[dict[str, Number]]:
    """Return the numbers that the wrapped optimizer keeps for each bucket, such as the count of its steps."""
    options = _options_by_bucket(optimizer)
    changed = optimizer._updates.changed_options
    return [
        {
            name: number if math.isfinite(number := float(value)) else str(number)
            for name, value in optimizer.inner.state[bucket.master].items()
            if is_number(value, bucket.master)
        }
        | {
            OPTION + name: value if math.isfinite(value) else str(value)
            for name, value in options[bucket].items()
            if name in changed
        }
        for bucket in optimizer.buckets
    ]


def _options_by_bucket(optimizer: ZeroRedundancyOptimizer) -> dict[Bucket, dict[str, Any]]:
    """Return the parameter group of each bucket, whose options count in the next step."""
    bucket_of = {bucket.master: bucket for bucket in optimizer.buckets}
    groups = zip(optimizer.param_groups, optimizer.inner.param_groups, strict=True)
    return {bucket_of[master]: outer for outer, inner in groups for master in inner["params"]}


def unstorable_states(optimizer: ZeroRedundancyOptimizer) -> list[str]:
    """Return the entries of the optimizer's state that no checkpoint stores, with their kinds."""
    kinds: dict[str, None] = {}  # a set in order
    for bucket in optimizer.buckets:
        kinds |= dict.fromkeys(unstorable(optimizer.inner.state[bucket.master], bucket.master))
    return list(kinds)


def kept_states(optimizer: ZeroRedundancyOptimizer) -> dict[Bucket, dict[str, Any]]:
    """Return the state that the wrapped class makes for each bucket in its first step, by the options of its group."""
    options = _options_by_bucket(optimizer)
    made = {id(group): kept_state(optimizer._make_inner, group) for group in optimizer.param_groups}
    return {bucket: made[id(group)] for bucket, group in options.items()}


def state_bytes(optimizer: ZeroRedundancyOptimizer, spec: OptimizerSpec, *, all_masters: bool) -> int:
    """Return bytes of the state that an optimizer's first step makes, and of its masters: separate ones, or all."""
    bucket_of = {bucket.master: bucket for bucket in optimizer.buckets}
    total = 0
    for group in optimizer.inner.param_groups:
        for master in group["params"]:
            matrices = master.numel() if group.get("use_muon") else 0
            master_bytes = master.itemsize if all_masters or bucket_of[master].separate else 0
            state = (optimizer.state_dtype or master.dtype).itemsize
            total += spec.kept_bytes(master.numel(), matrices, master=master_bytes, state=state)
    return total


def kept_bytes(model: nn.Module, optimizer: ZeroRedundancyOptimizer, state: int) -> dict[str, int]:
    """Return bytes by kind that an optimizer's buckets keep on this rank's device from step to step.

    state: bytes of masters and states, which may be on the host.
    """
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    on_host = any(bucket.on_host for bucket in optimizer.buckets)
    return {
        "parameters": frozen + sum(bucket.value_bytes for bucket in optimizer.buckets),
        "gradients": sum(bucket.gradient_bytes for bucket in optimizer.buckets),
        "optimizer": 0 if on_host else state,
    }


def begin_restoring(
    optimizer: ZeroRedundancyOptimizer,
    names: Sequence[str],
    steps: int,
    numbers: Sequence[Mapping[str, Number]] | None = None,
) -> None:
    """Give the wrapped optimizer the state of one that did `steps` steps; its tensors are 0 and wait to be filled.

    A bucket gets the entries that the class keeps with the options of the bucket's parameter group.

    Args:
        steps: number of steps of the whole optimizer.
        numbers: numbers of each bucket; None: the count of steps alone, as checkpoints of earlier versions have it.
    """
    inner = optimizer.inner
    if numbers is None:
        numbers = [{STEP: steps}] * len(optimizer.buckets)
        earlier_state = {STEP: torch.tensor(0.0, device="cpu"), **dict.fromkeys(names)}
        kept = dict.fromkeys(optimizer.buckets, earlier_state)
    else:
        kept = kept_states(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for index, (bucket, saved_numbers) in enumerate(zip(optimizer.buckets, numbers, strict=True)):
        bucket_state = kept[bucket]
        state[index] = {
            name: _like(bucket_state[name], value) for name, value in saved_numbers.items() if name in bucket_state
        }
    groups = inner.state_dict()["param_groups"]
    inner.load_state_dict({"state": state if steps else {}, "param_groups": groups})
    if steps:
        options = _options_by_bucket(optimizer)
        # `load_state_dict` would give tensors and numbers the dtype of the masters.
        for index, bucket in enumerate(optimizer.buckets):
            entries = inner.state[bucket.master]
            for name, value in state[index].items():
                if name != STEP and isinstance(value, Tensor):
                    entries[name] = value.to(bucket.master.device)
            for name, value in numbers[index].items():
                if name.startswith(OPTION):
                    options[bucket][name.removeprefix(OPTION)] = float(value) if isinstance(value, str) else value
                    optimizer._updates.changed_options.add(name.removeprefix(OPTION))
            for name in names:
                if name in kept[bucket]:
                    entries[name] = torch.zeros_like(bucket.master, dtype=optimizer.state_dtype)
    optimizer.steps = steps


def _like(template: Any, value: Number) -> Any:
    """Return a number as the class keeps it: a tensor of the template's dtype, an int or a float."""
    if isinstance(template, Tensor):
        return torch.full_like(template, float(value))
    return type(template)(float(value))


@torch.no_grad()
def finish_restoring(optimizer: ZeroRedundancyOptimizer) -> None:
    """Bring an optimizer's state and parameters to all ranks that keep them, from those that read them; collective."""
    restored = state_tensors(optimizer)
    for bucket in optimizer.buckets:
        if bucket.copies.size > 1:
            # Each rank has read an equal share of the state that several keep.
            flats = {MASTER: bucket.master.detach()}
            flats |= {name: by_bucket[bucket] for name, by_bucket in restored.items() if bucket in by_bucket}
            for flat in flats.values():
                # Shorter shares are padded, on the device of the group, as the state may be in the host's memory.
                longest = -(-len(flat) // bucket.copies.size)
                padded_share = torch.zeros(longest, dtype=flat.dtype, device=bucket.shard.device)
                padded_share[: bucket.share.stop - bucket.share.start] = flat[bucket.share]
                flat.copy_(collectives.all_gather(padded_share, bucket.copies)[: len(flat)])
        gather = bucket.start_gather()
        if gather is not None:
            gather.wait()
