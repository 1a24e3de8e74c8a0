"""Packed documents and conversations against their definitions, and samples of stages with several lengths."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.samples import packing
from shardwise.data.samples.batch import IGNORE, Batches, BlendedBatches
from shardwise.data.samples.causal import TokenBatches
from shardwise.data.samples.chat_batches import ConversationBatches, Conversations
from shardwise.data.samples.order import MixtureStage
from shardwise.data.samples.packing import PackedBatches, PackedSamples, best_fit_packs, document_bounds, packed_windows
from tests.unit.data.samples.small_batches import ROOM, bounds_of, chats, packed_row

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


def test_a_sample_has_whole_conversations_that_are_read_by_themselves() -> None:
    data = chats(30)
    batches = ConversationBatches(data, ROOM, seed=7)
    batch = batches.global_batch(0, batches.num_samples)
    seen: list[int] = []
    for b in range(batches.num_samples):
        names = ("ids_SB", "targets_SB", "positions_SB", "starts_SB")
        ids, targets, positions, starts = (batch.inputs[name][:, b] for name in names)
        assert positions.tolist() == (np.arange(ROOM) - starts).tolist()
        for start in np.unique(starts).tolist():
            rows = starts == start
            if not ids[start]:  # padding, at the end
                assert rows[start:].all()
                assert (targets[rows] == IGNORE).all()
                continue
            number = int(np.searchsorted(data.bounds, ids[start] - 1))
            seen.append(number)
            begin, end = data.bounds[number : number + 2].tolist()
            assert ids[rows].tolist() == data.tokens[begin : end - 1].tolist()
            is_answer = [any(a <= place < z for a, z in data.answers.tolist()) for place in range(begin + 1, end)]
            expected = np.where(is_answer, data.tokens[begin + 1 : end], IGNORE)
            assert targets[rows].tolist() == expected.tolist()
    assert sorted(seen) == list(range(30))
    assert batch.counts.tolist() == [np.count_nonzero(batch.inputs["targets_SB"] != IGNORE)]


def test_every_epoch_has_each_usable_conversation_once() -> None:
    data = chats(40)
    batches = ConversationBatches(data, ROOM, seed=7)
    consumed = 0
    packs = []
    for epoch in range(3):
        indices, epochs = batches.draw(consumed, 200)
        number = int((epochs == epoch).sum())
        assert indices[:number].tolist() == list(range(number))
        ids = batches.global_batch(consumed, number).inputs["ids_SB"]
        firsts = set(data.tokens[data.bounds[:-1]].tolist())
        packs.append({frozenset(firsts & set(ids[:, b].tolist())) for b in range(number)})
        assert sorted(first for pack in packs[-1] for first in pack) == sorted(firsts)
        consumed += number
    assert packs[0] != packs[1] != packs[2]
    bounds = np.array([0, 30, 34, 60])
    data = Conversations(np.arange(1, 61, dtype=np.int32), bounds, np.array([[5, 8], [15, 30], [32, 34], [55, 60]]))
    assert (data.usable(10).tolist(), data.usable(21).tolist()) == ([0, 1], [0, 1, 2])
    ids, targets = data.targets(0, 10)
    assert ids.tolist() == list(range(1, 11))
    assert targets.tolist() == [IGNORE] * 4 + [6, 7, 8] + [IGNORE] * 3
    ids, targets = data.targets(0, 20)
    assert targets.tolist()[-6:] == [16, 17, 18, 19, 20, 21]
    # The first token is no target, even of an answer.
    assert Conversations(data.tokens, bounds, np.array([[0, 1]])).usable(10).tolist() == []
    assert Conversations(data.tokens, bounds, np.empty((0, 2), dtype=np.int64)).usable(10).tolist() == []


BLOCK = 24
TOKENS = np.arange(1, 400)


def read(batches: Batches, first_block: int, stop_block: int, length: int) -> list[int]:
    """The tokens of these blocks of the run, as a stage of this length reads them."""
    together = BLOCK // length
    batch = batches.global_batch(first_block * together, (stop_block - first_block) * together)
    return np.asarray(batch.inputs["ids_SB"]).T.ravel().tolist()


def rows(length: int) -> Batches:
    return TokenBatches(TOKENS, length, seed=3, together=BLOCK // length)


def blend(length: int) -> Batches:
    sources = {
        name: TokenBatches(TOKENS + 1000 * number, length, number, together=BLOCK // length)
        for number, name in enumerate("ab")
    }
    stages = [MixtureStage(0, 0, {"a": 1, "b": 1}), MixtureStage(9, 6, {"b": 1})]
    return BlendedBatches(sources, stages, BLOCK // length)


def packed(length: int) -> Batches:
    bounds = np.array([0, 30, 42, 45, 101, 103, 171, 180, len(TOKENS)])
    (window,) = packed_windows(bounds, 4, BLOCK // 4)
    return PackedBatches(TOKENS, window.joined(length // 4), 5, BLOCK // length)


@pytest.mark.parametrize("make", [rows, packed])
@pytest.mark.parametrize("lengths", [(24, 8), (8, 12)])
def test_each_token_of_an_epoch_is_read_once_across_a_border(make, lengths: tuple[int, int]) -> None:
    first, second = map(make, lengths)
    blocks = first.num_samples * lengths[0] // BLOCK
    assert blocks == second.num_samples * lengths[1] // BLOCK
    expected = Counter(read(second, 0, blocks, lengths[1]))
    del expected[0]  # padding
    assert set(expected.values()) == {1}
    for border in (1, 5, blocks - 1, blocks + 3):
        tokens = Counter(read(first, 0, border, lengths[0]) + read(second, border, 2 * blocks, lengths[1]))
        assert all(tokens[token] == 2 for token in expected), f"border {border}: twice in two epochs"
    orders = [read(second, number * blocks, (number + 1) * blocks, lengths[1]) for number in range(2)]
    assert orders[0] != orders[1]


def test_a_source_goes_on_at_a_border_and_long_documents_stay_whole() -> None:
    short, long = blend(8), blend(24)
    for border in (2, 5, 6, 9):
        tokens = Counter(read(short, 0, border, 8) + read(long, border, 18, 24))
        assert max(tokens.values()) == 1
        assert sum(token < 1000 for token in tokens) == 3 * BLOCK, "three of the first six blocks are of a"
    # Best fit at the shortest length puts the rests of the two long documents into one sample.
    packs: PackedSamples
    (packs,) = packed_windows(bounds_of([26, 36, 11, 11, 11]), 10, 8)
    assert sorted(map(tuple, packs.joined(8).pieces.tolist())) == [(0, 25), (26, 35), (62, 10), (73, 10), (84, 10)]
    assert packs.facts.samples == 16


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=40), st.sampled_from([3, 1 << 20]), st.sampled_from([2, 3, 6]))
def test_packed_blocks_have_each_token_once(lengths: list[int], window: int, number: int) -> None:
    bounds = bounds_of(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW", window)
        windows = [*packed_windows(bounds, 10, 6)]
    last = set((bounds[1:][np.diff(bounds) > 0] - 1).tolist())
    expected = [place for place in range(bounds[-1]) if place not in last]
    tokens: list[int] = []
    for packs in windows:
        assert packs.facts.samples == len(packs.begins) - 1
        assert packs.facts.samples % 6 == 0
        if not packs.facts.samples:
            continue
        joined = packs.joined(number)
        assert len(joined.begins) - 1 == joined.facts.samples == packs.facts.samples // number
        for begin, end in pairwise(joined.begins.tolist()):
            assert joined.pieces[begin:end, 1].sum() <= 10 * number
        tokens += [int(start) + place for start, size in joined.pieces.tolist() for place in range(size)]
    assert sorted(tokens) == expected
