"""Canonical tensors: put together from the boxes that ranks hold, and written by one rank each.

Every canonical tensor has one owner, chosen so that owners write about equally many bytes. The tensor-parallel ranks of
the owner's replica send it their boxes, a few rows of the tensor at a time: no rank ever holds a whole tensor that it
does not hold anyway, and the owner's file is an ordinary safetensors shard.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor, nn

from shardwise.base.tensor_box import Box
from shardwise.checkpoint.format.safetensors import DTYPES, FLOATING
from shardwise.checkpoint.format.stored_tensors import segments
from shardwise.checkpoint.format.writing import PlannedPiece, cut, shard_names
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group, Mesh
from shardwise.distributed.placement import Piece, Placement, placements
from shardwise.models.blocks import Stages


@dataclass(frozen=True, order=True)
class ParameterKey:
    """A parameter of a model: its pipeline stage, and its number in that stage."""

    stage: int
    number: int


def canonical_tensors(
    model: nn.Module,
    take: Callable[[nn.Parameter], Tensor] = lambda p: p.detach(),
    pipeline: Group | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Each canonical tensor of a model once: its name, and the whole tensor, on every rank.

    Collective over each parameter's group, as its placement says. Holds one parameter of all its ranks at a time. A
    tied head has no tensor of its own: its weight is the embedding's.

    Args:
        model: parameters are local tensors, of any shape; a tensor comes in its canonical shape, such as `[O, I]`.
        take: gives the local tensor to put together from a parameter, such as its gradient.
        pipeline: ranks whose stages make up the model: collective over them too, and all get the tensors of all stages.
            Without it each has those of its own.
    """
    ranks = pipeline or Group()
    local = _by_key(model)
    pieces = _pieces_by_rank(local)
    device = next(model.parameters()).device
    described = [
        (key, ranks.rank, {piece.name: (piece.shape, take(parameter).dtype) for piece in record.pieces})
        for key, (parameter, record) in local.items()
    ]
    parameters = [entry for entries in collectives.all_gather_objects(described, ranks) for entry in entries]
    parameters.sort(key=lambda parameter: parameter[0])
    seen: set[str] = set()
    for key, rank, tensors in parameters:
        # A tied weight is a parameter of the first and of the last stage, under one canonical name.
        new = {name: tensor for name, tensor in tensors.items() if name not in seen}
        seen |= new.keys()
        assembled: dict[str, Tensor] = {}
        if new and rank == ranks.rank:
            parameter, record = local[key]
            assembled = _assemble(take(parameter), record.group, pieces[key])
        # The other stages receive into empty tensors.
        for name, (shape, dtype) in new.items():
            values = assembled.get(name)
            if values is None:
                values = torch.empty(shape, dtype=dtype, device=device)
            yield name, collectives.broadcast_(values, ranks, source=rank)


def _by_key(model: nn.Module) -> dict[ParameterKey, tuple[nn.Parameter, Placement]]:
    """This rank's parameters with their records, each parameter once."""
    stages = {stage.index: part for stage, part in model.pairs()} if isinstance(model, Stages) else {0: model}
    keys: dict[nn.Parameter, tuple[ParameterKey, Placement]] = {}
    for index, part in stages.items():
        for number, (_, parameter, record) in enumerate(placements(part)):
            keys.setdefault(parameter, (ParameterKey(index, number), record))
    return {key: (parameter, record) for parameter, (key, record) in keys.items()}


def _pieces_by_rank(
    local: Mapping[ParameterKey, tuple[nn.Parameter, Placement]],
) -> dict[ParameterKey, list[list[Piece]]]:
    """For each parameter the pieces of every rank of its group; one exchange a group."""
    # The ranks of a model go through its groups in the order of its parameters, so that their exchanges match.
    by_group: dict[Group, dict[ParameterKey, list[Piece]]] = {}
    for key, (_, record) in local.items():
        # A group cannot be sent to another process, and nobody needs it there.
        pieces = [replace(piece, copies=Group()) for piece in record.pieces]
        by_group.setdefault(record.group, {})[key] = pieces
    pieces_by_rank: dict[ParameterKey, list[list[Piece]]] = {}
    for group, pieces_by_key in by_group.items():
        gathered = collectives.all_gather_objects(pieces_by_key, group)
        for key in gathered[0]:
            pieces_by_rank[key] = [pieces_of_rank[key] for pieces_of_rank in gathered]
    return pieces_by_rank


def _assemble(local: Tensor, group: Group, pieces_by_rank: Sequence[Sequence[Piece]]) -> dict[str, Tensor]:
    """The canonical tensors of a parameter by their names, from the pieces of each rank of the group."""
    locals_by_rank = collectives.all_gather(local.unsqueeze(0).contiguous(), group)
    tensors = {piece.name: local.new_empty(piece.shape) for piece in pieces_by_rank[0]}
    for pieces, tensor in zip(pieces_by_rank, locals_by_rank, strict=True):
        for piece in pieces:
            tensors[piece.name][piece.box.slices] = piece.of(tensor)
    return tensors


TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, torch_name) for name, torch_name in FLOATING.items()}
"""Name in a safetensors file → torch's dtype."""
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""torch's dtype → name in a safetensors file."""
TRANSFER_BYTES = 16 * 2**20
"""Size of the parts in which a canonical tensor travels to its owner."""
_BYTES_WORTH_A_FILE = 64 * 2**20
"""A model gets an owner for each so many bytes, so that a small one is not cut into many tiny files."""


