"""Samples of a row of tokens and of documents: their order and content, and what the end of a document changes."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import ConfigError, DataError
from shardwise.data.formats.prepared_data import document_ends
from shardwise.data.reading.megatron_files import IndexedFile, MegatronDocuments
from shardwise.data.samples.batch import IGNORE, Batch
from shardwise.data.samples.causal import DocumentBatches, DocumentEnds, TokenBatches, causal_batch
from shardwise.data.samples.order import SampleOrder, mix_bits, mix_integer
from shardwise.data.tokens.tokenizer import train_tokenizer
from tests.unit.data.samples.small_batches import made, whole
from tests.unit.data.small_runs import config

END = 0


@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=8, max_size=8), min_size=1, max_size=4),
    masks=st.booleans(),
    targets=st.integers(0, 7),
)
@settings(deadline=None)
def test_each_token_by_hand(rows: list[list[int]], masks: bool, targets: int) -> None:
    ends = DocumentEnds(END, masks, reset_position_ids=True, reset_attention_mask=True)
    batch = causal_batch(np.array(rows), np.full(len(rows), targets), np.arange(len(rows)), ends)
    counted = 0
    for column, row in enumerate(rows):
        start = 0
        for place, token in enumerate(row[:-1]):
            if 0 < place <= targets and row[place - 1] == END:
                start = place  # behind the last token no document begins: there is padding
            counts = place < targets and not (masks and token == END)
            counted += counts
            found = {name: array[place, column] for name, array in batch.inputs.items()}
            assert found == {
                "ids_SB": token,
                "targets_SB": row[place + 1] if counts else IGNORE,
                "positions_SB": place - start,
                "starts_SB": start,
            }, f"place {place} of {row}"
    assert batch.counts.tolist() == [counted]


def test_only_what_is_asked_for_is_in_the_batch() -> None:
    rows = np.array([[1, END, 2, 3]])
    for asked, names in (
        ({"mask_loss": True}, set()),
        ({"reset_position_ids": True}, {"positions_SB"}),
        ({"reset_attention_mask": True}, {"starts_SB"}),
    ):
        batch = causal_batch(rows, np.array([3]), np.array([0]), DocumentEnds(END, **asked))
        assert batch.inputs.keys() == {"ids_SB", "targets_SB", *names}
    assert causal_batch(rows, np.array([3]), np.array([0]), None).counts.tolist() == [3]


def test_the_token_is_the_tokenizers_unless_it_is_named(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a b c"], 257, "test")
    tokenizer.save(tmp_path)
    assert document_ends(config(family="gpt", path="x").data, tmp_path) is None
    masked = config(family="gpt", path="x", eod_mask_loss=True)
    assert document_ends(masked.data, tmp_path) == DocumentEnds(tokenizer.end_of_document_id, True)
    named = config(family="gpt", path="x", reset_attention_mask=True, eod_token=7)
    assert document_ends(named.data, None) == DocumentEnds(7, reset_attention_mask=True)
    with pytest.raises(ConfigError) as caught:
        document_ends(config(family="gpt", path="x", reset_position_ids=True).data, None)
    assert caught.value.problems == [
        "data.reset_position_ids (true) needs the id of the token that ends a document: set data.eod_token, or "
        "data.tokenizer to the one that made the data"
    ]


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
    assert (part.lengths().tolist(), part.beginning(4)) == ([4, 0, 5], [3, 4, 5, 6])
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
    text = rf"^data\.bin: token 8 \({token}\), in document 2, must be in 0 … 49: set model\.vocab_size to that of the"
    with pytest.raises(DataError, match=text):
        batches.global_batch(0, batches.num_samples)
    assert DocumentBatches(MegatronDocuments(file, 0, 2, 50), 2, seed=0).global_batch(0, 2).counts.tolist() == [4]


seeds = st.integers(0, 2**63 - 1)


@settings(deadline=None, max_examples=50)
@given(num_samples=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 10**6))
def test_an_epoch_holds_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    order = SampleOrder(num_samples, seed).indices(epoch * num_samples, num_samples)
    assert np.array_equal(np.sort(order), np.arange(num_samples))


@settings(deadline=None, max_examples=40)
@given(
    num_samples=st.integers(1, 500),
    seed=seeds,
    start=st.integers(0, 2000),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
)
def test_order_does_not_depend_on_where_a_run_stops(num_samples: int, seed: int, start: int, counts: list[int]) -> None:
    whole = SampleOrder(num_samples, seed).indices(start, sum(counts))
    starts = start + np.cumsum([0, *counts])
    parts = [SampleOrder(num_samples, seed).indices(int(a), count) for a, count in zip(starts, counts, strict=False)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_orders_are_even_and_the_same_on_every_machine() -> None:
    first = SampleOrder(1000, 1).indices(0, 3000).reshape(3, 1000)
    other = SampleOrder(1000, 2).indices(0, 1000)
    for a, b in ((first[0], first[1]), (first[1], first[2]), (first[0], other), (first[0], np.arange(1000))):
        assert np.mean(a == b) < 0.02
    # Checkpoints and golden curves rest on these numbers.
    assert SampleOrder(10, 1234).indices(0, 20).tolist() == [8, 7, 0, 4, 3, 2, 1, 6, 5, 9, 6, 2, 9, 7, 3, 0, 4, 8, 5, 1]
    large = SampleOrder(3_000_000_007, 7).indices(2**40, 1000)
    assert hashlib.sha256(large.astype("<i8").tobytes()).hexdigest()[:16] == "95027a6a7d7b5e5d"
    values = [0, 1, 2**63, 2**64 - 1]
    assert mix_bits(np.array(values, dtype=np.uint64)).tolist() == [mix_integer(value) for value in values]
    # Each sample lands at each position equally often: χ² over 1,000 seeds, 81 degrees of freedom.
    counts = np.zeros((10, 10))
    for seed in range(1000):
        counts[np.arange(10), SampleOrder(10, seed).indices(0, 10)] += 1
    assert ((counts - 100) ** 2 / 100).sum() < 140


@pytest.mark.parametrize(("length", "number"), [(1, 2), (4, 65), (9, 100), (16, 17)])
def test_samples_follow_one_another_in_the_row(length: int, number: int) -> None:
    batches = TokenBatches(np.arange(number, dtype=np.int32), length, seed=3)
    batch = batches.global_batch(5, 3 * batches.num_samples)
    ids_SB, targets_SB = batch.inputs["ids_SB"], batch.inputs["targets_SB"]
    assert np.array_equal(ids_SB[0], batches.sampler.indices(5, 3 * batches.num_samples) * length)
    assert np.array_equal(ids_SB, ids_SB[0] + np.arange(length)[:, None])
    assert np.array_equal(targets_SB, ids_SB + 1)
    assert batch.counts.tolist() == [3 * batches.num_samples * length]
    assert (batches.blank(2).inputs["ids_SB"] == 0).all()


@pytest.mark.parametrize("length", [1, 16, 100])
@pytest.mark.parametrize("tokens", [2, 17, 18, 64])
def test_with_its_tail_every_token_is_a_target_once(tokens: int, length: int) -> None:
    row = np.arange(1000, 1000 + tokens, dtype=np.uint16)
    batches = TokenBatches(row, length, seed=0, tail=True)
    found, counted = [], 0
    for rank in range(3):
        for batch in batches.eval_batches(batches.num_samples, 6, rank, 3, 2):
            ids_SB, targets_SB = batch.inputs["ids_SB"], batch.inputs["targets_SB"]
            assert ids_SB.shape == targets_SB.shape == (length, 2)
            real = targets_SB != IGNORE
            assert (targets_SB[real] == ids_SB[real] + 1).all(), "a target follows its input"
            found += targets_SB[real].tolist()
            counted += int(batch.counts[0])
    assert sorted(found) == row[1:].tolist()
    assert counted == tokens - 1


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the tokens \(4\) must be at least 5"):
        DocumentBatches(whole([[2], [2]]), 4, seed=0)
    with pytest.raises(ConfigError, match=r"the tokens \(16\) must be at least train\.sequence_length \+ 1 \(17\)"):
        TokenBatches(np.arange(16, dtype=np.uint16), 16, seed=0)
    with pytest.raises(ConfigError, match=r"the tokens \(1\) must be at least 2"):
        TokenBatches(np.arange(1, dtype=np.uint16), 16, seed=0, tail=True)
    with pytest.raises(ConfigError, match=r"number of samples \(0\)"):
        SampleOrder(0, 0)
