"""Packing of conversations: each once in an epoch, and the same samples however they are asked for."""

import numpy as np
import pytest

from shardwise.data.samples import conversations
from shardwise.data.samples.batch import IGNORE
from shardwise.data.samples.conversations import ConversationBatches, Conversations

ROOM = 20


def chats(number: int, seed: int = 0, longest: int = 12) -> Conversations:
    """Conversations of distinct tokens, each with one answer or two."""
    draws = np.random.default_rng(seed)
    lengths = draws.integers(4, longest + 1, number)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    answers = []
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        middle = (begin + end) // 2
        answers += [(begin + 1, middle), (middle + 1, end)] if draws.random() < 0.5 else [(middle, end)]
    return Conversations(np.arange(1, bounds[-1] + 1, dtype=np.int32), bounds, np.array(answers))


def test_a_sample_has_whole_conversations_that_are_read_by_themselves() -> None:
    data = chats(30)
    batches = ConversationBatches(data, ROOM, seed=7)
    batch = batches.global_batch(0, batches.num_samples)
    seen: list[int] = []
    for b in range(batches.num_samples):
        ids, targets, positions, starts = (
            batch.inputs[name][:, b] for name in ("ids_SB", "targets_SB", "positions_SB", "starts_SB")
        )
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


def test_samples_are_a_function_of_the_seed_and_the_number_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "WINDOW", 16)
    whole = ConversationBatches(chats(50), ROOM, seed=7).global_batch(0, 120)
    # A resumed run asks for any part first, and for others again.
    batches = ConversationBatches(chats(50), ROOM, seed=7)
    # A batch of a mixture may have none of them.
    assert [len(part) for part in batches.draw(3, 0)] == [0, 0]
    for consumed in (100, 40, 0, 60):
        part = batches.global_batch(consumed, 20)
        for name, array in part.inputs.items():
            assert (array == whole.inputs[name][:, consumed : consumed + 20]).all()
    by_rank = [batches.local_batch(40, 16, rank, 2, 4) for rank in range(2)]
    for place, (rank, number) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        columns = slice(40 + 4 * place, 44 + 4 * place)
        assert (by_rank[rank][number].inputs["ids_SB"] == whole.inputs["ids_SB"][:, columns]).all()
    other = ConversationBatches(chats(50), ROOM, seed=8).global_batch(0, 120)
    assert not (other.inputs["ids_SB"] == whole.inputs["ids_SB"]).all()


def test_every_epoch_has_each_conversation_once_in_other_packs() -> None:
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


def test_a_long_conversation_is_cut_and_one_without_a_target_left_out() -> None:
    bounds = np.array([0, 30, 34, 60])
    data = Conversations(np.arange(1, 61, dtype=np.int32), bounds, np.array([[5, 8], [15, 30], [32, 34], [55, 60]]))
    assert data.usable(10).tolist() == [0, 1]
    assert data.usable(21).tolist() == [0, 1, 2]
    ids, targets = data.targets(0, 10)
    assert ids.tolist() == list(range(1, 11))
    assert targets.tolist() == [IGNORE] * 4 + [6, 7, 8] + [IGNORE] * 3
    ids, targets = data.targets(0, 20)
    assert targets.tolist()[-6:] == [16, 17, 18, 19, 20, 21]
    # The first token is no target, even of an answer.
    assert Conversations(data.tokens, bounds, np.array([[0, 1]])).usable(10).tolist() == []
    assert Conversations(data.tokens, bounds, np.empty((0, 2), dtype=np.int64)).usable(10).tolist() == []


def test_a_sample_that_counts_nothing_has_no_targets() -> None:
    batches = ConversationBatches(chats(5), ROOM, seed=0)
    blank = batches.blank(3)
    assert blank.counts.tolist() == [0]
    assert (blank.inputs["targets_SB"] == IGNORE).all()
    assert blank.inputs.keys() == batches.global_batch(0, 3).inputs.keys()
    assert all(array.shape == (ROOM, 3) for array in blank.inputs.values())
    parts = [batch for rank in range(2) for batch in batches.eval_batches(9, 4, rank, 2, 2)]
    assert sum(int(batch.counts[0]) for batch in parts) == sum(np.diff(batches.conversations.answers).ravel())
