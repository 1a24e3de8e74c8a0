"""Samples of documents: the same at any layout, whole epochs, and what they are made of."""

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


@settings(deadline=None, max_examples=50)
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


def test_a_part_is_its_own_documents_and_sentences() -> None:
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
