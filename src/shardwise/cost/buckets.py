"""The flat buckets that one rank's parameters and gradients lie in: their sizes with padding, and what a slice owns."""

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
        share = self.elements // self.slices
        low = share * data_rank if self.slices > 1 else 0
        return sum(
            max(min(offset + one.elements, low + share) - max(offset + one.partial_from, low), 0)
            for offset, one in self.parameters
            if one.partial_over == ranks
        )


def bucket_shapes(case: Case) -> list[BucketShape]:
    """Buckets of at most `optimizer.bucket_mib` of gradients, matrices (which decay) apart from vectors.

    Filled from the last parameter to the first; a larger parameter has a bucket to itself.
    """
    optimizer, layout = case.config.optimizer, case.layout
    cap = optimizer.bucket_mib * _MIB
    gradient = DTYPE_BYTES[case.precision.gradient]
    slices = layout.data if optimizer.zero else 1
    stored = list(local_parameters(case.model, layout.tensor, layout.sequence))
    shapes = []
    for matrices in (True, False):
        bucket: list[LocalParameter] = []
        for parameter in reversed([one for one in stored if one.matrix == matrices]):
            if bucket and gradient * (sum(one.elements for one in bucket) + parameter.elements) > cap:
                shapes.append(_shape(bucket, slices))
                bucket = []
            bucket.append(parameter)
        shapes.append(_shape(bucket, slices))
    return shapes


def _shape(parameters: Iterable[LocalParameter], slices: int) -> BucketShape:
    placed, end = [], 0
    for parameter in parameters:
        placed.append((end, parameter))
        end += _aligned(parameter.elements, ALIGNMENT)
    return BucketShape(tuple(placed), _aligned(end, ALIGNMENT * slices), slices)


def _aligned(elements: int, to: int) -> int:
    return -(-elements // to) * to
