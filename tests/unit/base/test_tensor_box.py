"""Boxes: intersections, and runs of a flat tensor as the fewest boxes."""

import math
from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.tensor_box import Box

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...]]:
    shape = draw(SHAPES)
    offset = draw(st.integers(0, math.prod(shape)))
    return offset, draw(st.integers(0, math.prod(shape) - offset)), shape


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(start, tuple(draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True)))


def fewest(offset: int, length: int, shape: tuple[int, ...]) -> int:
    """How many boxes a run needs, by trying every way to cut it."""
    indices = [np.array(np.unravel_index(i, shape)) for i in range(math.prod(shape))]

    def is_box(a: int, b: int) -> bool:
        inside = np.array(indices[a:b]).reshape(b - a, len(shape))
        return not len(shape) or math.prod((inside.max(0) - inside.min(0) + 1).tolist()) == b - a

    @cache
    def needed(a: int) -> int:
        if a == offset + length:
            return 0
        return 1 + min(needed(b) for b in range(a + 1, offset + length + 1) if is_box(a, b))

    return needed(offset)


@given(runs())
@settings(deadline=None, max_examples=100)
def test_a_run_is_its_boxes_in_order(case: tuple[int, int, tuple[int, ...]]) -> None:
    offset, length, shape = case
    positions = np.arange(math.prod(shape)).reshape(shape)
    boxes = Box.of_run(offset, length, shape)
    found = [int(i) for box in boxes for i in positions[box.slices].flatten()]
    assert found == list(range(offset, offset + length))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert all(len(box.runs(shape)) == 1 for box in boxes)


@given(runs().filter(lambda case: math.prod(case[2]) <= 40))
@settings(deadline=None, max_examples=60)
def test_a_run_is_the_fewest_boxes(case: tuple[int, int, tuple[int, ...]]) -> None:
    assert len(Box.of_run(*case)) == fewest(*case), case


def test_runs_by_hand() -> None:
    assert Box.of_run(0, 12, (3, 4)) == [Box((0, 0), (3, 4))]
    assert Box.of_run(3, 7, (3, 4)) == [Box((0, 3), (1, 1)), Box((1, 0), (1, 4)), Box((2, 0), (1, 2))]
    assert Box.of_run(5, 2, (3, 4)) == [Box((1, 1), (1, 2))]
    assert Box.of_run(0, 1, ()) == [Box((), ())]
    assert Box.of_run(2, 0, (3, 4)) == []


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), boxes_of(shape), boxes_of(shape))))
@settings(deadline=None, max_examples=50)
def test_an_intersection_is_what_both_cover(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, a, b = case
    held = np.zeros(shape, dtype=int)
    held[a.slices] += 1
    held[b.slices] += 1
    common = a.intersect(b)
    assert common == b.intersect(a)
    assert (held == 2).sum() == (common.numel if common else 0)
    if common:
        assert (held[common.slices] == 2).all()
        assert np.array_equal(held[a.slices][common.relative_to(a).slices], held[common.slices])
