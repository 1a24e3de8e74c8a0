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
import numpy.typing as npt

from shardwise.base.errors import DataError
from shardwise.data.reading.text_sources import BLOCK_CHARACTERS, Shard, TextPiece, cut_document
from shardwise.data.samples.batch import Batch, Batches, joined
from shardwise.data.samples.order import IntArray, SampleOrder, mix_integer
from shardwise.data.tokens.encoding import DocumentMarks, batches
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.data.tokens.windows import encode_windows, text_windows

# Keys of what is drawn, the ASCII codes of "shards", "docs", "samples" and "held": they keep the draws independent.
_SHARDS, _DOCUMENTS, _SAMPLES, _HELD = 0x736861726473, 0x646F6373, 0x73616D706C6573, 0x68656C64
_ENCODED_CHARACTERS = 1 << 22
_BLOCKS_KEPT = 3

_Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class StreamPosition:
    """Where a block begins.

    Attributes:
        samples: how many samples all blocks before have.
        epoch: its number, from 0.
        block: its number in the epoch.
        shard: the number of the shard in the epoch's order.
        offset: where the block's first document begins in that shard, as `Shard.documents` counts.
    """

    samples: int = 0
    epoch: int = 0
    block: int = 0
    shard: int = 0
    offset: int = 0


@dataclass(frozen=True)
class StreamBlock:
    """A block: where it begins, where the next one begins, and its samples, None where it has none."""

    start: StreamPosition
    after: StreamPosition
    samples: Batches | None


@dataclass(frozen=True)
class HeldOut:
    """Which documents are not trained on: a share of those before a place, in the order in which shards are given.

    Attributes:
        shard: of the first document after those that may be held out.
        offset: where that document begins in its shard.
        share: which share of the documents before is held out, drawn by where they begin.
    """

    shard: int
    offset: int
    share: float

    def __contains__(self, begin: tuple[int, int]) -> bool:
        """Whether it has the document that begins at (shard, offset)."""
        return begin < (self.shard, self.offset) and mix_integer(_HELD, *begin) < self.share * 2.0**64


