"""Samples of conversations: whole conversations packed into sequences, with the answers as targets.

Shapes: B = samples, S = sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from threading import Lock

import numpy as np

from shardwise.data.rows import IntArray, TokenArray
from shardwise.data.samples.batch import IGNORE, Batch, Batches
from shardwise.data.samples.order import SampleOrder, mix_integer
from shardwise.data.samples.packing import Packs, best_fit_packs, packed_batch

WINDOW = 4096
"""Conversations that are packed together: their lengths fill sequences nearly as well as those of all."""
# "convers" and "packs": keep these orders independent of each other and of other samples' orders.
_CONVERSATION_ORDER = 0x636F6E76657273
_PACK_ORDER = 0x7061636B73
# A batch at the end of an epoch holds samples of the next one too.
_EPOCHS_KEPT = 2


@dataclass(frozen=True)
class Conversations:
    """The tokens of the conversations of a part."""

    tokens: TokenArray  # all tokens, one conversation after another
    bounds: IntArray  # first token of each conversation, then the number of tokens, [conversations + 1]
    answers: IntArray  # first and next token of each answer, in their order, [answers, 2]

    @cached_property
    def lengths(self) -> IntArray:
        return np.diff(self.bounds)

    @cached_property
    def _begins(self) -> IntArray:
        # Contiguous, as every search would copy a column of `answers`.
        return np.ascontiguousarray(self.answers[:, 0])

    def usable(self, length: int) -> IntArray:
        """The conversations of which `length` tokens that are read have a target; the others teach nothing."""
        if not len(self.answers):
            return np.empty(0, dtype=np.int64)
        number = np.searchsorted(self.bounds, self._begins, side="right") - 1
        # The first token of a conversation is no target, as nothing is before it.
        first = np.maximum(self._begins, self.bounds[number] + 1)
        is_target = (first < self.answers[:, 1]) & (first <= self.bounds[number] + length)
        return np.unique(number[is_target])

    def targets(self, number: int, length: int) -> tuple[IntArray, IntArray]:
        """The first `length` tokens that a conversation reads at most, and the target of each, else `IGNORE`."""
        begin = int(self.bounds[number])
        end = min(int(self.bounds[number + 1]), begin + length + 1)
        tokens = np.asarray(self.tokens[begin:end], dtype=np.int64)
        targets = np.full(len(tokens), IGNORE, dtype=np.int64)
        first, last = np.searchsorted(self._begins, [begin, end])
        for answer_begin, answer_end in (self.answers[first:last] - begin).tolist():
            targets[answer_begin:answer_end] = tokens[answer_begin:answer_end]
        return tokens[:-1], targets[1:]


class ConversationBatches(Batches):
    """Batches of conversations, each of which attends to itself alone and has positions from 0 on.

    In each epoch the conversations come in another order, keyed by (seed, epoch); each `WINDOW` of them is packed by
    `best_fit_packs` into samples of S tokens, and the samples are shuffled. So a batch is a function of (seed, samples
    consumed). The number of samples differs a little between epochs, and is found by packing all epochs before.

    A conversation of n tokens reads n - 1 of them, as the last one is a target alone. One that is longer than S + 1 is
    cut at its end. Inputs: see `causal_batch`. The rest of a sample is padding: ids 0, which are a document of their
    own, and targets `IGNORE`.
    """

    objectives = ("lm",)

    def __init__(self, conversations: Conversations, sequence_length: int, seed: int) -> None:
        self.conversations = conversations
        self.sequence_length = sequence_length
        self._seed = seed
        self._usable = conversations.usable(sequence_length)
        self._sizes = np.minimum(conversations.lengths[self._usable] - 1, sequence_length)
        self._order = SampleOrder(len(self._usable), mix_integer(_CONVERSATION_ORDER, seed))
        self._begins = [0]  # the first sample of each epoch that is known
        self._epochs: dict[int, Packs] = {}
        self._making = Lock()
        super().__init__(len(self._packs(0)), seed)

    def draw(self, consumed: int, count: int) -> tuple[IntArray, IntArray]:
        # A global batch of a mixture may have no sample of a source.
        indices = [np.empty(0, dtype=np.int64)]
        epochs = [np.empty(0, dtype=np.int64)]
        epoch = 0
        while count > 0:
            while consumed >= self._end(epoch):
                epoch += 1
            taken = min(count, self._end(epoch) - consumed)
            indices.append(np.arange(taken) + consumed - self._begins[epoch])
            epochs.append(np.full(taken, epoch))
            consumed += taken
            count -= taken
        return np.concatenate(indices), np.concatenate(epochs)

    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        shape = (self.sequence_length, len(indices))
        ids_SB = np.zeros(shape, dtype=np.int64)
        targets_SB = np.full(shape, IGNORE, dtype=np.int64)
        starts_SB = np.zeros(shape, dtype=np.int64)
        for b, (index, epoch) in enumerate(zip(indices.tolist(), epochs.tolist(), strict=True)):
            place = 0
            packs = self._packs(epoch)
            # A sample that counts nothing has no conversations.
            numbers = packs.members[packs.begins[index] : packs.begins[index + 1]].tolist() if index >= 0 else []
            for number in numbers:
                ids, targets = self.conversations.targets(number, self.sequence_length)
                rows = slice(place, place + len(ids))
                ids_SB[rows, b] = ids
                targets_SB[rows, b] = targets
                starts_SB[rows, b] = place
                place = rows.stop
            starts_SB[place:, b] = place
        return packed_batch(ids_SB, targets_SB, starts_SB, samples)

    def _end(self, epoch: int) -> int:
        """The number of samples before the end of an epoch; those of the epochs before must be known."""
        if epoch + 1 == len(self._begins):
            self._packs(epoch)
        return self._begins[epoch + 1]

    def _packs(self, epoch: int) -> Packs:
        """The samples of an epoch. Those of two epochs are kept, as a batch may lie in both."""
        with self._making:
            if epoch not in self._epochs:
                while len(self._epochs) >= _EPOCHS_KEPT:
                    del self._epochs[min(self._epochs)]
                self._epochs[epoch] = self._pack(epoch)
            packs = self._epochs[epoch]
            if epoch + 1 == len(self._begins):
                self._begins.append(self._begins[-1] + len(packs))
            return packs

    def _pack(self, epoch: int) -> Packs:
        number = len(self._usable)
        members: list[IntArray] = []
        sizes: list[IntArray] = []
        for start in range(0, number, WINDOW):
            order = self._order.indices(epoch * number + start, min(WINDOW, number - start))
            packs = best_fit_packs(self._sizes[order], self.sequence_length)
            members.append(self._usable[order[packs.members]])
            sizes.append(packs.sizes)
        # Packs of a window are sorted by the length of their longest conversation.
        packs = Packs.from_sizes(np.concatenate(members), np.concatenate(sizes))
        return packs.shuffled(mix_integer(_PACK_ORDER, self._seed), epoch)
