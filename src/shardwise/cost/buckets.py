"""Sizes of the flat buckets that one rank's parameters and gradients lie in, and what a slice of them owns."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config import DTYPE_BYTES
from shardwise.cost.case import Case
from shardwise.plan.buckets import offsets_and_length, packed
from shardwise.plan.parameters import LocalParameter, local_parameters

_MIB = 2**20


@dataclass(frozen=True)
class BucketShape:
    """One bucket: its parameters at their offsets, its padded size, and into how many equal slices it is cut."""

    parameters: tuple[tuple[int, LocalParameter], ...]
    elements: int
    slices: int

    def partial(self, ranks: int, data_rank: int) -> int:
        """Elements with a gradient that is partial over `ranks` ranks, in the slice of this data-parallel rank."""
        return sum(
            self._owned(offset + one.partial_from, offset + one.elements, data_rank)
            for offset, one in self.parameters
            if one.partial_over == ranks
        )

    def at_both_ends(self, held: int, data_rank: int) -> int:
        """Elements in that slice of a parameter at both ends of the pipeline, where `held` of it are no padding."""
        return sum(
            self._owned(offset, offset + min(held, one.elements), data_rank)
            for offset, one in self.parameters
            if one.at_both_ends
        )

    def _owned(self, start: int, stop: int, data_rank: int) -> int:
        """How many elements from `start` to `stop` a slice has."""
        share = self.elements // self.slices
        low = share * data_rank if self.slices > 1 else 0
        return max(min(stop, low + share) - max(start, low), 0)


def bucket_shapes(case: Case) -> list[BucketShape]:
    """Buckets of at most `optimizer.bucket_mib` of gradients, matrices (which decay) apart from vectors.

    A parameter at both ends of a pipeline has a bucket to itself. In the order in which they are begun.
    """
    optimizer, layout = case.config.optimizer, case.layout
    gradient = DTYPE_BYTES[case.precision.gradient]
    slices = layout.data if optimizer.zero else 1
    stored = list(local_parameters(case.model, layout.tensor, layout.sequence, local=case.local, stages=case.stages))
    shapes = []
    for matrices in (True, False):
        group = [one for one in stored if one.matrix == matrices]
        sizes = ((one.at_both_ends, gradient * one.elements) for one in group)
        for indices in packed(sizes, optimizer.bucket_mib * _MIB):
            members = [group[index] for index in indices]
            offsets, length = offsets_and_length([one.elements for one in members], slices)
            shapes.append(BucketShape(tuple(zip(offsets, members, strict=True)), length, slices))
    return shapes
