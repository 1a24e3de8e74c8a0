"""Which rank writes which canonical weight, and how its parts come to that rank.

Every canonical tensor has one owner, chosen so that owners write about equally many bytes. The tensor-parallel ranks of
the owner's replica send it their boxes, a few rows of the tensor at a time: no rank ever holds a whole tensor that it
does not hold anyway, and the owner's file is an ordinary safetensors shard.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise.boxes import Box
from shardwise.checkpoint_format.tensors import segments
from shardwise.checkpoint_format.writing import cut, shard_names
from shardwise.mesh import Group, Mesh
from shardwise.placement import Piece, placements

TRANSFER_BYTES = 16 * 2**20
"""Of a canonical tensor that travel to its owner at a time."""
_BYTES_WORTH_A_FILE = 64 * 2**20


@dataclass(frozen=True)
class CanonicalWeight:
    """A canonical weight as it is stored."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightFile:
    """One safetensors shard: its name, the rank of the world that writes it, and what it holds, in order."""

    name: str
    owner: int
    weights: tuple[CanonicalWeight, ...]


class WeightPlan:
    """The shards of a model's weights. Making it is collective over the mesh.

    Attributes:
        files: all shards of the whole model, the same on every rank.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, max_shard_bytes: int) -> None:
        self._mesh = mesh
        self._local: dict[tuple[str, Box], tuple[nn.Parameter, Piece]] = {}
        held: list[tuple[CanonicalWeight, Box, bool]] = []
        for _, parameter, record in placements(model):
            for piece in record.pieces:
                if piece.box.numel:
                    self._local[piece.name, piece.box] = parameter, replace(piece, copies=Group())
                    held.append((_weight(piece, parameter), piece.box, piece.copies.rank == 0))
        self._boxes: list[dict[str, list[Box]]] = []
        """By tensor-parallel rank: the boxes that it sends, which together are each tensor once."""
        weights: dict[str, CanonicalWeight] = {}
        for entries in comm.all_gather_objects(held, mesh.tp):
            boxes: dict[str, list[Box]] = {}
            for weight, box, is_first in entries:
                weights[weight.name] = weight
                if is_first:
                    boxes.setdefault(weight.name, []).append(box)
            self._boxes.append(boxes)
        self.files = tuple(self._plan(list(weights.values()), max_shard_bytes))

    def _plan(self, stage: list[CanonicalWeight], max_shard_bytes: int) -> Iterator[WeightFile]:
        mesh = self._mesh
        shards: list[tuple[int, list[CanonicalWeight]]] = []
        seen: set[str] = set()
        replica = mesh.dp.size * mesh.tp.size
        for number, weights in enumerate(comm.all_gather_objects(stage, mesh.pp)):
            mine = [weight for weight in weights if weight.name not in seen]  # tied ones are in two stages
            seen |= {weight.name for weight in mine}
            for owner, owned in enumerate(_balanced(mine, replica)):
                shards += [(number * replica + owner, shard) for shard in cut(owned, max_shard_bytes)]
        for name, (owner, owned) in zip(shard_names(len(shards)), shards, strict=True):
            yield WeightFile(name, owner, tuple(owned))

    def weights(self) -> Iterator[CanonicalWeight]:
        """Every canonical weight of the model."""
        for file in self.files:
            yield from file.weights

    def collect(self) -> Iterator[tuple[CanonicalWeight, Box, Tensor]]:
        """The segments of this rank's files, in their order; collective over the tensor-parallel group.

        A segment's tensor is valid until the next one is asked for.
        """
        tp = self._mesh.tp
        first = self._mesh.world.rank - tp.rank
        queues = [self._segments(first + rank) for rank in range(tp.size)]
        for round_ in zip_longest(*queues):
            mine = round_[tp.rank]
            direct = self._direct(mine)
            target = direct
            if mine is not None and target is None:
                weight, box = mine
                target = torch.empty(box.size, dtype=weight.dtype, device=self._mesh.device)
            if tp.size > 1:
                sent = [[] if rank == tp.rank else self._sent(wanted) for rank, wanted in enumerate(round_)]
                received = [[] if rank == tp.rank else self._slots(mine, target, rank) for rank in range(tp.size)]
                comm.exchange(sent, received, tp, self._mesh.device)
            if mine is not None and target is not None:
                if direct is None:
                    for slot, part in zip(self._slots(mine, target, tp.rank), self._sent(mine), strict=True):
                        slot.copy_(part)
                yield (*mine, target)

    def _segments(self, owner: int) -> Iterator[tuple[CanonicalWeight, Box]]:
        for file in self.files:
            if file.owner == owner:
                for weight in file.weights:
                    for box in segments(weight.shape, TRANSFER_BYTES // weight.dtype.itemsize):
                        yield weight, box

    def _direct(self, wanted: tuple[CanonicalWeight, Box] | None) -> Tensor | None:
        """A segment that this rank holds as one view: nothing has to be put together."""
        if wanted is None:
            return None
        weight, box = wanted
        for held in self._boxes[self._mesh.tp.rank].get(weight.name, []):
            if held.intersect(box) == box:
                return self._view(weight, held, box)
        return None

    def _sent(self, wanted: tuple[CanonicalWeight, Box] | None) -> list[Tensor]:
        """This rank's parts of a segment."""
        if wanted is None:
            return []
        weight, box = wanted
        held = self._boxes[self._mesh.tp.rank].get(weight.name, [])
        common = ((each, each.intersect(box)) for each in held)
        return [self._view(weight, each, part) for each, part in common if part is not None]

    def _view(self, weight: CanonicalWeight, held: Box, part: Box) -> Tensor:
        parameter, piece = self._local[weight.name, held]
        return piece.of(parameter.detach())[part.relative_to(held).slices]

    def _slots(self, wanted: tuple[CanonicalWeight, Box] | None, target: Tensor | None, rank: int) -> list[Tensor]:
        """Where the parts of a tensor-parallel rank belong in the segment."""
        if wanted is None or target is None:
            return []
        weight, box = wanted
        common = (held.intersect(box) for held in self._boxes[rank].get(weight.name, []))
        return [target[part.relative_to(box).slices] for part in common if part is not None]


def _weight(piece: Piece, parameter: nn.Parameter) -> CanonicalWeight:
    return CanonicalWeight(piece.name, piece.shape, parameter.dtype)


def _balanced(weights: list[CanonicalWeight], ranks: int) -> list[list[CanonicalWeight]]:
    """The weights of each owner: the largest first, each to the owner with the fewest bytes. A small model has few."""
    owners = min(ranks, max(1, sum(weight.nbytes for weight in weights) // _BYTES_WORTH_A_FILE))
    owned: list[list[CanonicalWeight]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(owners)]
    for weight in sorted(weights, key=lambda weight: -weight.nbytes):
        load, rank = heapq.heappop(loads)
        owned[rank].append(weight)
        heapq.heappush(loads, (load + weight.nbytes, rank))
    order = {weight.name: i for i, weight in enumerate(weights)}
    return [sorted(each, key=lambda weight: order[weight.name]) for each in owned]
