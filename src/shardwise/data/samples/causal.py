"""Samples of a causal language model: a row of tokens, and as targets the same row one token further.

`TokenBatches` cuts one long row of tokens; `DocumentBatches` cuts the row that the documents of a Megatron data set
make in another order in each epoch.

Shapes: B = samples, S = sequence length.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np

from shardwise.base.errors import ConfigError, see
from shardwise.data.rows import AnyArray, Int32Array, IntArray, Integers
from shardwise.data.samples.batch import IGNORE, Batch, Batches, TokenSource
from shardwise.data.samples.order import SampleOrder, concatenated_ranges, mix_integer


@dataclass(frozen=True)
class DocumentEnds:
    """Changes within a sample at the end of a document, as Megatron-LM's options of these names make them.

    The token that ends a document belongs to it. The first document of a sample may begin in an earlier sample.
    """

    token: int  # id of the token that ends a document
    mask_loss: bool = False  # True if the token after the end is no target, as nothing before could predict it
    reset_position_ids: bool = False  # True if positions begin with 0 again after the end
    reset_attention_mask: bool = False  # True if tokens after the end attend to none of those before


def causal_batch(rows_BS: IntArray, targets_B: IntArray, samples: IntArray, ends: DocumentEnds | None) -> Batch:
    """The batch of rows of S + 1 tokens; in each row the `targets_B` tokens after the first are targets.

    Inputs: `ids_SB` and `targets_SB`, which is `IGNORE` at positions that are not counted; as `ends` asks,
    `positions_SB`, and `starts_SB`: the first place that each place attends to.
    """
    length = rows_BS.shape[1] - 1
    targets_SB = rows_BS[:, 1:].T.copy()  # inputs and targets must not share memory
    targets_SB[np.arange(length)[:, None] >= targets_B] = IGNORE
    ids_SB = rows_BS[:, :-1].T.copy()
    inputs = {"ids_SB": ids_SB, "targets_SB": targets_SB}
    if ends is not None:
        places_S1 = np.arange(length)[:, None]
        # Padding may have the id of an end: it would be a document for each of its places.
        ended_SB = (ids_SB == ends.token) & (places_S1 < targets_B)
        if ends.mask_loss:
            targets_SB[ended_SB] = IGNORE
        # A document begins at the place after an end. The largest of the beginnings up to a place is that of its own
        # document; the first document of a sample counts from place 0.
        begins_SB = np.zeros_like(ids_SB)
        begins_SB[1:] = np.where(ended_SB[:-1], places_S1[1:], 0)
        starts_SB = np.maximum.accumulate(begins_SB, axis=0)
        if ends.reset_position_ids:
            inputs["positions_SB"] = places_S1 - starts_SB
        if ends.reset_attention_mask:
            inputs["starts_SB"] = starts_SB
    return Batch(inputs, np.array([np.count_nonzero(targets_SB != IGNORE)]), samples, targets_B)


class RowBatches(Batches):
    """Batches of samples that are a row of tokens each. A sample that counts nothing has ids 0 and targets `IGNORE`."""

    objectives = ("lm",)

    def __init__(
        self, num_samples: int, seed: int, sequence_length: int, ends: DocumentEnds | None, together: int = 1
    ) -> None:
        super().__init__(num_samples, seed, together)
        self.sequence_length = sequence_length
        self.ends = ends

    @abstractmethod
    def row(self, index: int) -> AnyArray:
        """The tokens of a sample, at most S + 1: all but the first are targets."""

    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        rows_BS = np.zeros((len(indices), self.sequence_length + 1), dtype=np.int64)
        targets_B = np.zeros(len(indices), dtype=np.int64)
        for place, index in enumerate(indices.tolist()):
            if index >= 0:
                row = self.row(index)
                rows_BS[place, : len(row)] = row
                targets_B[place] = len(row) - 1
        return causal_batch(rows_BS, targets_B, samples, self.ends)


class TokenBatches(RowBatches):
    """Batches over one long row of tokens: sample `i` is `tokens[i·S : i·S + S + 1]`.

    Args:
        tail: True if the tokens after the last complete sample are a sample too, padded with ids 0 and targets
            `IGNORE`: every token except the first is then a target, exactly once.
    """

    def __init__(
        self,
        tokens: TokenSource,
        sequence_length: int,
        seed: int,
        *,
        tail: bool = False,
        ends: DocumentEnds | None = None,
        together: int = 1,
    ) -> None:
        least = 2 if tail else sequence_length * together + 1
        if len(tokens) < least:
            limit = "2, one to read and one to predict" if tail else f"train.sequence_length + 1 ({least})"
            raise ConfigError(f"the tokens ({len(tokens)}) must be at least {limit}{see('data#too-few-tokens')}")
        targets = len(tokens) - 1
        num_samples = -(-targets // sequence_length) if tail else targets // sequence_length
        super().__init__(num_samples, seed, sequence_length, ends, together)
        self.tokens = tokens

    def row(self, index: int) -> AnyArray:
        first = index * self.sequence_length
        return self.tokens.take(np.arange(first, min(first + self.sequence_length + 1, len(self.tokens))))


class Documents(TokenSource, Protocol):
    """Documents of a data set of Megatron's, and the row of all of their tokens."""

    @property
    def count(self) -> int: ...

    def starts(self, numbers: Integers, /) -> IntArray:
        """The place of the first token of each of these documents."""
        ...

    def lengths(self) -> IntArray:
        """The tokens of each document."""
        ...


