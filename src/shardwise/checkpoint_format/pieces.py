"""The pieces of a stored tensor as a table of numbers: what a manifest lists, ranks send each other, and search.

The manifest of a 20 B-parameter model with its moments that 1,024 ranks saved (TP 8, ZeRO-1 over 128) has 560,000
pieces and 68 MB of checksums. As objects the pieces take each rank 6 s to receive, and 460 MB; as numbers 0.1 s and
27 MB.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from shardwise.boxes import Box

Numbers: TypeAlias = npt.NDArray[np.int64]
_COMPARED_AT_ONCE = 2**22


@dataclass(frozen=True)
class PieceEntry:
    """A box of a tensor, contiguous and row-major from byte `offset` of file number `file`."""

    file: int
    offset: int
    box: Box


class Pieces(Sequence[PieceEntry]):
    """Pieces that become entries when they are asked for.

    Args:
        table: `[pieces, 2 + 2·dims]`: file, offset, where the box starts, its size.
    """

    def __init__(self, table: Numbers) -> None:
        self.table = table

    @staticmethod
    def of(pieces: Sequence[PieceEntry], dims: int) -> Pieces:
        if isinstance(pieces, Pieces):
            return pieces
        return Pieces.of_rows([(piece.file, piece.offset, *piece.box.start, *piece.box.size) for piece in pieces], dims)

    @staticmethod
    def of_rows(rows: Sequence[Sequence[int]], dims: int) -> Pieces:
        return Pieces(np.array(rows, dtype=np.int64).reshape(len(rows), 2 + 2 * dims))

    @staticmethod
    def of_json(entries: list[Any], dims: int) -> Pieces | None:
        """Pieces from JSON lists `[file, offset, start, size]`; None where one has anything but such whole numbers.

        A large model has a million pieces: all of them are looked at together.
        """
        if not entries:
            return Pieces.of_rows((), dims)
        if set(map(type, entries)) != {list} or set(map(len, entries)) != {4}:
            return None
        files, offsets, starts, sizes = zip(*entries, strict=True)
        boxes = (*starts, *sizes)
        if set(map(type, boxes)) != {list} or set(map(len, boxes)) != {dims}:
            return None
        numbers = [*files, *offsets, *itertools.chain.from_iterable(boxes)]
        if set(map(type, numbers)) != {int}:  # a bool is no whole number
            return None
        try:
            flat = np.array(numbers, dtype=np.int64)
        except OverflowError:
            return None
        heads, box = np.split(flat, [2 * len(entries)])
        columns = (heads.reshape(2, -1).T, *box.reshape(2, len(entries), dims))
        return Pieces(np.concatenate(columns, axis=1)) if flat.min() >= 0 else None

    def __len__(self) -> int:
        return len(self.table)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Pieces):
            return np.array_equal(self.table, other.table)
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as a list has none: the table can be large

    @overload
    def __getitem__(self, at: int) -> PieceEntry: ...

    @overload
    def __getitem__(self, at: slice) -> Pieces: ...

    def __getitem__(self, at: int | slice) -> PieceEntry | Pieces:
        if isinstance(at, slice):
            return Pieces(self.table[at])
        return _entry(self.table[at].tolist())

    def __iter__(self) -> Iterator[PieceEntry]:
        return map(_entry, self.table.tolist())

    @property
    def files(self) -> Numbers:
        return self.table[:, 0]

    @property
    def offsets(self) -> Numbers:
        return self.table[:, 1]

    @property
    def starts(self) -> Numbers:
        """`[pieces, dims]`."""
        return self.table[:, 2 : 2 + self._dims]

    @property
    def sizes(self) -> Numbers:
        """`[pieces, dims]`."""
        return self.table[:, 2 + self._dims :]

    @property
    def _dims(self) -> int:
        return int(self.table.shape[1]) // 2 - 1

    def meeting(self, boxes: Numbers) -> tuple[Numbers, Numbers]:
        """Which of the boxes and which pieces share elements, by box and then by piece.

        All are compared with all, some millions at a time: a thousand boxes in a thousand pieces take milliseconds.

        Args:
            boxes: `[boxes, 2, dims]`: start and size.

        Returns:
            For each pair that meets, the box's number and the piece's.
        """
        found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        at_once = max(1, _COMPARED_AT_ONCE // max(1, len(self)))
        for first in range(0, len(boxes), at_once):
            starts, sizes = boxes[first : first + at_once, 0, :, None], boxes[first : first + at_once, 1, :, None]
            meets = np.ones((len(starts), len(self)), dtype=np.bool_)
            for dim, (begins, ends) in enumerate(self._spans):
                meets &= (begins < starts[:, dim] + sizes[:, dim]) & (ends > starts[:, dim])
            numbers, pieces = meets.nonzero()
            found.append((numbers + first, pieces))
        return np.concatenate([numbers for numbers, _ in found]), np.concatenate([pieces for _, pieces in found])

    @functools.cached_property
    def _spans(self) -> list[tuple[Numbers, Numbers]]:
        """By dim: where the pieces start and stop."""
        return [(a.copy(), a + n) for a, n in zip(self.starts.T, self.sizes.T, strict=True)]


def _entry(row: list[int]) -> PieceEntry:
    file, offset, *box = row
    dims = len(box) // 2
    return PieceEntry(file, offset, Box(tuple(box[:dims]), tuple(box[dims:])))