class Stream:
    """Blocks of samples, read one after another or from anywhere. One thread reads at a time.

    Args:
        marks: what each document begins and ends with.
        cut: makes the samples of a row of tokens, in an order drawn from a seed.
        buffer: how many documents a block has, at most.

    Attributes:
        stopped: ends the reading of a block, with `CancelledError`, while it is set.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        tokenizer: Tokenizer,
        marks: DocumentMarks,
        cut: Callable[[_Tokens, int], Batches],
        *,
        seed: int,
        buffer: int,
        held: HeldOut,
    ) -> None:
        self._shards, self._tokenizer, self._marks, self.cut = shards, tokenizer, marks, cut
        self._seed, self._buffer, self._held = seed, buffer, held
        self._order = SampleOrder(len(shards), mix_integer(_SHARDS, seed))
        self._reading: Iterator[tuple[StreamPosition, list[TextPiece]]] = iter(())
        self._next: StreamPosition | None = None
        self.stopped = Event()

    def block(self, start: StreamPosition) -> StreamBlock:
        """The block that begins at `start`; it ends where its epoch does.

        Raises:
            DataError, RunError: a document cannot be read.
        """
        self.stopped.clear()
        if self._next != start:
            self._reading = self._read(start)
        self._next = None  # `_reading` is of no use if an error ends this block
        documents, after = self._documents(start)
        key = (self._seed, start.epoch, start.block)
        tokens = np.empty(0, dtype=np.int32)
        if documents:
            order = SampleOrder(len(documents), mix_integer(_DOCUMENTS, *key)).indices(0, len(documents))
            tokens = self._tokens([documents[number] for number in order])
        samples = self.cut(tokens, mix_integer(_SAMPLES, *key)) if len(tokens) > 1 else None
        if samples is not None:
            after = replace(after, samples=start.samples + samples.num_samples)
        if after.epoch == start.epoch:
            self._next = after
        return StreamBlock(start, after, samples)

    def _documents(self, start: StreamPosition) -> tuple[list[list[TextPiece]], StreamPosition]:
        """The documents of a block, in pieces, and the place of the next block, without the samples of this one."""
        documents: list[list[TextPiece]] = []
        characters = 0
        for after, pieces in self._reading:
            documents.append(pieces)
            characters += sum(piece.characters for piece in pieces)
            self._stop_if_asked()
            if len(documents) >= self._buffer or characters >= BLOCK_CHARACTERS:
                return documents, replace(after, samples=start.samples, block=start.block + 1)
        return documents, StreamPosition(start.samples, start.epoch + 1)

    def _read(self, start: StreamPosition) -> Iterator[tuple[StreamPosition, list[TextPiece]]]:
        """The documents of an epoch from a place on, each with the place where the next one begins."""
        order = self._order.indices(start.epoch * len(self._shards), len(self._shards)).tolist()
        offset = start.offset
        for number in range(start.shard, len(order)):
            for after, pieces in read_documents(self._shards[order[number]], offset):
                begin, offset = offset, after
                if (order[number], begin) not in self._held:
                    yield replace(start, shard=number, offset=after), pieces
            offset = 0

    def _tokens(self, documents: list[list[TextPiece]]) -> _Tokens:
        """All documents joined, each with its marks."""
        rows, begun = [], False
        pieces = ((None, piece) for piece in chain.from_iterable(documents))
        windows = (window for _, window in text_windows(pieces, self._tokenizer))
        for batch in batches(windows, lambda window: window.characters, _ENCODED_CHARACTERS):
            self._stop_if_asked()
            ends = [window.ends_document for window in batch]
            rows.append(self._marks.put(*encode_windows(batch, self._tokenizer), ends, begun=begun)[0])
            begun = not ends[-1]
        return np.concatenate(rows)

    def _stop_if_asked(self) -> None:
        if self.stopped.is_set():
            raise CancelledError


def read_documents(shard: Shard, start: int) -> Iterator[tuple[int, list[TextPiece]]]:
    """Each document of a shard from the one that begins at `start` on, in pieces, and where the next one begins.

    Raises:
        DataError, RunError: it cannot be read.
    """
    for after, blocks in shard.documents(start):
        yield after, list(cut_document(blocks))


class StreamBatches(Batches):
    """`Batches` of a stream, which begins its next epoch where one ends.

    A batch is a function of the samples consumed. The beginnings of all blocks that were read are kept, and the last
    few blocks themselves: a batch near the last one is made at once. For any other, reading begins at its block, or at
    the nearest earlier block that was read. A thread reads the next block ahead.

    Args:
        name: what messages call the data.
    """

    objectives = ("lm",)

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream, self._name = stream, name
        self._starts = [StreamPosition()]
        self._kept: list[StreamBlock] = []
        self._ahead: tuple[StreamPosition, Future[StreamBlock]] | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="stream")
        self._lock = Lock()

    @property
    def num_samples(self) -> int:
        """Unlimited: the number of an epoch is known only after it was read."""
        return sys.maxsize

    def epochs(self, samples: int) -> str:
        return "of a stream, whose length is not known"

    def blank(self, micro_batch: int) -> Batch:
        return self._stream.cut(np.zeros(2, dtype=np.int32), 0).blank(micro_batch)

    def state(self, consumed: int) -> dict[str, int]:
        """What `restore` needs to continue after `consumed` samples."""
        with self._lock:
            return asdict(self._nearest(consumed))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begins to read at the block of a state; samples before it cannot be asked for then."""
        with self._lock:
            self._starts, self._kept = [StreamPosition(**state)], []

    def close(self) -> None:
        """Stops the reading ahead, for which an ending process would wait; batches may be asked for again."""
        self._stream.stopped.set()  # before taking the lock: its holder may be waiting for a block
        with self._lock:
            if self._ahead is not None:
                self._ahead[1].cancel()
                self._ahead = None

    def draw(self, consumed: int, count: int) -> tuple[IntArray, IntArray]:
        return np.arange(consumed, consumed + count), np.zeros(count, dtype=np.int64)

    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        """One batch of consecutive samples, which one block has or several."""
        parts: list[Batch] = []
        rest = samples
        while len(rest):
            with self._lock:
                block = self._block(int(rest[0]))
            assert block.samples is not None
            here, rest = np.split(rest, [block.after.samples - rest[0]])
            indices, _ = block.samples.draw(int(here[0]) - block.start.samples, len(here))
            parts.append(block.samples.collate(indices, np.zeros_like(here), here))
        return joined(parts, [part.samples - samples[0] for part in parts], samples)

    def _block(self, sample: int) -> StreamBlock:
        """The block that has a sample."""
        for block in self._kept:
            if block.start.samples <= sample < block.after.samples:
                return block
        start = last = self._nearest(sample)  # `last` is where the last block with samples began
        while True:
            block = self._read(start)
            if block.samples is not None:
                self._kept = [*self._kept[1 - _BLOCKS_KEPT :], block]
                last = block.start
            if sample < block.after.samples:
                return block
            if block.after.epoch > last.epoch + 1:
                raise DataError(f"{self._name} must have a document to train on, and a whole epoch has none")
            start = block.after
            if start.samples > self._starts[-1].samples:
                self._starts.append(start)

    def _nearest(self, sample: int) -> StreamPosition:
        """The start of the last known block that begins at or before a sample."""
        assert sample >= self._starts[0].samples, "what is before a restored place is out of reach"
        return self._starts[bisect_right(self._starts, sample, key=lambda place: place.samples) - 1]

    def _read(self, start: StreamPosition) -> StreamBlock:
        future = self._ahead[1] if self._ahead and self._ahead[0] == start else self._submit(start)
        block = future.result()
        self._ahead = block.after, self._submit(block.after)
        return block

    def _submit(self, start: StreamPosition) -> Future[StreamBlock]:
        return self._reader.submit(self._stream.block, start)