# "document": keeps the order of documents independent of that of samples, which is drawn from the seed itself.
_DOCUMENT_ORDER = 0x646F63756D656E74
# Documents that are permuted at once: their arrays fit in a core's cache.
_ROWS_AT_ONCE = 1 << 16
# A batch at the end of an epoch holds samples of the next one too.
_EPOCHS_KEPT = 2


@dataclass(frozen=True)
class _EpochIndex:
    """The documents of one epoch in their order, and their places in the row that they make."""

    order: Int32Array | IntArray  # document numbers, [count]
    begins: IntArray  # first token of each document in the row, then the number of tokens, [count + 1]


class DocumentBatches(Batches):
    """Batches over documents that are joined in another order in each epoch, as in Megatron's GPT data set.

    Sample `i` of epoch `e` is tokens `[i·S, i·S + S]` of the row that the documents make in the order of epoch `e`: it
    may begin and end within documents, and its last token is the first one of sample `i + 1`. The order of the
    documents and that of the samples are permutations keyed by (seed, `e`) (`SampleOrder`), so a batch is a function of
    (seed, samples consumed). The tokens after the last whole sample are left out in that epoch.

    The first batch of an epoch makes its index: 12 bytes a document, or 16 if there are 2³¹ documents or more. Then
    any sample is found in the same time.

    Inputs: see `causal_batch`. A sample that counts nothing has ids 0 and targets `IGNORE`.
    """

    objectives = ("lm",)

    def __init__(
        self,
        documents: Documents,
        sequence_length: int,
        seed: int,
        *,
        ends: DocumentEnds | None = None,
        together: int = 1,
    ) -> None:
        least = sequence_length * together + 1
        if len(documents) < least:
            raise ConfigError(f"the tokens ({len(documents)}) must be at least {least}{see('data#too-few-tokens')}")
        super().__init__((len(documents) - 1) // sequence_length, seed, together)
        self.documents = documents
        self.sequence_length = sequence_length
        self.ends = ends
        self._order = SampleOrder(documents.count, mix_integer(_DOCUMENT_ORDER, seed))
        self._epochs: dict[int, _EpochIndex] = {}
        self._making = Lock()

    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        length = self.sequence_length
        rows_BS = np.zeros((len(indices), length + 1), dtype=np.int64)
        begins_B = indices * length
        # A sample that counts nothing is a row without tokens.
        real_B = indices >= 0
        for epoch in np.unique(epochs).tolist():
            chosen = np.flatnonzero((epochs == epoch) & real_B)
            if chosen.size:
                places = self._places(epoch, begins_B[chosen])
                rows_BS[chosen] = self.documents.take(places).reshape(len(chosen), length + 1)
        return causal_batch(rows_BS, np.where(real_B, length, 0), samples, self.ends)

    def _places(self, epoch: int, begins_B: IntArray) -> IntArray:
        """Places of the tokens `[begin, begin + S]` of an epoch's row, counted in the documents in their own order.

        A sample is cut into the parts of documents that it holds (N in all); the place of a part's first token and its
        size give the places of all its tokens.
        """
        index = self._index(epoch)
        ends_B = begins_B + self.sequence_length + 1
        first_B = np.searchsorted(index.begins, begins_B, side="right") - 1
        last_B = np.searchsorted(index.begins, ends_B, side="left") - 1
        parts_B = last_B - first_B + 1
        sample_N = np.repeat(np.arange(len(begins_B)), parts_B)
        slot_N = concatenated_ranges(first_B, parts_B)
        low_N = np.maximum(index.begins[slot_N], begins_B[sample_N])
        high_N = np.minimum(index.begins[slot_N + 1], ends_B[sample_N])
        place_N = self.documents.starts(index.order[slot_N]) + low_N - index.begins[slot_N]
        return concatenated_ranges(place_N, high_N - low_N)

    def _index(self, epoch: int) -> _EpochIndex:
        """The index of an epoch. Those of two epochs are kept, as a batch may lie in both; memory never holds three."""
        with self._making:
            if epoch not in self._epochs:
                while len(self._epochs) >= _EPOCHS_KEPT:
                    del self._epochs[min(self._epochs)]
                self._epochs[epoch] = self._make_index(epoch)
            return self._epochs[epoch]

    def _make_index(self, epoch: int) -> _EpochIndex:
        count = self.documents.count
        order = np.empty(count, dtype=np.int32) if count < 1 << 31 else np.empty(count, dtype=np.int64)
        for start in range(0, count, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, count)
            order[start:stop] = self._order.indices(epoch * count + start, stop - start)
        begins = np.zeros(count + 1, dtype=np.int64)
        np.take(self.documents.lengths(), order, out=begins[1:])
        np.cumsum(begins, out=begins)
        return _EpochIndex(order, begins)
