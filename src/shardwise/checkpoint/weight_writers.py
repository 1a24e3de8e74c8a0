"""Which rank writes which canonical weight, and how that rank receives its parts.

Every canonical tensor has one owner, chosen so that owners write about equally many bytes. The tensor-parallel ranks of
the owner's replica send it their boxes, a few rows of the tensor at a time: no rank ever holds a whole tensor that it
does not hold anyway, and the owner's file is an ordinary safetensors shard.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import Tensor, nn

from shardwise.base.tensor_box import Box
from shardwise.checkpoint.collective_reading import DTYPE_NAMES, TORCH_DTYPES
from shardwise.checkpoint.format.safetensors import DTYPES
from shardwise.checkpoint.format.stored_tensors import segments
from shardwise.checkpoint.format.writing import PlannedPiece, cut, shard_names
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group, Mesh
from shardwise.distributed.placement import Piece, placements

TRANSFER_BYTES = 16 * 2**20
"""Of a canonical tensor that travel to its owner at a time."""
_BYTES_WORTH_A_FILE = 64 * 2**20
_Segment: TypeAlias = tuple[PlannedPiece, Box]
"""A weight, and some rows of it."""


@dataclass(frozen=True)
class WeightFile:
    """One safetensors shard: its name, the rank of the world that writes it, and its weights in order."""

    name: str
    owner: int
    weights: tuple[PlannedPiece, ...]


class WeightPlan:
    """The shards of a model's weights. Making it is collective over the mesh.

    Attributes:
        files: all shards of the whole model, the same on every rank.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, max_shard_bytes: int) -> None:
        self._mesh = mesh
        self._local: dict[tuple[str, Box], tuple[nn.Parameter, Piece]] = {}
        held: list[tuple[PlannedPiece, Box, bool]] = []
        for _, parameter, record in placements(model, mesh.tp):
            for piece in record.pieces:
                if piece.box.numel:
                    self._local[piece.name, piece.box] = parameter, replace(piece, copies=Group())
                    weight = PlannedPiece.weight(piece.name, piece.shape, DTYPE_NAMES[parameter.dtype])
                    held.append((weight, piece.box, piece.copies.rank == 0))
        self._boxes: list[dict[str, list[Box]]] = []
        """By tensor-parallel rank: the boxes that it sends, which together are each tensor once."""
        weights: dict[str, PlannedPiece] = {}
        for entries in collectives.all_gather_objects(held, mesh.tp):
            boxes: dict[str, list[Box]] = {}
            for weight, box, is_first in entries:
                weights[weight.name] = weight
                if is_first:
                    boxes.setdefault(weight.name, []).append(box)
            self._boxes.append(boxes)
        self.files = tuple(self._plan(list(weights.values()), max_shard_bytes))

    def _plan(self, stage: list[PlannedPiece], max_shard_bytes: int) -> Iterator[WeightFile]:
        mesh = self._mesh
        shards: list[tuple[int, list[PlannedPiece]]] = []
        seen: set[str] = set()
        replica = mesh.dp.size * mesh.tp.size
        for number, weights in enumerate(collectives.all_gather_objects(stage, mesh.pp)):
            mine = [weight for weight in weights if weight.name not in seen]  # tied ones are in two stages
            seen |= {weight.name for weight in mine}
            for owner, owned in enumerate(_balanced(mine, replica)):
                shards += [(number * replica + owner, shard) for shard in cut(owned, max_shard_bytes)]
        for name, (owner, owned) in zip(shard_names(len(shards)), shards, strict=True):
            yield WeightFile(name, owner, tuple(owned))

    def collect(self) -> Iterator[tuple[PlannedPiece, Box, Tensor]]:
        """The segments of this rank's files, in their order; collective over the tensor-parallel group.

        A segment's tensor is valid until the next one is asked for.
        """
        tp = self._mesh.tp
        first = self._mesh.world.rank - tp.rank
        queues = [self._segments(first + rank) for rank in range(tp.size)]
        for round_ in zip_longest(*queues):
            mine = round_[tp.rank]
            views, target, is_whole = self._sent(mine), torch.empty(0), False
            if mine is not None:
                weight, box = mine
                # Where this rank holds the segment as one view, nothing has to be put together.
                is_whole = len(views) == 1 and views[0].shape == box.size
                dtype = TORCH_DTYPES[weight.dtype]
                target = views[0] if is_whole else torch.empty(box.size, dtype=dtype, device=self._mesh.device)
            if tp.size > 1:
                sent = [[] if rank == tp.rank else self._sent(segment) for rank, segment in enumerate(round_)]
                received = [[] if rank == tp.rank else self._slots(mine, target, rank) for rank in range(tp.size)]
                collectives.exchange(sent, received, tp, self._mesh.device)
            if mine is not None:
                if not is_whole:
                    for slot, view in zip(self._slots(mine, target, tp.rank), views, strict=True):
                        slot.copy_(view)
                yield (*mine, target)

    def _segments(self, owner: int) -> Iterator[_Segment]:
        for file in self.files:
            if file.owner == owner:
                for weight in file.weights:
                    for box in segments(weight.shape, TRANSFER_BYTES // DTYPES[weight.dtype].itemsize):
                        yield weight, box

    def _common(self, rank: int, segment: _Segment | None) -> list[tuple[Box, Box]]:
        """The boxes of a tensor-parallel rank that share elements with a segment, and what they share."""
        if segment is None:
            return []
        weight, box = segment
        return [(held, part) for held in self._boxes[rank].get(weight.name, []) if (part := held.intersect(box))]

    def _sent(self, segment: _Segment | None) -> list[Tensor]:
        """This rank's parts of a segment."""
        views = []
        for held, part in self._common(self._mesh.tp.rank, segment):
            assert segment is not None
            parameter, piece = self._local[segment[0].name, held]
            views.append(piece.of(parameter.detach())[part.relative_to(held).slices])
        return views

    def _slots(self, segment: _Segment | None, target: Tensor, rank: int) -> list[Tensor]:
        """Where the parts of a tensor-parallel rank belong in a segment."""
        return [target[part.relative_to(segment[1]).slices] for _, part in self._common(rank, segment) if segment]


def _balanced(weights: list[PlannedPiece], ranks: int) -> list[list[PlannedPiece]]:
    """The weights of each owner: the largest first, each to the owner with the fewest bytes. A small model has few."""
    owners = min(ranks, max(1, sum(weight.nbytes for weight in weights) // _BYTES_WORTH_A_FILE))
    owned: list[list[PlannedPiece]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(owners)]
    for weight in sorted(weights, key=lambda weight: -weight.nbytes):
        load, rank = heapq.heappop(loads)
        owned[rank].append(weight)
        heapq.heappush(loads, (load + weight.nbytes, rank))
    order = {weight.name: i for i, weight in enumerate(weights)}
    return [sorted(weights, key=lambda weight: order[weight.name]) for weights in owned]
