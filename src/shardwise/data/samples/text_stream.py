"""Text that is tokenized while it is trained on, in an order that files, a seed and a buffer decide.

An epoch has the files, called shards, in an order drawn from (seed, epoch). Its documents are read one after another,
a limited number at a time, which is a block. The documents of a block are put into an order drawn from (seed, epoch,
block), tokenized, joined and cut into samples, which are shuffled in the same way. A block is a function of where it
begins, so reading can resume at any block.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain
from threading import Event, Lock
from typing import Any

import numpy as np

from shardwise.base.errors import DataError
from shardwise.data.reading.text_sources import BLOCK_CHARACTERS, TextPiece, TextShard, cut_document
from shardwise.data.rows import Int32Array, IntArray
from shardwise.data.samples.batch import Batch, Batches, join_batches
from shardwise.data.samples.order import SampleOrder, mix_integer
from shardwise.data.tokens.encoding import DocumentMarks, document_tokens
from shardwise.data.tokens.tokenizer import Tokenizer

# Keys of the draws, the ASCII codes of "shards", "docs", "samples" and "held": they keep the draws independent.
_SHARDS = 0x736861726473
_DOCUMENTS = 0x646F6373
_SAMPLES = 0x73616D706C6573
_HELD_OUT = 0x68656C64
# Text that is encoded at once: enough for all cores, and it bounds the time until `stopped` is seen.
_ENCODED_CHARACTERS = 1 << 22
# A global batch may lie in several blocks, and threads that read batches ahead ask for neighbours.
_BLOCKS_KEPT = 3


@dataclass(frozen=True)
class StreamPosition:
    """The place at which a block of a stream begins: the samples before it, a shard in its order, a place in that."""

    samples: int = 0
    epoch: int = 0
    block: int = 0
    shard: int = 0
    offset: int = 0


@dataclass(frozen=True)
class _StreamBlock:
    """A block of documents that were shuffled, joined and cut into samples."""

    start: StreamPosition
    stop: StreamPosition
    samples: Batches | None


@dataclass(frozen=True)
class HeldOut:
    """Documents of a text stream that are not trained on: a share of those before a place, in the order of shards."""

    shard: int  # number of the shard with the first document after those that may be held out
    offset: int  # place at which that document begins in its shard
    share: float  # fraction of the documents before that is held out, drawn by the places at which they begin

    def __contains__(self, begin: tuple[int, int]) -> bool:
        """True if the document that begins at (shard, offset) is held out."""
        # A hash is one of 2^64 equally likely values, so it is below a share of them with that probability.
        return begin < (self.shard, self.offset) and mix_integer(_HELD_OUT, *begin) < self.share * 2.0**64


@dataclass(eq=False)
class TextStream:
    """A text stream: blocks of samples, read one after another or from anywhere. One thread reads at a time.

    Attributes:
        cut: function that makes the samples of a row of tokens, in an order drawn from a seed; None if it has none.
        buffer: most documents that a block has.
        stopped: event that ends the reading of a block, with `CancelledError`, while it is set.
    """

    shards: Sequence[TextShard]
    tokenizer: Tokenizer
    marks: DocumentMarks
    cut: Callable[[Int32Array, int], Batches | None]
    seed: int
    buffer: int
    held_out: HeldOut

    def __post_init__(self) -> None:
        self._order = SampleOrder(len(self.shards), mix_integer(_SHARDS, self.seed))
        self._reading: Iterator[tuple[StreamPosition, list[TextPiece]]] = iter(())
        self._next: StreamPosition | None = None
        self.stopped = Event()

    def block(self, start: StreamPosition) -> _StreamBlock:
        """The block that begins at `start`, in its epoch; DataError or RunError if a document cannot be read."""
        self.stopped.clear()
        if self._next != start:
            self._reading = self._read(start)
        self._next = None  # `_reading` is of no use if an error ends this block
        documents, stop = self._documents(start)
        key = (self.seed, start.epoch, start.block)
        tokens = np.empty(0, dtype=np.int32)
        if documents:
            order = SampleOrder(len(documents), mix_integer(_DOCUMENTS, *key)).indices(0, len(documents))
            tokens = self._tokens([documents[number] for number in order])
        samples = None
        if len(tokens) > 1:  # one to read and one to predict
            samples = self.cut(tokens, mix_integer(_SAMPLES, *key))
        if samples is not None:
            stop = replace(stop, samples=start.samples + samples.num_samples)
        if stop.epoch == start.epoch:
            self._next = stop
        return _StreamBlock(start, stop, samples)

    def _documents(self, start: StreamPosition) -> tuple[list[list[TextPiece]], StreamPosition]:
        documents: list[list[TextPiece]] = []
        characters = 0
        for stop, pieces in self._reading:
            documents.append(pieces)
            characters += sum(piece.characters for piece in pieces)
            self._stop_if_asked()
            if len(documents) >= self.buffer or characters >= BLOCK_CHARACTERS:
                return documents, replace(stop, samples=start.samples, block=start.block + 1)
        return documents, StreamPosition(start.samples, start.epoch + 1)

    def _read(self, start: StreamPosition) -> Iterator[tuple[StreamPosition, list[TextPiece]]]:
        """The documents of an epoch from a place on, each with the place of the next one."""
        order = self._order.indices(start.epoch * len(self.shards), len(self.shards)).tolist()
        offset = start.offset
        for number in range(start.shard, len(order)):
            for stop, pieces in stream_documents(self.shards[order[number]], offset):
                begin = offset
                offset = stop
                if (order[number], begin) not in self.held_out:
                    yield replace(start, shard=number, offset=stop), pieces
            offset = 0

    def _tokens(self, documents: list[list[TextPiece]]) -> Int32Array:
        rows = []
        pieces = (("", piece) for piece in chain.from_iterable(documents))
        for _, row, _ in document_tokens(pieces, self.tokenizer, self.marks, _ENCODED_CHARACTERS):
            self._stop_if_asked()
            rows.append(row)
        return np.concatenate(rows)

    def _stop_if_asked(self) -> None:
        if self.stopped.is_set():
            raise CancelledError


def stream_documents(shard: TextShard, start: int) -> Iterator[tuple[int, list[TextPiece]]]:
    """The documents with text of a stream's shard from the one at `start` on, with the place of the next one."""
    for stop, blocks in shard.documents(start):
        if pieces := list(cut_document(blocks)):
            yield stop, pieces


