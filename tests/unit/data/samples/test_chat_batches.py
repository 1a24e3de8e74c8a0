"""Packing of conversations: each once in an epoch, and the same samples however they are asked for."""

import numpy as np

from shardwise.data.samples.batch import IGNORE
from shardwise.data.samples.chat_batches import ConversationBatches, Conversations
from tests.unit.data.samples.small_batches import ROOM, chats


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
