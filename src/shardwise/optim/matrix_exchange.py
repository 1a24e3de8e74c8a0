"""The exchange by which one rank gets each matrix whole, whatever slices of it the ranks own.

Ranks of a pipeline stage send their parts of a matrix to its owner, which computes an update of it and sends each rank
what this one owns. All ranks derive the owners from the matrices' sizes. The matrices travel in chunks: while a chunk
is computed, the next one arrives and the results of the last one are on their way back.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.base.tensor_box import Box
from shardwise.distributed import collectives, placement
from shardwise.distributed.collectives import Pending
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import Outputs, Piece
from shardwise.optim.bucket_layout import matrix_chunk_elements
from shardwise.optim.buckets import Bucket, in_order
from shardwise.optim.wrapped_class import ModelSlices


@dataclass(frozen=True, order=True)
class Matrix:
    """A matrix `[out, in]` of the model, such as Q of a layer, or one head of it."""

    name: str  # canonical tensor that holds it
    first: int  # its first output in that tensor
    shape: tuple[int, int]
    group: int

    @property
    def cost(self) -> int:
        """FLOPs of a product with its Gram matrix, in units of 2: those of any iteration are a multiple."""
        return math.prod(self.shape) * min(self.shape)


@dataclass(frozen=True)
class MatrixPart:
    """A rectangle of a matrix that this rank owns."""

    bucket: Bucket
    start: int  # start in the bucket's owned part of the run that holds it
    size: tuple[int, ...]  # shape of that run
    order: tuple[int, ...]  # dimensions of the run from the slowest to the fastest in memory
    rows: slice  # rows of the run that are the rectangle
    box: Box  # the rectangle in the matrix

    def of(self, flat: Tensor) -> Tensor:
        """Return the rectangle in a flat tensor over the bucket's owned part: a writable view `[*box.size]`."""
        return in_order(flat[self.start : self.start + math.prod(self.size)], self.size, self.order)[self.rows]


_Parts = dict[Matrix, list[MatrixPart]]
_Boxes = dict[Matrix, list[Box]]


