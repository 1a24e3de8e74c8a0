"""Optimizer state by canonical tensor, as a checkpoint stores it, from whatever layout and buckets hold it.

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
from shardwise.distributed import collectives
from shardwise.distributed.placement import Piece, placements
from shardwise.optim.buckets import Bucket, in_order
from shardwise.optim.master_update import is_number, kept_state
from shardwise.optim.zero import ZeroRedundancyOptimizer

MASTER = "master"
"""The name under which masters are stored that are not the parameters' own memory."""
Number: TypeAlias = float | str
"""A number as JSON has it: one that is not finite is a text, which `float` reads."""
STEP = "step"
"""The number by which torch's classes count the steps of a parameter."""


@dataclass(frozen=True)
class StateSlice:
    """A box of a canonical tensor that is one run of a bucket's owned part.

    Attributes:
        piece: whose part it is.
        box: of the canonical tensor.
        order: dimensions of the box from the slowest to the fastest in the run.
        start: of the run, in the bucket's owned part.
    """

    bucket: Bucket
    piece: Piece
    box: Box
    order: tuple[int, ...]
    start: int

    def of(self, flat: Tensor) -> Tensor:
        """The box in a flat tensor over the bucket's owned part: a writable view of shape `box.size`."""
        return in_order(flat[self.start : self.start + self.box.numel], self.box.size, self.order)


def state_slices(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> Iterator[StateSlice]:
    """What this rank saves: over the data-parallel ranks, every element of the local model exactly once.

    Ranks that hold copies of one piece (a norm, a replicated K/V head) all have it.
    """
    records = {parameter: record for _, parameter, record in placements(model, optimizer.tensor)}
    for bucket in optimizer.buckets:
        for index, parameter in enumerate(bucket.parameters):
            for piece, box, order, start in bucket.owned_boxes(index, records[parameter].pieces, bucket.share):
                yield StateSlice(bucket, piece, box, order, start)


def state_tensors(optimizer: ZeroRedundancyOptimizer) -> dict[str, dict[Bucket, Tensor]]:
    """By the state's name (`exp_avg`, …, and `master` where those are apart): a flat tensor over each owned part."""
    flats: dict[str, dict[Bucket, Tensor]] = {}
    for bucket in optimizer.buckets:
        for name, value in optimizer.inner.state[bucket.master].items():
            if isinstance(value, Tensor) and value.shape == bucket.master.shape:
                flats.setdefault(name, {})[bucket] = value
        if bucket.separate:
            flats.setdefault(MASTER, {})[bucket] = bucket.master.detach()
    return flats


def names_by_bucket(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> dict[Bucket, list[str]]:
    """Canonical names of the tensors of which a bucket holds a part."""
    names = {parameter: [piece.name for piece in record.pieces] for _, parameter, record in placements(model)}
    return {bucket: [name for p in bucket.parameters for name in names[p]] for bucket in optimizer.buckets}


def state_numbers(optimizer: ZeroRedundancyOptimizer) -> list[dict[str, Number]]:
    """By bucket: the numbers that the wrapped optimizer keeps for it, such as the count of its steps."""
    return [
        {
            name: _as_json(float(value))
            for name, value in optimizer.inner.state[bucket.master].items()
            if is_number(value, bucket.master)
        }
        for bucket in optimizer.buckets
    ]


def unstorable_states(optimizer: ZeroRedundancyOptimizer) -> list[str]:
    """Entries of the state that `state_tensors` and `state_numbers` leave out, each with its kind."""
    kinds = {
        f"{name} ({f'shape {list(value.shape)}' if isinstance(value, Tensor) else type(value).__name__})": None
        for bucket in optimizer.buckets
        for name, value in optimizer.inner.state[bucket.master].items()
        if value is not None and not is_number(value, bucket.master)
        if not isinstance(value, Tensor) or value.shape != bucket.master.shape
    }
    return list(kinds)


def kept_states(optimizer: ZeroRedundancyOptimizer) -> dict[Bucket, dict[str, Any]]:
    """By bucket: the state that the wrapped class makes in its first step, with the options of the bucket's group."""
    bucket_of = {bucket.master: bucket for bucket in optimizer.buckets}
    kept: dict[Bucket, dict[str, Any]] = {}
    for outer, inner in zip(optimizer.param_groups, optimizer.inner.param_groups, strict=True):
        made = kept_state(optimizer._make_inner, outer)
        kept |= {bucket_of[master]: made for master in inner["params"]}
    return kept


def begin_restoring(
    optimizer: ZeroRedundancyOptimizer,
    names: Sequence[str],
    steps: int,
    numbers: Sequence[Mapping[str, Number]] | None = None,
) -> None:
    """Give the wrapped optimizer the state of one that did `steps` steps; its tensors are 0 and wait to be filled.

    A bucket gets what the options of its parameter group make the class keep.

    Args:
        optimizer: whose state this becomes.
        names: of the tensors.
        steps: of the whole optimizer.
        numbers: of each bucket; None: the count of steps alone, as checkpoints of earlier versions have it.
    """
    inner = optimizer.inner
    if numbers is None:
        numbers = [{STEP: steps}] * len(optimizer.buckets)
        made = {STEP: torch.tensor(0.0, device="cpu"), **dict.fromkeys(names)}
        kept = dict.fromkeys(optimizer.buckets, made)
    else:
        kept = kept_states(optimizer)
    state = {
        index: {
            **{name: _like(kept[bucket][name], value) for name, value in of_bucket.items() if name in kept[bucket]},
            **{name: torch.zeros_like(bucket.master) for name in names if name in kept[bucket]},
        }
        for index, (bucket, of_bucket) in enumerate(zip(optimizer.buckets, numbers, strict=True))
    }
    groups = inner.state_dict()["param_groups"]
    inner.load_state_dict({"state": state if steps else {}, "param_groups": groups})
    for index, bucket in enumerate(optimizer.buckets if steps else ()):
        for name, value in state[index].items():
            if name != STEP and name not in names and isinstance(value, Tensor):
                # torch would give it the dtype of the masters, which may be bfloat16.
                inner.state[bucket.master][name] = value.to(bucket.master.device)
    optimizer.steps = steps


def _like(template: Any, value: Number) -> Any:
    """A number of the kind that the class keeps."""
    return torch.full_like(template, float(value)) if isinstance(template, Tensor) else type(template)(float(value))


def _as_json(value: float) -> Number:
    return value if math.isfinite(value) else str(value)


@torch.no_grad()
def finish_restoring(optimizer: ZeroRedundancyOptimizer) -> None:
    """Bring state and parameters to every rank that keeps them, from the ranks that read them; collective."""
    restored = state_tensors(optimizer)
    for bucket in optimizer.buckets:
        if not bucket.sharded:
            flats = {
                MASTER: bucket.master.detach(),
                **{name: by_bucket[bucket] for name, by_bucket in restored.items() if bucket in by_bucket},
            }
            for flat in flats.values():
                _gather_shares(flat, bucket)
        gather = bucket.start_gather()
        if gather is not None:
            gather.wait()


def _gather_shares(flat: Tensor, bucket: Bucket) -> None:
    if bucket.group.size == 1:
        return
    longest = -(-len(flat) // bucket.group.size)
    mine = flat.new_zeros(longest)
    mine[: bucket.share.stop - bucket.share.start] = flat[bucket.share]
    flat.copy_(collectives.all_gather(mine, bucket.group)[: len(flat)])
