"""Samples of stages with several lengths: each token of an epoch once, whatever the lengths and the border."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.samples import packing
from shardwise.data.samples.batch import Batches, BlendedBatches
from shardwise.data.samples.causal import TokenBatches
from shardwise.data.samples.order import MixtureStage
from shardwise.data.samples.packing import PackedBatches, PackedSamples, packed_windows
from tests.unit.data.samples.small_batches import bounds_of

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
    return BlendedBatches(
        sources, [MixtureStage(0, 0, {"a": 1, "b": 1}), MixtureStage(9, 6, {"b": 1})], BLOCK // length
    )


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


def test_a_source_goes_on_at_the_border_where_it_was() -> None:
    short, long = blend(8), blend(24)
    for border in (2, 5, 6, 9):
        tokens = Counter(read(short, 0, border, 8) + read(long, border, 18, 24))
        assert max(tokens.values()) == 1
        assert sum(token < 1000 for token in tokens) == 3 * BLOCK, "three of the first six blocks are of a"


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


def test_a_long_document_is_whole_in_a_long_sample() -> None:
    """Best fit at the shortest length puts the rests of the two long documents into one sample."""
    packs: PackedSamples
    (packs,) = packed_windows(bounds_of([26, 36, 11, 11, 11]), 10, 8)
    assert sorted(map(tuple, packs.joined(8).pieces.tolist())) == [(0, 25), (26, 35), (62, 10), (73, 10), (84, 10)]
    assert packs.facts.samples == 16
