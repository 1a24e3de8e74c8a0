"""The chunks of documents that samples of sentence pairs are made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.data.rows import IntArray, Sentences


@dataclass(frozen=True)
class Chunks:
    """Consecutive tokens `[start, end)` of one document each, [B].

    Attributes:
        first_sentence: number of the first sentence that starts in the chunk or later.
        sentences: number of sentences that start in the chunk; 0 in the middle of a long sentence.
    """

    start: IntArray
    end: IntArray
    first_sentence: IntArray
    sentences: IntArray
    document: IntArray


class ChunkIndex:
    """Documents cut into chunks of about `length` tokens, at sentences.

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

    def find(self, chunks: IntArray) -> Chunks:
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
        return Chunks(start, end, first, stop - first, document)

    def siblings(self, document: IntArray) -> tuple[IntArray, IntArray]:
        """The first chunk of each document, and that of the next document."""
        return self._first_chunks[document], self._first_chunks[document + 1]

    def sentence_end(self, tokens: IntArray, document: IntArray) -> IntArray:
        """The end of the first sentence of each document that ends at or after a token, else the document's end."""
        reachable = np.minimum(tokens, self._document_bounds[document + 1])
        return self.bounds[np.searchsorted(self.bounds, reachable)]
