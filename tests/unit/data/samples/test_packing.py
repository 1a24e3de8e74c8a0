"""Best fit against its rule written out, and packed documents against the row that they come from."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.samples import packing
from shardwise.data.samples.batch import IGNORE
from shardwise.data.samples.packing import PackedSamples, best_fit_packs, document_bounds
from tests.unit.data.samples.small_batches import ROOM, bounds_of, packed_row

END = 3
LENGTHS = st.lists(st.integers(0, 3 * ROOM), min_size=1, max_size=40)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, ROOM), max_size=60))
def test_each_size_goes_into_the_fullest_pack_with_room(sizes: list[int]) -> None:
    """Of equally full packs, into the one that was filled last; of equal sizes, the first one goes first."""
    expected: list[list[int]] = []
    by_age: list[int] = []  # packs; the one that was filled last is the last one
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        used = {pack: sum(sizes[member] for member in expected[pack]) for pack in by_age}
        fitting = [pack for pack in by_age if used[pack] + sizes[number] <= ROOM]
        if fitting:
            pack = max(fitting, key=lambda pack: (used[pack], by_age.index(pack)))
            by_age.remove(pack)
        else:
            pack = len(expected)
            expected.append([])
        expected[pack].append(number)
        by_age.append(pack)
    packs = best_fit_packs(np.array(sizes, dtype=np.int64), ROOM)
    assert [packs.members[begin:end].tolist() for begin, end in pairwise(packs.begins)] == expected


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.sampled_from([4, 1 << 20]))
def test_documents_are_whole_unless_they_are_too_long(lengths: list[int], window: int) -> None:
    bounds = bounds_of(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW", window)
        packed = PackedSamples.from_bounds(bounds, ROOM)
    read = np.concatenate([start + np.arange(size) for start, size in packed.pieces.tolist()] or [np.empty(0)])
    last = set((bounds[1:][np.diff(bounds) > 0] - 1).tolist())
    assert sorted(read.tolist()) == [place for place in range(bounds[-1]) if place not in last], "each token once"
    begins = set(bounds.tolist())
    for start, size in packed.pieces.tolist():
        document = np.searchsorted(bounds, start, side="right") - 1
        if lengths[document] <= ROOM + 1:
            assert start in begins
            assert size == lengths[document] - 1
        else:
            assert size == ROOM or start + size + 1 in begins
    sizes = [packed.pieces[begin:end, 1].sum() for begin, end in pairwise(packed.begins)]
    assert all(0 < size <= ROOM for size in sizes)
    assert len(packed.begins) == packed.facts.samples + 1


def test_documents_end_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_SCANNED_TOKENS", 4)
    for row, bounds in (
        ([5, END, 6, END, END, 7], [0, 2, 4, 5, 6]),
        ([5, 6, 7, END], [0, 4]),
        ([5, 6, 7], [0, 3]),
        ([], [0]),
    ):
        assert document_bounds(np.array(row, dtype=np.uint16), END).tolist() == bounds


def test_each_piece_is_read_by_itself() -> None:
    batches = packed_row()
    batch = batches.collate(np.arange(batches.num_samples), *2 * [np.arange(batches.num_samples)])
    counted = 0
    for b in range(batches.num_samples):
        ids, targets, positions, starts = (
            batch.inputs[name][:, b].tolist() for name in ("ids_SB", "targets_SB", "positions_SB", "starts_SB")
        )
        place = 0
        for start, size in batches.packed.pieces[batches.packed.begins[b] : batches.packed.begins[b + 1]].tolist():
            piece = slice(place, place + size)
            assert ids[piece] == list(range(start + 1, start + size + 1))
            assert targets[piece] == list(range(start + 2, start + size + 2))
            assert starts[piece] == [place] * size
            assert positions[piece] == list(range(size))
            place += size
        counted += place
        rest = ROOM - place
        assert (ids[place:], targets[place:]) == ([0] * rest, [IGNORE] * rest)
        assert (starts[place:], positions[place:]) == ([place] * rest, list(range(rest)))
    assert batch.counts.tolist() == [counted] == [batches.packed.facts.targets]
