"""Rectangles in tensors: which part of a canonical tensor a rank holds, or a file stores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import add


@dataclass(frozen=True)
class Box:
    """A rectangle in a tensor: `start[i] ≤ index[i] < start[i] + size[i]`."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), shape)

    @staticmethod
    def of_run(offset: int, length: int, shape: tuple[int, ...]) -> list[Box]:
        """A run of a contiguous tensor as the fewest boxes, in order: at most 2·dims − 1.

        The run covers elements `offset` to `offset + length` of a tensor of this shape. It is cut into the end of its
        first row, whole rows, and the beginning of its last row. A part of a row is a run of a tensor with one
        dimension fewer, and is cut in the same way.
        """
        assert 0 <= offset <= offset + length <= math.prod(shape), f"run at {offset} of {length} in {shape}"
        return list(_boxes_of_run(offset, offset + length, (), shape)) if length else []

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.start, self.stop))

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(map(add, self.start, self.size))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def intersect(self, box: Box) -> Box | None:
        """The box that both cover, or None if they have no element in common."""
        start = tuple(map(max, self.start, box.start))
        size = tuple(min(a, b) - c for a, b, c in zip(self.stop, box.stop, start, strict=True))
        return Box(start, size) if all(n > 0 for n in size) else None

    def relative_to(self, outer: Box) -> Box:
        """The same box with its start counted from that of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.size)

    def permuted(self, order: tuple[int, ...]) -> Box:
        """The same box of the tensor whose dimension i is dimension `order[i]` of this one, as in `torch.permute`."""
        return Box(tuple(self.start[dim] for dim in order), tuple(self.size[dim] for dim in order))

    def runs(self, shape: tuple[int, ...], within: slice | None = None) -> list[tuple[int, int]]:
        """The box as `(offset, length)` runs of a contiguous tensor of this shape, in order.

        Args:
            within: elements of the flat tensor; runs outside of them are left out, and cost nothing.
        """
        if not self.numel:
            return []
        # The last dimensions, which the box covers whole, and the one before them form one run.
        tail = len(shape)
        while tail > 0 and self.size[tail - 1] == shape[tail - 1]:
            tail -= 1
        lead = max(tail - 1, 0)
        length = math.prod(self.size[lead:])
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        base = sum(a * s for a, s in zip(self.start, strides, strict=True))
        low, high = (within.start, within.stop) if within is not None else (0, math.prod(shape))
        offsets = [base]
        for size, stride in zip(self.size[:lead], strides[:lead], strict=True):
            # Below o, index i of this dimension has elements from o + i·stride to o + (i + 1)·stride only.
            offsets = [
                o + i * stride
                for o in offsets
                for i in range(max(0, (low - o) // stride), min(size, -((o - high) // stride)))
            ]
        return [(o, length) for o in offsets if o < high and o + length > low]


def _boxes_of_run(begin: int, end: int, lead: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Box]:
    """Elements `begin` to `end` of the tensor of `shape` that the first indices `lead` select from a larger one."""
    if not shape:
        yield Box(lead, (1,) * len(lead))
        return
    row_shape = shape[1:]
    stride = math.prod(row_shape)
    # The first row that begins inside of the run.
    first = -(-begin // stride)
    # The row in which the run ends.
    last = end // stride
    # The run is inside one row.
    if first > last:
        yield from _boxes_of_run(begin - last * stride, end - last * stride, (*lead, last), row_shape)
        return
    if begin < first * stride:
        yield from _boxes_of_run(begin - (first - 1) * stride, stride, (*lead, first - 1), row_shape)
    if first < last:
        yield Box((*lead, first, *(0,) * len(row_shape)), (*(1,) * len(lead), last - first, *row_shape))
    if last * stride < end:
        yield from _boxes_of_run(0, end - last * stride, (*lead, last), row_shape)


def box_segments(shape: tuple[int, ...], elements: int) -> Iterator[Box]:
    """The boxes of at most `elements` elements that make up a tensor, in order: of whole rows if a row has fewer."""
    total = Box.whole(shape).numel
    row = total // shape[0] if shape and shape[0] else total
    step = max(elements // row, 1) * row if 0 < row <= elements else elements
    for offset in range(0, total, step):
        yield from Box.of_run(offset, min(step, total - offset), shape)
