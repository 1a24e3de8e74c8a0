"""Samples of BERT: pairs of sentences with masked tokens (Devlin et al. 2018, arXiv:1810.04805, section 3.1).

`SentencePairBatches` makes pairs of a row of tokens and masks them (`Masking`). `ShardBatches` reads pairs from HDF5
shards, which were masked when the shards were made.

Shapes: B = samples, S = sequence length, P = predictions of a sample, at most; W = words of a sample.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from shardwise.base.errors import ConfigError, DataError
from shardwise.data.reading.hdf5_files import HDF5ShardRows, listed_positions
from shardwise.data.rows import AnyArray, Flags, IntArray, PairTokens, Sentences
from shardwise.data.samples.batch import IGNORE, Batch, Batches, TokenSource
from shardwise.data.samples.order import Draws, hashes_below

# [CLS] A [SEP] B [SEP]
_ADDED = 3


@dataclass(frozen=True)
class _Chunks:
    """Consecutive tokens `[start, end)` of one document each, [B]."""

    start: IntArray
    end: IntArray
    first_sentence: IntArray  # number of the first sentence that starts in the chunk or later
    sentences: IntArray  # number of sentences that start in the chunk; 0 in the middle of a long sentence
    document: IntArray


class ChunkIndex:
    """Documents cut at sentences into chunks of about `length` tokens, of which sentence pairs are made.

    A sentence belongs to chunk (document, ⌊its start in the document / length⌋). A chunk is thus shorter than
    2 · `length` tokens, and `length` on average. Where a sentence covers a chunk's whole place, the place itself is
    the chunk; a document's last chunk holds the rest of it. So the chunks of a document are its tokens, each once, and
    their number follows from the document's length and last sentence alone. Opening a corpus reads no more than that,
    and a chunk is found by a binary search over the sentences: little of a large file is touched.
    """

    def __init__(self, sentences: Sentences, length: int) -> None:
        self.length = length
        self.bounds = np.asarray(sentences.bounds)
        self._document_bounds = self.bounds[sentences.documents]
        # In units of `length`, a document's chunks are the places that its sentences start in, or that one covers. The
        # last of them is that of the last sentence's start, or the last full place, which this sentence covers.
        last_starts = self.bounds[sentences.documents[1:] - 1] - self._document_bounds[:-1]
        chunks = np.maximum(last_starts // length + 1, np.diff(self._document_bounds) // length)
        self._first_chunks: IntArray = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(chunks)])

    @property
    def num_chunks(self) -> int:
        return int(self._first_chunks[-1])

    @property
    def num_documents(self) -> int:
        return len(self._first_chunks) - 1

    def find(self, chunks: IntArray) -> _Chunks:
        """The chunks of these numbers."""
        document: IntArray = np.searchsorted(self._first_chunks, chunks, side="right") - 1
        first_chunk, stop_chunk = self.siblings(document)
        low = self._document_bounds[document] + (chunks - first_chunk) * self.length
        high = np.where(chunks + 1 == stop_chunk, self._document_bounds[document + 1], low + self.length)
        first = np.searchsorted(self.bounds, low)
        stop = np.searchsorted(self.bounds, high)
        start = np.where(first < stop, self.bounds[first], low)
        end = self.bounds[stop]
        # A sentence that covers all of the next place as well is continued there.
        end = np.where(end < high + self.length, end, high)
        return _Chunks(start, end, first, stop - first, document)

    def siblings(self, document: IntArray) -> tuple[IntArray, IntArray]:
        """The first chunk of each document, and that of the next document."""
        return self._first_chunks[document], self._first_chunks[document + 1]

    def sentence_end(self, tokens: IntArray, document: IntArray) -> IntArray:
        """The end of the first sentence of each document that ends at or after a token, else the document's end."""
        reachable = np.minimum(tokens, self._document_bounds[document + 1])
        return self.bounds[np.searchsorted(self.bounds, reachable)]


# The `site` of each draw (`Draws`); those of `Masking` begin at 16.
_RANDOM, _SPLIT, _OTHER, _SENTENCE, _FRONT_A, _FRONT_B = range(6)


def pair_tokens_room(sequence_length: int) -> int:
    """The tokens of both sentences of a pair that a sample has room for; ConfigError: it is too short or too long."""
    if not _ADDED + 2 <= sequence_length <= MAX_SEQUENCE_LENGTH:
        raise ConfigError(
            f"train.sequence_length ({sequence_length}) must be in {_ADDED + 2} … {MAX_SEQUENCE_LENGTH:,}, the length "
            "of [CLS] A [SEP] B [SEP]"
        )
    return sequence_length - _ADDED


