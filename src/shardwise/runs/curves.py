"""Curves of a run in few columns, so that a spike stays visible however many steps there are."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Column(NamedTuple):
    """The values of consecutive steps.

    Attributes:
        step: last step of the column.
        least, mean, largest: figures of the finite values in the column.
    """

    step: float
    least: float
    mean: float
    largest: float


@dataclass(frozen=True)
class Curve:
    """A number over the steps of a run.

    Attributes:
        columns: columns in the order of steps; None for one without a finite value.
        dots: (step, value) of single values, such as evaluations.
        breaks: first and last step at which the number is not finite.
        span: first and last step that the columns cover.
    """

    columns: Sequence[Column | None]
    dots: Sequence[tuple[float, float]] = ()
    breaks: tuple[float, float] | None = None
    span: tuple[int, int] = (0, 0)


def equal_counts(length: int, count: int) -> list[tuple[int, int]]:
    """Cut `length` positions into at most `count` ranges of equal length; returns begin and stop of each."""
    count = min(length, count)
    return [(column * length // count, (column + 1) * length // count) for column in range(count)]


def equal_widths(steps: Sequence[int], first: int, count: int) -> list[tuple[int, int]]:
    """Cut the positions of growing `steps`, from the step `first` on, into `count` ranges that span equally many steps.

    A range is empty if no step was recorded in it, as with `log.every=10`.
    """
    width = column_width((first, steps[-1]), count)
    ranges = []
    begin = bisect_left(steps, first)
    for column in range(count):
        stop = len(steps)  # of the last column: the rounding of its width must lose no step
        if column + 1 < count:
            stop = bisect_left(steps, first + (column + 1) * width, begin)
        ranges.append((begin, stop))
        begin = stop
    return ranges


def column_width(span: tuple[int, int], count: int) -> float:
    """Steps of each of `count` columns that cover a span."""
    first, last = span
    return max(1, last - first + 1) / count


def columns_of(steps: Sequence[int], values: Sequence[float], ranges: Sequence[tuple[int, int]]) -> list[Column | None]:
    """Reduce each range of positions to its last step and to the least, mean and largest finite value in it."""
    columns: list[Column | None] = []
    for begin, stop in ranges:
        finite = finite_values(values[begin:stop])
        if not finite:
            columns.append(None)
            continue
        least = min(finite)
        largest = max(finite)
        mean = min(max(sum(finite) / len(finite), least), largest)  # rounding may put the mean outside
        columns.append(Column(steps[stop - 1], least, mean, largest))
    return columns


def finite_values(values: Sequence[float]) -> Sequence[float]:
    # The first test runs at the speed of C, and nearly all parts of a curve pass it.
    return values if all(map(math.isfinite, values)) else [value for value in values if math.isfinite(value)]