@dataclass(frozen=True)
class WeightFile:
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
    """The shards of a model's weights. Making it is collective over the mesh.

    Attributes:
        files: all shards of the whole model, the same on every rank.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, max_shard_bytes: int) -> None:
        self._mesh = mesh
        self._local: dict[tuple[str, Box], tuple[nn.Parameter, Piece]] = {}
        """Canonical name and box of each piece on this rank → the parameter that holds it, and its place there."""
        local_boxes: list[tuple[PlannedPiece, Box, bool]] = []
        for _, parameter, record in placements(model, mesh.tp):
            for piece in record.pieces:
                if piece.box.numel:
                    self._local[piece.name, piece.box] = parameter, replace(piece, copies=Group())
                    weight = PlannedPiece.weight(piece.name, piece.shape, DTYPE_NAMES[parameter.dtype])
                    local_boxes.append((weight, piece.box, piece.copies.rank == 0))
        self._boxes: list[dict[str, list[Box]]] = []
        """By tensor-parallel rank: the boxes that it sends, which together are each tensor once."""
        weights: dict[str, PlannedPiece] = {}
        for entries in collectives.all_gather_objects(local_boxes, mesh.tp):
            boxes: dict[str, list[Box]] = {}
            # Tensor-parallel ranks have copies of some weights, such as norms: the first of them sends its own.
            for weight, box, is_first_copy in entries:
                weights[weight.name] = weight
                if is_first_copy:
                    boxes.setdefault(weight.name, []).append(box)
            self._boxes.append(boxes)
        self.files = tuple(self._plan(list(weights.values()), max_shard_bytes))

    def collect(self) -> Iterator[tuple[PlannedPiece, Box, Tensor]]:
        """Yield the segments of this rank's files, in their order; collective over the tensor-parallel group.

        A segment's tensor is valid until the next one is asked for.
        """
        tp = self._mesh.tp
        first = self._mesh.world.rank - tp.rank
        segments_by_rank = [self._segments(first + rank) for rank in range(tp.size)]
        # In each round every tensor-parallel rank gets one segment; ranks with shorter files wait for the others.
        for round_ in zip_longest(*segments_by_rank):
            values = self._put_together(round_)
            segment = round_[tp.rank]
            if segment is not None:
                yield segment.weight, segment.box, values

    def _plan(self, stage_weights: list[PlannedPiece], max_shard_bytes: int) -> Iterator[WeightFile]:
        """Give each weight of each pipeline stage an owner among the stage's ranks."""
        # A rank of another stage would need the weight's boxes from all tensor-parallel ranks of this one.
        mesh = self._mesh
        shards: list[tuple[int, list[PlannedPiece]]] = []
        seen: set[str] = set()
        ranks_per_stage = mesh.dp.size * mesh.tp.size
        for stage, weights in enumerate(collectives.all_gather_objects(stage_weights, mesh.pp)):
            # A tied weight is in two stages: the first one writes it.
            new_weights = [weight for weight in weights if weight.name not in seen]
            seen |= {weight.name for weight in new_weights}
            for rank, owned in enumerate(_balanced(new_weights, ranks_per_stage)):
                shards += [(stage * ranks_per_stage + rank, shard) for shard in cut(owned, max_shard_bytes)]
        for name, (owner, owned) in zip(shard_names(len(shards)), shards, strict=True):
            yield WeightFile(name, owner, tuple(owned))

    def _segments(self, owner: int) -> Iterator[_WeightRows]:
        """The segments of an owner's files, in their order."""
        for file in self.files:
            if file.owner == owner:
                for weight in file.weights:
                    for box in segments(weight.shape, TRANSFER_BYTES // DTYPES[weight.dtype].itemsize):
                        yield _WeightRows(weight, box)

    def _put_together(self, round_: Sequence[_WeightRows | None]) -> Tensor:
        """Return the values of this rank's segment, and send the other ranks their parts of theirs.

        `round_`: a segment for each tensor-parallel rank, None for one without any. Collective over these ranks.
        """
        tp = self._mesh.tp
        segment = round_[tp.rank]
        views = self._local_parts(segment)
        if segment is None:
            values = torch.empty(0)
        elif len(views) == 1 and views[0].shape == segment.box.size:
            # This rank holds the whole segment as one view: nothing has to be put together.
            values = views[0]
        else:
            values = torch.empty(segment.box.size, dtype=TORCH_DTYPES[segment.weight.dtype], device=self._mesh.device)
            for slot, view in zip(self._slots(segment, values, tp.rank), views, strict=True):
                slot.copy_(view)
        sent: list[list[Tensor]] = []
        received: list[list[Tensor]] = []
        for rank, segment_of_rank in enumerate(round_):
            # This rank's own parts are in their places already.
            is_local = rank == tp.rank
            sent.append([] if is_local else self._local_parts(segment_of_rank))
            received.append([] if is_local else self._slots(segment, values, rank))
        collectives.exchange(sent, received, tp, self._mesh.device)
        return values

    def _overlaps(self, rank: int, segment: _WeightRows) -> list[tuple[Box, Box]]:
        """The boxes of a tensor-parallel rank that share elements with a segment, each with the shared part."""
        overlaps: list[tuple[Box, Box]] = []
        for box in self._boxes[rank].get(segment.weight.name, []):
            part = box.intersect(segment.box)
            if part is not None:
                overlaps.append((box, part))
        return overlaps

    def _local_parts(self, segment: _WeightRows | None) -> list[Tensor]:
        """Views of the parts of a segment that this rank holds; none without a segment."""
        views: list[Tensor] = []
        if segment is None:
            return views
        for box, part in self._overlaps(self._mesh.tp.rank, segment):
            parameter, piece = self._local[segment.weight.name, box]
            views.append(piece.of(parameter.detach())[part.relative_to(box).slices])
        return views

    def _slots(self, segment: _WeightRows | None, values: Tensor, rank: int) -> list[Tensor]:
        """Views into the values of a segment, to which the parts of a tensor-parallel rank belong."""
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
