"""The rank that writes each canonical weight, and how that rank receives its parts.

Every canonical tensor has one owner, chosen so that owners write about equally many bytes. The tensor-parallel ranks of
the owner's replica, or with ZeRO-3 all ranks of its pipeline stage, send it their boxes, a few rows of the tensor at a
time: no rank ever holds a whole tensor that it does not hold anyway, and the owner's file is an ordinary safetensors
shard.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor, nn

from shardwise.base.tensor_box import Box, box_segments
from shardwise.checkpoint.format.safetensors import DTYPES, FLOATING
from shardwise.checkpoint.format.writing import PlannedPiece, cut_into_shards, shard_names
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.placement import placements
from shardwise.optim.state import weight_slices
from shardwise.optim.zero import ZeroRedundancyOptimizer

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, torch_name) for name, torch_name in FLOATING.items()}
"""Name in a safetensors file → torch's dtype."""
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""torch's dtype → name in a safetensors file."""

TRANSFER_BYTES = 16 * 2**20
"""Size of the parts in which a canonical tensor travels to its owner."""
_BYTES_WORTH_A_FILE = 64 * 2**20
"""A model gets an owner for each so many bytes, so that a small one is not cut into many tiny files."""


@dataclass(frozen=True)
class _WeightFile:
    """One safetensors shard: its name, the rank of the world that writes it, and its weights in order."""

    name: str
    owner: int
    weights: tuple[PlannedPiece, ...]


@dataclass(frozen=True)
class _WeightRows:
    """Some rows of a weight, which its owner puts together at a time."""

    weight: PlannedPiece
    box: Box


