"""Samples of a causal language model from the documents of a Megatron data set.

Shapes: B = samples, S = sequence length.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.data.reading.megatron import IndexedFile
from shardwise.data.samples.batch import Batch, Batches
from shardwise.data.samples.causal import DocumentEnds, causal_batch
from shardwise.data.samples.hashing import mix_integer
from shardwise.data.samples.sampler import IntArray, SampleOrder
from shardwise.data.samples.sentences import Sentences
from shardwise.errors import ConfigError, DataError, see

# Keeps the order of documents independent of that of samples, which is drawn from the seed itself.
_DOCUMENT_ORDER = 0x646F63756D656E74
# This many documents are permuted or measured at once: their arrays fit in a core's cache.
_BLOCK = 1 << 16
_EPOCHS_KEPT = 2


class Documents:
    """Consecutive documents, number `first` to before `after`, of a data set that a model of `vocab_size` reads.

    The tokens of consecutive documents are consecutive too: they are tokens `start` to before `end` of the data set.
    """

    def __init__(self, file: IndexedFile, first: int, after: int, vocab_size: int) -> None:
        self.file, self.first, self.after = file, first, after
        self.start, self.end = map(int, file.starts(np.array([first, after])))
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        """The number of tokens."""
        return self.end - self.start

    @property
    def count(self) -> int:
        """The number of documents."""
        return self.after - self.first

    def take(self, places: IntArray) -> IntArray:
        """The tokens at these places, counted from `start`, in the shape of `places`.

        Raises:
            DataError: one is beyond the vocabulary; the first is named with its file, document and place.
        """
        tokens: IntArray = self.file.tokens[places + self.start].astype(np.int64)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            wrong = int(np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))[0])
            place = int(places.flat[wrong]) + self.start
            numbers = range(self.first, self.after)
            document = numbers[bisect_right(numbers, place, key=lambda n: int(self.file.starts(np.array([n]))[0])) - 1]
            raise DataError(
                f"{self.file.bin_path}: token {place} ({tokens.flat[wrong]}), in document {document}, must be in 0 … "
                f"{self._vocab_size - 1}: set model.vocab_size to that of the tokenizer that made the data"
                f"{see('data#token-beyond-vocabulary')}"
            )
        return tokens

    def beginning(self, tokens: int) -> list[int]:
        """The first tokens; fewer where there are no more."""
        return [int(token) for token in self.take(np.arange(min(tokens, len(self))))]

    def starts(self, documents: npt.NDArray[np.integer[Any]]) -> IntArray:
        """The first token of each of these documents, 0 … count, counted from `start`."""
        return np.asarray(self.file.starts(np.add(documents, self.first, dtype=np.int64)) - self.start)

    def lengths(self) -> IntArray:
        """Tokens of each document, [count]."""
        lengths = np.empty(self.count, dtype=np.int64)
        for start in range(0, self.count, _BLOCK):
            after = min(start + _BLOCK, self.count)
            lengths[start:after] = np.diff(self.starts(np.arange(start, after + 1)))
        return lengths

    @cached_property
    def sentences(self) -> Sentences:
        """Where sentences (one a sequence) and documents lie; those without tokens are left out."""
        bounds = self.file.documents[self.first : self.after + 1]
        sequences = self.file.sequence_starts(np.arange(bounds[0], bounds[-1] + 1)) - self.start
        begins = np.append(np.diff(sequences) > 0, True)
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(begins)])
        return Sentences(sequences[begins], np.unique(before[bounds - bounds[0]]))


@dataclass(frozen=True)
class _Epoch:
    """The documents of one epoch in their order, and where each begins in the row that they make.

    Attributes:
        order: the document numbers, [count].
        begins: the first token of each document in the row, then the number of tokens, [count + 1].
    """

    order: npt.NDArray[np.int32] | IntArray
    begins: IntArray


class DocumentBatches(Batches):
    """Batches over documents that are joined in another order in each epoch, as in Megatron's GPT data set.

    Sample `i` of epoch `e` is tokens `[i·S, i·S + S]` of the row that the documents make in the order of epoch `e`: it
    may begin and end within documents, and its last token is the first one of sample `i + 1`. The order of the
    documents and that of the samples are permutations keyed by (seed, `e`) (`SampleOrder`), so a batch is a function of
    (seed, samples consumed). The tokens after the last whole sample are left out in that epoch.

    The first batch of an epoch makes its index: 12 bytes a document, or 16 where there are 2³¹ documents or more. Then
    any sample is found in the same time.

    Inputs: see `causal_batch`. A sample that counts nothing has ids 0 and targets `IGNORE`.

    Args:
        ends: what the end of a document changes.
    """

    objectives = ("lm",)

    def __init__(
        self, documents: Documents, sequence_length: int, seed: int, *, ends: DocumentEnds | None = None
    ) -> None:
        if len(documents) <= sequence_length:
            raise ConfigError(
                f"the tokens ({len(documents)}) must be at least {sequence_length + 1}{see('data#too-few-tokens')}"
            )
        super().__init__((len(documents) - 1) // sequence_length, seed)
        self.documents = documents
        self.sequence_length, self.ends = sequence_length, ends
        self._order = SampleOrder(documents.count, mix_integer(_DOCUMENT_ORDER, seed))
        self._epochs: dict[int, _Epoch] = {}
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
        """Where the tokens `[begin, begin + S]` of an epoch's row lie among the documents' own, one after another.

        A sample is cut into the parts of documents that it holds (N in all); the place of a part's first token and its
        size say where all of it lies.
        """
        index, ends_B = self._index(epoch), begins_B + self.sequence_length + 1
        first_B = np.searchsorted(index.begins, begins_B, side="right") - 1
        last_B = np.searchsorted(index.begins, ends_B, side="left") - 1
        parts_B = last_B - first_B + 1
        sample_N = np.repeat(np.arange(len(begins_B)), parts_B)
        slot_N = _runs(first_B, parts_B)
        low_N = np.maximum(index.begins[slot_N], begins_B[sample_N])
        high_N = np.minimum(index.begins[slot_N + 1], ends_B[sample_N])
        place_N = self.documents.starts(index.order[slot_N]) + low_N - index.begins[slot_N]
        return _runs(place_N, high_N - low_N)

    def _index(self, epoch: int) -> _Epoch:
        """The index of an epoch. Those of two epochs are kept, as a batch may lie in both; memory never holds three."""
        with self._making:
            if epoch not in self._epochs:
                while len(self._epochs) >= _EPOCHS_KEPT:
                    del self._epochs[min(self._epochs)]
                self._epochs[epoch] = self._make_index(epoch)
            return self._epochs[epoch]

    def _make_index(self, epoch: int) -> _Epoch:
        count = self.documents.count
        order = np.empty(count, dtype=np.int32) if count < 1 << 31 else np.empty(count, dtype=np.int64)
        for start in range(0, count, _BLOCK):
            after = min(start + _BLOCK, count)
            order[start:after] = self._order.indices(epoch * count + start, after - start)
        begins = np.zeros(count + 1, dtype=np.int64)
        np.take(self.documents.lengths(), order, out=begins[1:])
        np.cumsum(begins, out=begins)
        return _Epoch(order, begins)


def _runs(starts: IntArray, sizes: IntArray) -> IntArray:
    """`start, start + 1, …` of each run, as many as its size, one run after another."""
    ends = np.cumsum(sizes)
    return np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)
