"""Optimizer state by canonical tensor, as a checkpoint stores it, from whatever layout and buckets hold it.

ZeRO-1 keeps state as flat runs of buckets. A run of a local tensor is a few boxes of it, and each box is, through the
parameter's placement, a box of a canonical tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise._torch_private import step_optimizer
from shardwise.boxes import Box
from shardwise.optim.buckets import Bucket
from shardwise.optim.elementwise import trial_options
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.placement import Piece, placements

MASTER = "master"
"""The name under which masters are stored that are not the parameters' own memory."""


@dataclass(frozen=True)
class StateSlice:
    """A box of a canonical tensor that is one run of a bucket's owned part.

    Attributes:
        piece: whose part it is.
        box: of the canonical tensor.
        start: of the run, in the bucket's owned part.
    """

    bucket: Bucket
    piece: Piece
    box: Box
    start: int

    def of(self, flat: Tensor) -> Tensor:
        """The box in a flat tensor over the bucket's owned part: a writable view of shape `box.size`."""
        run = flat[self.start : self.start + self.box.numel]
        return run.view(self.box.size[::-1]).t() if self.piece.transposed else run.view(self.box.size)


def state_slices(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> Iterator[StateSlice]:
    """What this rank saves: over the data-parallel ranks, every element of the local model exactly once.

    Ranks that hold copies of one piece (a norm, a replicated K/V head) all have it.
    """
    records = {parameter: record for _, parameter, record in placements(model)}
    for bucket in optimizer.buckets:
        for index, parameter in enumerate(bucket.parameters):
            for piece, box, start in bucket.owned_boxes(index, records[parameter].pieces, bucket.share):
                yield StateSlice(bucket, piece, box, start)


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


def kept_states(optimizer: ZeroRedundancyOptimizer) -> set[str]:
    """Names of the states that the wrapped optimizer makes in its first step, whether it has done one or not."""
    inner, names = optimizer.inner, set()
    groups = inner.param_groups
    try:
        for group in groups:
            trial = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
            trial.grad = torch.zeros_like(trial)
            inner.param_groups = [{**trial_options(group), "params": [trial]}]
            step_optimizer(inner)
            made = inner.state.pop(trial, {})
            names |= {name for name, value in made.items() if isinstance(value, Tensor) and value.shape == trial.shape}
    finally:
        inner.param_groups = groups
    return names


def begin_restoring(optimizer: ZeroRedundancyOptimizer, names: Sequence[str], steps: int) -> None:
    """Give the wrapped optimizer the state of one that did `steps` steps; its tensors are 0 and wait to be filled."""
    state = {
        index: {
            "step": torch.tensor(float(steps), device="cpu"),
            **{name: torch.zeros_like(bucket.master) for name in names},
        }
        for index, bucket in enumerate(optimizer.buckets)
    }
    groups = optimizer.inner.state_dict()["param_groups"]
    optimizer.inner.load_state_dict({"state": state, "param_groups": groups})
    optimizer.steps = steps


@torch.no_grad()
def finish_restoring(optimizer: ZeroRedundancyOptimizer) -> None:
    """Bring state and parameters to every rank that keeps them, from the ranks that read them; collective."""
    restored = state_tensors(optimizer)
    for bucket in optimizer.buckets:
        if not bucket.sharded:
            flats = {
                MASTER: bucket.master.detach(),
                **{name: by_bucket[bucket] for name, by_bucket in restored.items()},
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
    flat.copy_(comm.all_gather(mine, bucket.group)[: len(flat)])
