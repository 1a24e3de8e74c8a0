"""Sizes of the buckets that hold one rank's parameters and gradients, and what a data-parallel rank owns of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwise.config import DTYPE_BYTES, FamilyConfig
from shardwise.config.stages import Stage
from shardwise.models.parameter_counts import LocalParameter, LocalWidths, local_parameters
from shardwise.optim.bucket_layout import bucket_bytes, offsets_and_length, packed
from shardwise.planner.rank_case import RankCase

_MIB = 2**20


@dataclass(frozen=True)
class BucketShape:
    """One bucket: (offset, parameter) of each parameter, its elements with padding, and the number of equal slices."""

    parameters: tuple[tuple[int, LocalParameter], ...]
    elements: int
    slices: int

    def partial(self, ranks: int, data_rank: int) -> int:
        """Return the elements, in this data-parallel rank's slice, whose gradient is partial over `ranks` ranks."""
        return sum(
            self._owned(offset + parameter.partial_from, offset + parameter.elements, data_rank)
            for offset, parameter in self.parameters
            if parameter.partial_over == ranks
        )

    def at_both_ends(self, unpadded: int, data_rank: int) -> int:
        """Return the elements, in that slice, of a parameter at both ends of a pipeline, without its padding.

        unpadded: elements of the parameter before its padding.
        """
        return sum(
            self._owned(offset, offset + min(unpadded, parameter.elements), data_rank)
            for offset, parameter in self.parameters
            if parameter.at_both_ends
        )

    def _owned(self, start: int, stop: int, data_rank: int) -> int:
        """Return the number of elements from `start` to `stop` of the bucket that are in this rank's slice."""
        share = self.elements // self.slices
        low = share * data_rank if self.slices > 1 else 0
        return max(min(stop, low + share) - max(start, low), 0)


def bucket_shapes(case: RankCase) -> list[BucketShape]:
    """Return the rank's buckets as `optimizer.bucket_mib` sets their size, in the order in which they are begun.

    Matrices, which weight decay applies to, and vectors are in separate buckets. A parameter at both ends of a pipeline
    has a bucket to itself.
    """
    optimizer = case.config.optimizer
    layout = case.layout
    gradient = DTYPE_BYTES[case.precision.gradient]
    stored = (case.model, layout.tensor, layout.sequence_parallel, case.local, case.stages)
    return list(_shapes(stored, gradient, optimizer.bucket_mib, layout.data, optimizer.zero == 1, case.accelerator))


@lru_cache(maxsize=512)
def _shapes(
    model_part: tuple[FamilyConfig, int, bool, LocalWidths, tuple[Stage, ...]],
    gradient: int,
    bucket_mib: float | None,
    data: int,
    zero: bool,
    accelerator: bool,
) -> list[BucketShape]:
    model, tensor, sequence, local, stages = model_part
    stored = list(local_parameters(model, tensor, sequence, local=local, stages=stages))
    slices = data if zero else 1
    shapes = []
    for matrices in (True, False):
        group = [parameter for parameter in stored if parameter.matrix == matrices]
        sizes = [(parameter.at_both_ends, gradient * parameter.elements) for parameter in group]
        if bucket_mib is not None:
            most = bucket_mib * _MIB
        else:
            most = bucket_bytes(sum(size for _, size in sizes), data, accelerator=accelerator)
        for indices in packed(sizes, most):
            members = [group[index] for index in indices]
            offsets, length = offsets_and_length([member.elements for member in members], slices)
            shapes.append(BucketShape(tuple(zip(offsets, members, strict=True)), length, slices))
    return shapes
