"""Samples of documents: the same at any layout, whole epochs, and what they are made of."""

import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import ConfigError, DataError
from shardwise.data.reading.megatron_files import IndexedFile, MegatronDocuments
from shardwise.data.samples.batch import Batch
from shardwise.data.samples.causal import DocumentBatches
from shardwise.data.samples.order import SampleOrder, mix_integer
from tests.unit.data.samples.small_batches import made, whole

unhurried = settings(deadline=None)


def rows(batches: list[Batch]) -> list[list[int]]:
    """The tokens of each sample, targets included."""
    found = []
    for batch in batches:
        ids_SB, targets_SB = batch.inputs["ids_SB"], batch.inputs["targets_SB"]
        assert np.array_equal(ids_SB[1:], targets_SB[:-1])
        found += np.concatenate([ids_SB, targets_SB[-1:]]).T.tolist()
    return found


def epoch_by_hand(lengths: list[int], length: int, seed: int, epoch: int) -> list[list[int]]:
    """Samples in the order of their numbers, straight from the definition."""
    starts = np.cumsum([0, *lengths])
    order = SampleOrder(len(lengths), mix_integer(0x646F63756D656E74, seed)).indices(epoch * len(lengths), len(lengths))
    row = [token for document in order for token in range(starts[document], starts[document + 1])]
    return [row[i * length : i * length + length + 1] for i in range((len(row) - 1) // length)]


documents_of = st.lists(st.lists(st.integers(0, 12), max_size=3), min_size=1, max_size=12)


@settings(unhurried, max_examples=100)
@given(
    documents=documents_of,
    length=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.sampled_from([0, 1, 7, 10**6]),
)
def test_samples_are_those_of_the_definition(documents: list[list[int]], length: int, seed: int, epoch: int) -> None:
    lengths = [sum(document) for document in documents]
    if sum(lengths) <= length:
        return
    batches = DocumentBatches(whole(documents), length, seed)
    expected = epoch_by_hand(lengths, length, seed, epoch)
    assert batches.num_samples == len(expected)
    order = batches.sampler.indices(epoch * len(expected), len(expected))
    assert rows([batches.global_batch(epoch * len(expected), len(expected))]) == [expected[i] for i in order]


def test_a_part_is_its_own_documents() -> None:
    file = made([[3], [2, 2], [], [5], [4]])
    part = MegatronDocuments(file, 1, 4, 1 << 30)
    assert (len(part), part.count) == (9, 3)
    assert part.lengths().tolist() == [4, 0, 5]
    assert part.beginning(4) == [3, 4, 5, 6]
    assert part.beginning(100) == list(range(3, 12))
    batches = DocumentBatches(part, 2, seed=1)
    seen = {token for row in rows([batches.global_batch(0, batches.num_samples)]) for token in row}
    assert seen <= set(range(3, 12))
    assert len(seen) == 9


def test_epochs_go_through_documents_in_other_orders() -> None:
    batches = DocumentBatches(whole([[10]] * 100), 10, seed=5)
    epochs = [np.array(rows([batches.global_batch(epoch * 99, 99)])) for epoch in range(3)]
    for first, second in pairwise(epochs):
        assert (first == second).all(axis=1).sum() < 5
        # Not only the samples: the joints of documents are others too.
        joints = [{tuple(row) for row in each.tolist()} for each in (first, second)]
        assert len(joints[0] & joints[1]) < 20


def test_order_is_the_same_on_every_machine() -> None:
    """Checkpoints rest on these numbers: the end of an epoch and the beginning of the next."""
    batches = DocumentBatches(whole([[3, 4], [6], [], [9], [2]]), 5, seed=1234)
    assert rows([batches.global_batch(2, 4)]) == [
        [5, 6, 22, 23, 13, 14],
        [19, 20, 21, 7, 8, 9],
        [15, 16, 17, 18, 19, 20],
        [12, 0, 1, 2, 3, 4],
    ]


def test_sentences_leave_out_what_has_no_tokens() -> None:
    documents = [[0, 3, 0, 2], [], [0], [4], [1, 1], []]
    found = whole(documents).sentences
    assert (found.bounds.tolist(), found.documents.tolist()) == ([0, 3, 5, 9, 10, 11], [0, 2, 3, 5])
    part = MegatronDocuments(made(documents), 3, 6, 1 << 30).sentences
    assert (part.bounds.tolist(), part.documents.tolist()) == ([0, 4, 5, 6], [0, 1, 3])
    empty = MegatronDocuments(made(documents), 5, 6, 1 << 30).sentences
    assert (empty.bounds.tolist(), empty.documents.tolist()) == ([0], [0])


@pytest.mark.parametrize("token", [-1, 50])
def test_a_token_beyond_the_vocabulary_is_named_when_it_is_read(token: int) -> None:
    tokens = np.arange(12, dtype=np.int32)
    tokens[8] = token
    file = IndexedFile(Path("data"), tokens, np.full(4, 3, dtype=np.int32), np.arange(4) * 12, np.arange(5))
    batches = DocumentBatches(MegatronDocuments(file, 1, 4, 50), 2, seed=0)
    text = (
        rf"^data\.bin: token 8 \({token}\), in document 2, must be in 0 … 49: set model\.vocab_size to that of the tok"
    )
    with pytest.raises(DataError, match=text):
        batches.global_batch(0, batches.num_samples)
    assert DocumentBatches(MegatronDocuments(file, 0, 2, 50), 2, seed=0).global_batch(0, 2).counts.tolist() == [4]


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the tokens \(4\) must be at least 5"):
        DocumentBatches(whole([[2], [2]]), 4, seed=0)


@pytest.mark.slow
def test_ten_million_documents_fit_in_two_gibibytes(capsys: pytest.CaptureFixture[str]) -> None:
    """The index of a batch that lies in two epochs, so two of them; its time is told, not judged."""
    count = 10_000_000
    sizes = np.random.default_rng(0).integers(1, 1000, count).astype(np.int32)
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64) * 2])
    tokens = np.broadcast_to(np.uint16(7), (int(sizes.sum(dtype=np.int64)),))
    file = IndexedFile(Path("data"), tokens, sizes, pointers, np.arange(count + 1))
    tracemalloc.start()
    started = time.perf_counter()
    batches = DocumentBatches(MegatronDocuments(file, 0, count, 100), 2048, seed=1)
    batches.local_batch(batches.num_samples - 4, 8, 0, 1, 8)
    seconds = time.perf_counter() - started
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    with capsys.disabled():
        print(f"\n{count:,} documents: {seconds:.1f} s for two epochs, {peak / 2**20:.0f} MiB at the peak")
    assert peak < 2**31
    assert held < 2 * 12.1 * count, "12 bytes a document and epoch"
