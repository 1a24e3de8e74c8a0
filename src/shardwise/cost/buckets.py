"""The flat buckets that one rank's parameters and gradients lie in: their sizes with padding, and what a slice owns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.cost.case import Case
from shardwise.cost.params import DTYPE_BYTES, LocalParameter, local_parameters

ALIGNMENT = 32
"""Elements to which each parameter's start in a bucket is aligned; a bucket is padded to this times its slices."""

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

    Filled from the last parameter to the first; a larger parameter has a bucket to itself, as one at both ends of a
    pipeline has. In the order in which they are begun.
    """
    optimizer, layout = case.config.optimizer, case.layout
    cap = optimizer.bucket_mib * _MIB
    gradient = DTYPE_BYTES[case.precision.gradient]
    slices = layout.data if optimizer.zero else 1
    stored = list(local_parameters(case.model, layout.tensor, layout.sequence, local=case.local, stages=case.stages))
    made: list[list[LocalParameter]] = []
    for matrices in (True, False):
        filled: dict[bool, list[LocalParameter]] = {}
        for parameter in reversed([one for one in stored if one.matrix == matrices]):
            bucket = filled.get(parameter.at_both_ends)
            if bucket is None or gradient * (sum(one.elements for one in bucket) + parameter.elements) > cap:
                bucket = filled[parameter.at_both_ends] = []
                made.append(bucket)
            bucket.append(parameter)
    return [_shape(bucket, slices) for bucket in made]


def _shape(parameters: Iterable[LocalParameter], slices: int) -> BucketShape:
    placed, end = [], 0
    for parameter in parameters:
        placed.append((end, parameter))
        end += _aligned(parameter.elements, ALIGNMENT)
    return BucketShape(tuple(placed), _aligned(end, ALIGNMENT * slices), slices)


def _aligned(elements: int, to: int) -> int:
    return -(-elements // to) * to