class WeightPlan:
    """The safetensors shards of a model's weights, and their writers. Making it is collective over the mesh.

    Attributes:
        files: all shards of the whole model, the same on every rank.
        collects: True if `collect` may put segments together in memory of their own.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, max_shard_bytes: int, optimizer: ZeroRedundancyOptimizer | None = None
    ) -> None:
        self._mesh = mesh
        is_freed = optimizer is not None and any(bucket.frees_values for bucket in optimizer.buckets)
        # All ranks of a stage together have each weight once, or all tensor-parallel ranks of a replica have.
        divides = any(piece.replicas for _, _, record in placements(model) for piece in record.pieces)
        self._ranks = mesh.stage if collectives.any_rank(is_freed or divides, mesh.world) else mesh.tp
        self._local: dict[tuple[str, Box], Tensor] = {}
        """Canonical name and box of each part on this rank → its values."""
        local_boxes: list[tuple[PlannedPiece, Box, bool]] = []
        for piece, box, values, is_part in weight_slices(model, optimizer, mesh.tp, only_share=True):
            self._local[piece.name, box] = values
            weight = PlannedPiece.weight(piece.name, piece.shape, DTYPE_NAMES[values.dtype])
            replicas = piece.replicas or mesh.replicas
            is_first = piece.copies.rank == 0 and (is_part or self._ranks is mesh.tp or replicas.rank == 0)
            local_boxes.append((weight, box, is_first))
        self._boxes: list[dict[str, list[Box]]] = []
        """By rank of the group: the boxes that it sends, which together are each tensor once."""
        weights: dict[str, PlannedPiece] = {}
        for entries in collectives.all_gather_objects(local_boxes, self._ranks):
            boxes: dict[str, list[Box]] = {}
            # Tensor-parallel ranks have copies of some weights, such as norms: the first of them sends its own.
            for weight, box, is_first_copy in entries:
                weights[weight.name] = weight
                if is_first_copy:
                    boxes.setdefault(weight.name, []).append(box)
            self._boxes.append(boxes)
        # One rank may hold a weight in several pieces, as GPT's of Q, K and V.
        has_pieces = any(len(boxes) > 1 for by_name in self._boxes for boxes in by_name.values())
        self.collects = has_pieces or self._ranks.size > 1
        self.files = tuple(self._plan(list(weights.values()), max_shard_bytes))

    def collect(self) -> Iterator[tuple[PlannedPiece, Box, Tensor]]:
        """Yield the segments of this rank's files, in their order; collective over the ranks that have their parts.

        A segment's tensor is valid until the next one is asked for; unless the plan `collects`, it is a view of the
        parameters.
        """
        ranks = self._ranks
        first = self._mesh.world.rank - ranks.rank
        segments_by_rank = [self._segments(first + rank) for rank in range(ranks.size)]
        # In each round every rank gets one segment; ranks with shorter files wait for the others.
        for round_ in zip_longest(*segments_by_rank):
            values = self._put_together(round_)
            segment = round_[ranks.rank]
            if segment is not None:
                yield segment.weight, segment.box, values

    def _plan(self, stage_weights: list[PlannedPiece], max_shard_bytes: int) -> Iterator[_WeightFile]:
        # A rank of another stage would need the weight's boxes from all tensor-parallel ranks of this one.
        mesh = self._mesh
        shards: list[tuple[int, list[PlannedPiece]]] = []
        seen: set[str] = set()
        ranks_per_stage = mesh.stage.size
        for stage, weights in enumerate(collectives.all_gather_objects(stage_weights, mesh.pp)):
            # A tied weight is in two stages: the first one writes it.
            new_weights = [weight for weight in weights if weight.name not in seen]
            seen |= {weight.name for weight in new_weights}
            for rank, owned in enumerate(_balanced(new_weights, ranks_per_stage)):
                shards += [(stage * ranks_per_stage + rank, shard) for shard in cut_into_shards(owned, max_shard_bytes)]
        for name, (owner, owned) in zip(shard_names(len(shards)), shards, strict=True):
            yield _WeightFile(name, owner, tuple(owned))

    def _segments(self, owner: int) -> Iterator[_WeightRows]:
        for file in self.files:
            if file.owner == owner:
                for weight in file.weights:
                    for box in box_segments(weight.shape, TRANSFER_BYTES // DTYPES[weight.dtype].itemsize):
                        yield _WeightRows(weight, box)

    def _put_together(self, round_: Sequence[_WeightRows | None]) -> Tensor:
        """Return the values of this rank's segment, and send the other ranks their parts of theirs.

        `round_`: a segment for each rank of the group, None for one without any. Collective over these ranks.
        """
        ranks = self._ranks
        segment = round_[ranks.rank]
        views = self._local_parts(segment)
        if segment is None:
            values = torch.empty(0)
        elif len(views) == 1 and views[0].shape == segment.box.size:
            # This rank holds the whole segment as one view: nothing has to be put together.
            values = views[0]
        else:
            values = torch.empty(segment.box.size, dtype=TORCH_DTYPES[segment.weight.dtype], device=self._mesh.device)
            for slot, view in zip(self._slots(segment, values, ranks.rank), views, strict=True):
                slot.copy_(view)
        sent: list[list[Tensor]] = []
        received: list[list[Tensor]] = []
        for rank, segment_of_rank in enumerate(round_):
            # This rank's own parts are in their places already.
            is_local = rank == ranks.rank
            sent.append([] if is_local else self._local_parts(segment_of_rank))
            received.append([] if is_local else self._slots(segment, values, rank))
        collectives.exchange_async(sent, received, ranks, self._mesh.device).wait()
        return values

    def _overlaps(self, rank: int, segment: _WeightRows) -> list[tuple[Box, Box]]:
        boxes = self._boxes[rank].get(segment.weight.name, [])
        return [(box, part) for box in boxes if (part := box.intersect(segment.box)) is not None]

    def _local_parts(self, segment: _WeightRows | None) -> list[Tensor]:
        if segment is None:
            return []
        overlaps = self._overlaps(self._ranks.rank, segment)
        return [self._local[segment.weight.name, box][part.relative_to(box).slices] for box, part in overlaps]

    def _slots(self, segment: _WeightRows | None, values: Tensor, rank: int) -> list[Tensor]:
        """Views into the values of a segment, to which the parts of a rank belong."""
        if segment is None:
            return []
        return [values[part.relative_to(segment.box).slices] for _, part in self._overlaps(rank, segment)]


def _balanced(weights: list[PlannedPiece], ranks: int) -> list[list[PlannedPiece]]:
    """The weights of each owner: the largest first, each to the owner with the fewest bytes."""
    # The largest first leaves the small ones to even out the loads: Graham's rule, at most 4/3 of the best maximum.
    # Every rank computes the same plan, as the order of equal loads is that of the ranks.
    owners = min(ranks, max(1, sum(weight.nbytes for weight in weights) // _BYTES_WORTH_A_FILE))
    owned: list[list[PlannedPiece]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(owners)]
    for weight in sorted(weights, key=lambda weight: -weight.nbytes):
        load, rank = heapq.heappop(loads)
        owned[rank].append(weight)
        heapq.heappush(loads, (load + weight.nbytes, rank))
    order = {weight.name: number for number, weight in enumerate(weights)}
    return [sorted(weights, key=lambda weight: order[weight.name]) for weights in owned]