class MatrixExchange:
    """The plan of the exchange of all matrices of some parameter groups. Making it is collective over a stage's ranks.

    Args:
        model: slices of the model that this rank owns.

    Attributes:
        owners: rank, in the stage, that computes each matrix's update.

    Raises:
        ValueError: the ranks do not hold each matrix exactly once; raised on every rank of the stage.
    """

    def __init__(self, model: ModelSlices, groups: Sequence[int], *, by_head: bool) -> None:
        self.model = model
        self._ranks = model.ranks.stage
        # Of copies, one rank sends; all get the update.
        self._sent: _Parts = {}
        self._updated: _Parts = {}
        for group in groups:
            for bucket in model.groups[group]:
                for matrix, part in _parts(bucket, group, model, by_head=by_head, for_update=False):
                    self._sent.setdefault(matrix, []).append(part)
                for matrix, part in _parts(bucket, group, model, by_head=by_head, for_update=True):
                    self._updated.setdefault(matrix, []).append(part)
        described = (_boxes(self._sent), _boxes(self._updated))
        by_rank = collectives.all_gather_objects(described, self._ranks)
        self._sent_by_rank: list[_Boxes] = [sent for sent, _ in by_rank]
        self._updated_by_rank: list[_Boxes] = [updated for _, updated in by_rank]
        matrices = sorted(set[Matrix]().union(*self._sent_by_rank, *self._updated_by_rank))
        _require_whole(matrices, self._sent_by_rank, self._ranks)
        self.owners = _balanced(matrices, self._ranks.size)
        self._chunks = _chunks(self.owners, self._ranks.size)

    def updates(
        self, take: Callable[[MatrixPart], Tensor], compute: Callable[[Matrix, Tensor], Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[Matrix, MatrixPart, Tensor]]:
        """Yield every part that this rank owns with its update. Collective over the stage.

        Args:
            take: gives the values of a part, `[*box.size]`, of which the matrices are made.
            compute: gives the update `[O, I]` of a matrix by its values `[O, I]`; called for each matrix on its owner.
            dtype: dtype in which values and updates travel.
        """
        matrices: dict[Matrix, Tensor] = {}
        gathered: Pending | None = None
        results: list[tuple[Matrix, MatrixPart, Tensor]] = []
        returned: Pending | None = None
        for chunk, next_chunk in zip([None, *self._chunks], [*self._chunks, None], strict=True):
            present = matrices
            if gathered is not None:
                gathered.wait()
            if next_chunk is not None:
                matrices, gathered = self._gather(next_chunk, take, dtype)
            if chunk is None:
                continue
            computed = {matrix: compute(matrix, values) for matrix, values in present.items()}
            if returned is not None:
                returned.wait()
                yield from results
            results, returned = self._return(chunk, computed, dtype)
        if returned is not None:
            returned.wait()
            yield from results

    def _gather(
        self, chunk: Sequence[Matrix], take: Callable[[MatrixPart], Tensor], dtype: torch.dtype
    ) -> tuple[dict[Matrix, Tensor], Pending]:
        """Start bringing a chunk's matrices to their owners; return those of this rank, which the wait completes."""
        owned = [matrix for matrix in chunk if self.owners[matrix] == self._ranks.rank]
        matrices = {matrix: torch.empty(matrix.shape, dtype=dtype, device=self.model.device) for matrix in owned}
        sent: list[list[Tensor]] = [[] for _ in range(self._ranks.size)]
        for matrix in chunk:
            sent[self.owners[matrix]] += [take(part).to(dtype) for part in self._sent.get(matrix, [])]
        received = [
            [matrices[matrix][box.slices] for matrix in owned for box in boxes.get(matrix, [])]
            for boxes in self._sent_by_rank
        ]
        return matrices, collectives.exchange_async(sent, received, self._ranks, self.model.device)

    def _return(
        self, chunk: Sequence[Matrix], updates: dict[Matrix, Tensor], dtype: torch.dtype
    ) -> tuple[list[tuple[Matrix, MatrixPart, Tensor]], Pending]:
        """Start bringing the updates of a chunk from their owners to all ranks; the wait completes the results."""
        results: list[tuple[Matrix, MatrixPart, Tensor]] = []
        received: list[list[Tensor]] = [[] for _ in range(self._ranks.size)]
        for matrix in chunk:
            for part in self._updated.get(matrix, []):
                update = torch.empty(part.box.size, dtype=dtype, device=self.model.device)
                received[self.owners[matrix]].append(update)
                results.append((matrix, part, update))
        sent = [
            [update[box.slices] for matrix, update in updates.items() for box in boxes.get(matrix, [])]
            for boxes in self._updated_by_rank
        ]
        return results, collectives.exchange_async(sent, received, self._ranks, self.model.device)


def _parts(
    bucket: Bucket, group: int, model: ModelSlices, *, by_head: bool, for_update: bool
) -> Iterator[tuple[Matrix, MatrixPart]]:
    """Yield the parts of matrices that this rank updates, or those that it sends: of copies, one rank sends."""
    within = slice(0, len(bucket.master)) if for_update else bucket.share
    for index, parameter in enumerate(bucket.parameters):
        placed = placement.of_or_whole(parameter, tensor=model.ranks.tensor).pieces
        for piece, placed_piece in zip(model.pieces[parameter], placed, strict=True):
            copies = placed_piece.copies
            is_alone = for_update or copies.size == 1
            if is_alone or copies.ranks[copies.rank] == min({*copies.ranks} & {*model.ranks.stage.ranks}):
                yield from _parts_of_piece(bucket, index, piece, within, group, by_head=by_head)


def _parts_of_piece(
    bucket: Bucket, index: int, piece: Piece, within: slice, group: int, *, by_head: bool
) -> Iterator[tuple[Matrix, MatrixPart]]:
    # A matrix is `[out, in]`, as the layer has it, whatever the canonical tensor is.
    piece = piece.transpose() if piece.transposed else piece
    outputs = piece.outputs or Outputs(0, piece.shape[0])
    matrices = outputs.matrices(by_head=by_head)
    for _, box, order, start in bucket.owned_boxes(index, [piece], within):
        for runs in matrices:
            matrix = Matrix(piece.name, runs[0].start, (sum(map(len, runs)), piece.shape[1]), group)
            row = 0
            for run in runs:
                first = max(run.start, box.start[0])
                stop = min(run.stop, box.stop[0])
                if first < stop:
                    rows = slice(first - box.start[0], stop - box.start[0])
                    rectangle = Box((row + first - run.start, box.start[1]), (stop - first, box.size[1]))
                    yield matrix, MatrixPart(bucket, start, box.size, order, rows, rectangle)
                row += len(run)


def _boxes(parts: _Parts) -> _Boxes:
    return {matrix: [part.box for part in of_matrix] for matrix, of_matrix in parts.items()}


def _require_whole(matrices: Sequence[Matrix], sent_by_rank: Sequence[_Boxes], ranks: Group) -> None:
    incomplete = []
    for matrix in matrices:
        count = sum(box.numel for boxes in sent_by_rank for box in boxes.get(matrix, []))
        if count != math.prod(matrix.shape):
            incomplete.append(
                f"{matrix.name} of shape {list(matrix.shape)}: {count} of {math.prod(matrix.shape)} elements"
            )
    if incomplete:
        raise ValueError(
            f"the ranks of {ranks} must together hold each matrix once; they hold {'; '.join(incomplete)}. Give mesh=, "
            "and each layer a name of its own"
        )


def _balanced(matrices: Sequence[Matrix], ranks: int) -> dict[Matrix, int]:
    """Return an owner of each matrix: the most expensive first, each to the rank with the least work so far."""
    loads = [(0, rank) for rank in range(ranks)]
    owners = {}
    for matrix in sorted(matrices, key=lambda matrix: (-matrix.cost, matrix)):
        load, rank = heapq.heappop(loads)
        owners[matrix] = rank
        heapq.heappush(loads, (load + matrix.cost, rank))
    return owners


def _chunks(owners: dict[Matrix, int], ranks: int) -> list[list[Matrix]]:
    """Return the matrices in chunks, in each of which every rank has about as much to do as the others."""
    most = matrix_chunk_elements(sum(math.prod(matrix.shape) for matrix in owners), ranks)
    filled = [(0, 0)] * ranks
    chunks: list[list[Matrix]] = []
    for matrix, rank in owners.items():
        number, elements = filled[rank]
        size = math.prod(matrix.shape)
        if elements and elements + size > most:
            number += 1
            elements = 0
        filled[rank] = (number, elements + size)
        if number == len(chunks):
            chunks.append([])
        chunks[number].append(matrix)
    return chunks