class StreamBatches(Batches):
    """`Batches` of a stream, which begins its next epoch at the end of one.

    A batch is a function of the samples consumed. The beginnings of all blocks that were read are kept, and the last
    few blocks themselves: a batch near the last one is made at once. For any other, reading begins at its block, or at
    the nearest earlier block that was read. A thread reads the next block ahead.
    """

    objectives = ("lm",)

    def __init__(self, stream: TextStream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._starts = [StreamPosition()]
        self._kept: list[_StreamBlock] = []
        self._next_block: tuple[StreamPosition, Future[_StreamBlock]] | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="stream")
        self._lock = Lock()

    @property
    def num_samples(self) -> int:
        """Unlimited: the number of an epoch is known only after it was read."""
        return sys.maxsize

    def epochs(self, samples: int) -> str:
        return "of a stream, whose length is not known"

    def blank(self, micro_batch: int) -> Batch:
        # Whichever of the two ids may end a document, one document has two tokens and so a sample.
        samples = self._stream.cut(np.array([0, 1, 0], dtype=np.int32), 0)
        assert samples is not None
        return samples.blank(micro_batch)

    def state(self, consumed: int) -> dict[str, Any]:
        with self._lock:
            return asdict(self._nearest(consumed))

    def restore(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._starts = [StreamPosition(**state)]
            self._kept = []

    def close(self) -> None:
        self._stream.stopped.set()  # before taking the lock: its holder may be waiting for a block
        with self._lock:
            if self._next_block is not None:
                self._next_block[1].cancel()
                self._next_block = None

    def draw(self, consumed: int, count: int) -> tuple[IntArray, IntArray]:
        return np.arange(consumed, consumed + count), np.zeros(count, dtype=np.int64)

    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        """One batch of consecutive samples, which one block has or several."""
        parts: list[Batch] = []
        places: list[IntArray] = []
        remaining = indices
        while len(remaining):
            with self._lock:
                block = self._block(int(remaining[0]))
            assert block.samples is not None
            in_block, remaining = np.split(remaining, [block.stop.samples - remaining[0]])
            in_batch = in_block - indices[0]
            of_block, _ = block.samples.draw(int(in_block[0]) - block.start.samples, len(in_block))
            parts.append(block.samples.collate(of_block, np.zeros_like(in_block), samples[in_batch]))
            places.append(in_batch)
        return join_batches(parts, places, samples)

    def _block(self, sample: int) -> _StreamBlock:
        for block in self._kept:
            if block.start.samples <= sample < block.stop.samples:
                return block
        start = self._nearest(sample)
        last_with_samples = start
        while True:
            block = self._read(start)
            if block.samples is not None:
                self._kept = [*self._kept[1 - _BLOCKS_KEPT :], block]
                last_with_samples = block.start
            if sample < block.stop.samples:
                return block
            # An epoch lies between the two without a sample: so would all that follow, and the loop would not end.
            if block.stop.epoch > last_with_samples.epoch + 1:
                raise DataError(f"{self._name} must have a document to train on, and a whole epoch has none")
            start = block.stop
            if start.samples > self._starts[-1].samples:
                self._starts.append(start)

    def _nearest(self, sample: int) -> StreamPosition:
        assert sample >= self._starts[0].samples, "what is before a restored place is out of reach"
        return self._starts[bisect_right(self._starts, sample, key=lambda place: place.samples) - 1]

    def _read(self, start: StreamPosition) -> _StreamBlock:
        if self._next_block is not None and self._next_block[0] == start:
            future = self._next_block[1]
        else:
            future = self._submit(start)
        block = future.result()
        self._next_block = (block.stop, self._submit(block.stop))
        return block

    def _submit(self, start: StreamPosition) -> Future[_StreamBlock]:
        return self._reader.submit(self._stream.block, start)
