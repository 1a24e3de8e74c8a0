"""The buckets of a rank, without torch: the parameters of each, its elements and its slices.

Legend: see `estimates/rank_workload.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import merge
from operator import itemgetter

from shardwise.config import DTYPE_BYTES, FamilyConfig
from shardwise.config.layout import Stage
from shardwise.estimates.rank_workload import RankWorkload
from shardwise.models.parameter_counts import LocalParameter, LocalWidths, local_parameters
from shardwise.optim.bucket_layout import bucket_bytes, offsets_and_length, packed

_MIB = 2**20


@dataclass(frozen=True)
class BucketShape:
    """The estimated shape of a bucket: (offset, parameter) of its parameters, padded elements, number of slices."""

    parameters: tuple[tuple[int, LocalParameter], ...]
    elements: int
    slices: int

    @property
    def is_orthogonalized(self) -> bool:
        """True for a bucket of matrices of blocks alone: with Muon, these are in buckets of their own."""
        return all(parameter.is_block_matrix for _, parameter in self.parameters)

    @cached_property
    def has_matrices(self) -> bool:
        """True for a bucket that ZeRO-3 cuts: vectors stay whole."""
        return any(parameter.matrix for _, parameter in self.parameters)

    @property
    def divided_over(self) -> int:
        """The data-parallel ranks that divide the tensors of its kind among them."""
        return self.parameters[0][1].divided_over

    @property
    def stage(self) -> int:
        """The number of the pipeline stage that has the parameters."""
        return self.parameters[0][1].place.stage

    def partial(self, ranks: int, data_rank: int | None = None) -> int:
        """Return the elements whose gradient is partial over `ranks` ranks, in a data-parallel rank's slice, or all."""
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

    def _owned(self, start: int, stop: int, data_rank: int | None) -> int:
        """Return the number of elements from `start` to `stop` of the bucket that are in a rank's slice, or in any."""
        if data_rank is None:
            return stop - start
        share = self.elements // self.slices
        low = share * data_rank if self.slices > 1 else 0
        return max(min(stop, low + share) - max(start, low), 0)


@lru_cache(maxsize=64)
def bucket_shapes(workload: RankWorkload) -> tuple[BucketShape, ...]:
    """Estimate the rank's buckets of gradients by `optimizer.bucket_mib`, in the order in which they are begun.

    Matrices, which weight decay applies to, and vectors are in separate buckets; with Muon also matrices of blocks and
    others. A parameter at both ends of a pipeline has a bucket to itself.
    """
    optimizer = workload.config.optimizer
    layout = workload.layout
    gradient = DTYPE_BYTES[workload.precision.gradient]
    stored = (workload.model, layout.tensor, layout.sequence_parallel, workload.local, workload.stages)
    kinds = ("is_block_matrix", "matrix") if optimizer.spec.orthogonalizes else ("matrix",)
    slices = workload.shard_ranks
    return _shapes(stored, gradient, optimizer.bucket_mib, layout.replicas, slices, workload.accelerator, kinds)


_ModelPart = tuple[FamilyConfig, int, bool, LocalWidths, tuple[Stage, ...]]
"""The model, the tensor-parallel degree, sequence parallelism, the widths and the stages of a rank."""


@lru_cache(maxsize=64)
def _stored(model_part: _ModelPart) -> tuple[LocalParameter, ...]:
    model, tensor, sequence, local, stages = model_part
    parameters = local_parameters(model, tensor, sequence, local=local, stages=stages)
    return tuple(parameter for parameter in parameters if parameter.is_trained)


@lru_cache(maxsize=4096)
def _shapes(
    model_part: _ModelPart,
    gradient: int,
    bucket_mib: float | None,
    data: int,
    slices: int,
    accelerator: bool,
    kinds: tuple[str, ...],
) -> tuple[BucketShape, ...]:
    by_kind: dict[tuple[bool, ...], dict[int, list[tuple[int, LocalParameter]]]] = {}
    for number, parameter in enumerate(_stored(model_part)):
        kind = tuple(getattr(parameter, name) for name in kinds)
        by_kind.setdefault(kind, {}).setdefault(parameter.divided_over, []).append((number, parameter))
    shapes: list[BucketShape] = []
    # The order of `build._parameter_groups`: matrices first.
    for _, groups in sorted(by_kind.items(), reverse=True):
        alike: list[list[tuple[int, BucketShape]]] = []
        for divided, group in groups.items():
            ranks = slices // divided if slices > 1 else 1
            sizes = [((p.place.stage, p.at_both_ends), gradient * p.elements, p.place.unit) for _, p in group]
            if bucket_mib is not None:
                most = bucket_mib * _MIB
            else:
                most = bucket_bytes(sum(size for _, size, _ in sizes), data // divided, accelerator=accelerator)
            buckets = []
            for indices in packed(sizes, most):
                members = [group[index][1] for index in indices]
                offsets, length = offsets_and_length([member.elements for member in members], ranks)
                shape = BucketShape(tuple(zip(offsets, members, strict=True)), length, ranks)
                buckets.append((-group[indices[-1]][0], shape))
            alike.append(buckets)
        # A backward pass completes last what comes first in the model.
        shapes += [shape for _, shape in merge(*alike, key=itemgetter(0))]
    return tuple(shapes)