def pair_batch(samples: IntArray, **rows: AnyArray) -> Batch:
    """The batch of BERT's inputs by name, of rows by sample; DataError: a masked position is beyond the sequence."""
    inputs = {name: np.array(array.T, dtype=np.int64, order="C") for name, array in rows.items()}
    length = len(inputs["ids_SB"])
    positions_PB = inputs["positions_PB"]
    outside_PB = (positions_PB < 0) | (positions_PB >= length)
    bad = np.flatnonzero(outside_PB.any(axis=0)).tolist()
    if bad:
        raise DataError(
            [
                f"sample {samples[b]}: a masked position ({positions_PB[outside_PB[:, b], b][0]}) must be in "
                f"0 … {length - 1}: train.sequence_length ({length}) must be that of the data, or longer"
                for b in bad
            ]
        )
    counts = [np.count_nonzero(inputs[name] != IGNORE) for name in ("targets_PB", "next_sentence_B")]
    return Batch(inputs, np.array(counts), samples)


@dataclass(frozen=True)
class _Segments:
    """Two runs of tokens of each sample, [B] each; `random` is 1 if the second was drawn, 0 if it follows."""

    a_start: IntArray
    a_size: IntArray
    b_start: IntArray
    b_size: IntArray
    random: IntArray


class SentencePairBatches(Batches):
    """Batches of sentence pairs; sample `i` is chunk `i` of `ChunkIndex`, with S - 3 tokens of room.

    A sample is a function of (seed, epoch, `i`) alone. In each epoch:

    - The chunk is split before one of its sentences but the first, all equally likely (a chunk of one sentence before
      one of its tokens). A is the part before.
    - With probability ½, B is the part after: `next_sentence_B` 0. Else it is 1 and B begins with a random sentence
      of a random chunk of another document, followed by the sentences after it until the sequence is full. The rest of
      the chunk is then left out in this epoch; the paper's code would begin the next sample with it, which would make
      each sample depend on all before it. A corpus of one document takes another chunk of that document.
    - While A and B have more than S - 3 tokens, the longer one (B if they are equal) loses its first or its last
      token with probability ½ each: as in the paper's code.
    - Tokens of A and B are masked (`Masking`).

    Inputs: `ids_SB`, `token_types_SB` (1 in B and its [SEP]), `mask_SB` (0 on padding), `positions_PB`, `targets_PB`,
    `next_sentence_B`. A sample that counts nothing is `[CLS] [SEP] [SEP]`, so that attention has something to attend
    to, with targets and `next_sentence_B` of `IGNORE`.
    """

    objectives = ("mlm", "nsp")

    def __init__(
        self,
        tokens: TokenSource,
        sentences: Sentences,
        sequence_length: int,
        seed: int,
        *,
        special: PairTokens,
        vocab_size: int,
        masked_fraction: float,
        max_predictions: int,
    ) -> None:
        self.room = pair_tokens_room(sequence_length)
        if not 1 <= max_predictions <= sequence_length:
            raise ConfigError(
                f"data.max_predictions ({max_predictions}) must be in 1 … train.sequence_length ({sequence_length})"
            )
        self.chunks = ChunkIndex(sentences, self.room)
        if self.chunks.num_chunks < 2:
            raise ConfigError(
                f"the chunks of {self.room} tokens ({self.chunks.num_chunks}) must be at least 2: the second sentence "
                "of a pair may come from another one"
            )
        super().__init__(self.chunks.num_chunks, seed)
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.special = special
        ordinary_ids = np.setdiff1d(np.arange(vocab_size), list(asdict(special).values()))
        self.masking = Masking(masked_fraction, max_predictions, special.mask, ordinary_ids)
        self._seed = seed

    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        real_B = indices >= 0
        draws = Draws(self._seed, epochs, indices)
        pair = self._truncated(self._segments(np.maximum(indices, 0), draws), draws)
        a_B = pair.a_size * real_B
        b_B = pair.b_size * real_B
        # [CLS] at 0, A from 1, [SEP] at a + 1, B from a + 2, [SEP] at a + b + 2.
        place_S = np.arange(self.sequence_length)
        middle_B1 = (a_B + 1)[:, None]
        end_B1 = (a_B + b_B + 2)[:, None]
        in_a_BS = (place_S > 0) & (place_S < middle_B1)
        in_b_BS = (place_S > middle_B1) & (place_S < end_B1)
        ids_BS = np.full(in_a_BS.shape, self.special.pad)
        ids_BS[:, 0] = self.special.cls
        ids_BS[(place_S == middle_B1) | (place_S == end_B1)] = self.special.sep
        # The token at place p: number p - 1 of A, or number p - (a + 2) of B.
        source_BS = np.where(in_a_BS, (pair.a_start - 1)[:, None], pair.b_start[:, None] - middle_B1 - 1) + place_S
        candidates_BS = in_a_BS | in_b_BS
        ids_BS[candidates_BS] = self.tokens.take(source_BS[candidates_BS])
        ids_BS, positions_BP, targets_BP = self.masking.apply(ids_BS, candidates_BS, draws)
        return pair_batch(
            samples,
            ids_SB=ids_BS,
            token_types_SB=(place_S > middle_B1) & (place_S <= end_B1),
            mask_SB=place_S <= end_B1,
            positions_PB=positions_BP,
            targets_PB=targets_BP,
            next_sentence_B=np.where(real_B, pair.random, IGNORE),
        )

    def _segments(self, indices: IntArray, draws: Draws) -> _Segments:
        bounds = self.chunks.bounds
        chunk = self.chunks.find(indices)
        size = chunk.end - chunk.start
        at_sentence = chunk.first_sentence + 1 + draws.below(_SPLIT, np.maximum(chunk.sentences - 1, 1))
        at_token = chunk.start + 1 + draws.below(_SPLIT, np.maximum(size - 1, 1))
        split = np.where(chunk.sentences > 1, bounds[np.minimum(at_sentence, len(bounds) - 1)], at_token)
        # A chunk of one token is A alone, so B is a random one.
        random = np.where(size > 1, draws.below(_RANDOM, 2), 1)
        b_start, b_size = self._random_segment(indices, chunk.document, self.room - (split - chunk.start), draws)
        return _Segments(
            a_start=chunk.start,
            a_size=split - chunk.start,
            b_start=np.where(random, b_start, split),
            b_size=np.where(random, b_size, chunk.end - split),
            random=random,
        )

    def _random_segment(
        self, indices: IntArray, document: IntArray, room: IntArray, draws: Draws
    ) -> tuple[IntArray, IntArray]:
        """Start and size of sentences of another document that have `room` tokens, or up to its end."""
        is_only_document = self.chunks.num_documents == 1
        if is_only_document:
            first = indices
            stop = indices + 1
        else:
            first, stop = self.chunks.siblings(document)
        # A number among all chunks but those of the document: the ones after it move down by their number.
        number = draws.below(_OTHER, self.chunks.num_chunks - (stop - first))
        chunk = self.chunks.find(np.where(number < first, number, number + stop - first))
        sentence = chunk.first_sentence + draws.below(_SENTENCE, np.maximum(chunk.sentences, 1))
        start = np.where(chunk.sentences > 0, self.chunks.bounds[sentence], chunk.start)
        end = self.chunks.sentence_end(start + np.maximum(room, 1), chunk.document)
        if is_only_document:  # the next chunk may be the sample's own
            end = np.minimum(end, chunk.end)
        # A sentence may have any length.
        return start, np.minimum(end - start, 2 * self.room)

    def _truncated(self, pair: _Segments, draws: Draws) -> _Segments:
        """A and B cut to the room.

        Taking single tokens off the longer one, B if they are equal, ends with A at its size, at what B leaves free, or
        at half of the room rounded up, and B at what A leaves.
        """
        a_size = np.minimum(pair.a_size, np.maximum(self.room - pair.b_size, (self.room + 1) // 2))
        b_size = np.minimum(pair.b_size, self.room - a_size)
        a_start = pair.a_start + _heads(draws, _FRONT_A, pair.a_size - a_size)
        b_start = pair.b_start + _heads(draws, _FRONT_B, pair.b_size - b_size)
        return _Segments(a_start, a_size, b_start, b_size, pair.random)


def _heads(draws: Draws, site: int, tosses_B: IntArray) -> IntArray:
    """Heads in as many tosses of a coin, [B]: the first bits of the sample's hashes."""
    words = -(-int(tosses_B.max(initial=0)) // 64)
    bits = np.unpackbits(draws.table(site, words).astype("<u8").view(np.uint8), axis=1)
    heads: IntArray = (bits * (np.arange(64 * words) < tosses_B[:, None])).sum(axis=1, dtype=np.int64)
    return heads


# The `site` of each draw (`Draws`); those of `SentencePairBatches` are below 16.
_PLACE = 16
_KIND = 17
_TOKEN = 18
# Last bits of a hash that hold its position; the 48 bits before them decide the order.
_POSITION_BITS = 16
MAX_SEQUENCE_LENGTH = 1 << _POSITION_BITS


@dataclass(frozen=True)
class Masking:
    """The masked tokens of a BERT sample, which are predicted, and the ids that the model sees in their place.

    Of `n` candidates `max(1, ⌊fraction · n + ½⌋)` are predicted, at most `predictions` (P): those with the smallest
    hashes. Four in five become `mask_id`, one in ten a random one of `ordinary_ids`, one in ten stays.
    """

    fraction: float
    predictions: int
    mask_id: int
    ordinary_ids: IntArray

    def apply(self, ids_BS: IntArray, candidates_BS: Flags, draws: Draws) -> tuple[IntArray, IntArray, IntArray]:
        """`(ids_BS, positions_BP, targets_BP)`: positions ascend; unused places have position 0 and target `IGNORE`."""
        length = ids_BS.shape[1]
        # The last bits of each hash are its position: no two are equal, and the smallest name their own positions.
        low = np.uint64(MAX_SEQUENCE_LENGTH - 1)
        hashes_BS = (draws.table(_PLACE, length) & ~low) | np.arange(length, dtype=np.uint64)
        hashes_BS[~candidates_BS] = ~np.uint64(0)
        candidates_B = candidates_BS.sum(axis=1)
        predicted_B = np.maximum(np.floor(self.fraction * candidates_B + 0.5).astype(np.int64), 1)
        predicted_B = np.minimum(predicted_B, np.minimum(candidates_B, self.predictions))
        smallest_BP = np.sort(np.partition(hashes_BS, self.predictions - 1, axis=1)[:, : self.predictions], axis=1)
        chosen_BP = np.arange(self.predictions) < predicted_B[:, None]
        # Unused places are sorted behind all positions before they become 0.
        positions_BP = np.where(chosen_BP, (smallest_BP & low).astype(np.int64), length)
        positions_BP.sort(axis=1)
        positions_BP[~chosen_BP] = 0
        originals_BP = np.take_along_axis(ids_BS, positions_BP, axis=1)
        # Of ten kinds, 0 to 7 show [MASK], 8 shows a random token and 9 the token itself.
        kinds_BP = hashes_below(draws.table(_KIND, self.predictions), 10)
        random_BP = self.ordinary_ids[hashes_below(draws.table(_TOKEN, self.predictions), len(self.ordinary_ids))]
        shown_BP = np.where(kinds_BP < 8, self.mask_id, np.where(kinds_BP < 9, random_BP, originals_BP))
        masked_BS = ids_BS.copy()
        rows = np.nonzero(chosen_BP)[0]
        masked_BS[rows, positions_BP[chosen_BP]] = shown_BP[chosen_BP]
        return masked_BS, positions_BP, np.where(chosen_BP, originals_BP, IGNORE)


class ShardBatches(Batches):
    """Batches of the rows `first` to `stop` - 1 of all shards; sample `i` is row `first + i`.

    Each epoch has every row once, in another order (`SampleOrder`); the masks are the same in each.

    Inputs: those of `SentencePairBatches`, with targets at the masked positions alone. A sample that counts nothing is
    the first row, with targets and `next_sentence_B` of `IGNORE`.
    """

    objectives = ("mlm", "nsp")

    def __init__(self, shards: HDF5ShardRows, first: int, stop: int, seed: int) -> None:
        super().__init__(stop - first, seed)
        self.shards = shards
        self.first = first

    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        real_B = indices >= 0
        rows = self.shards.take(np.maximum(indices, 0) + self.first)
        positions_BP = rows["masked_lm_positions"]
        listed_BP = listed_positions(positions_BP)
        return pair_batch(
            samples,
            ids_SB=rows["input_ids"],
            token_types_SB=rows["segment_ids"],
            mask_SB=rows["input_mask"],
            positions_PB=np.where(listed_BP, positions_BP, 0),
            targets_PB=np.where(listed_BP & real_B[:, None], rows["masked_lm_ids"], IGNORE),
            next_sentence_B=np.where(real_B, rows["next_sentence_labels"], IGNORE),
        )
