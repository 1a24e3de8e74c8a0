"""Text becomes tokens: an unfinished Megatron data set in the work folder.

`text_batches` cuts text into batches, each with its position in the source; `TokenizingWorkers`, threads of this
process or other processes, tokenize them; `write_tokens` appends the tokens in order and saves the position reached.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from multiprocessing import get_context
from typing import Any, TypeVar

import numpy as np

from shardwise.base.errors import RunError, see
from shardwise.base.hardware import cpu_count
from shardwise.data.prepare.output import PreparedOutput
from shardwise.data.reading.megatron_files import ChangedFilesError, UnfinishedIndex
from shardwise.data.reading.text_sources import Source, TextPiece
from shardwise.data.rows import Int32Array, IntArray, Part
from shardwise.data.tokens import encoding
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.launch.environment import PARENT_PID
from shardwise.launch.rank_process import die_with_parent

# Enough for eight threads of a process, and few enough that what `tokenizers` makes of them stays below 100 MiB.
BATCH_CHARACTERS = 1 << 21
SMALL_BYTES = 8 << 20
"""Work below this size is done in this process: others take longer to start than they save."""
COMMIT_SECONDS = 1.0
"""The most work that a killed process loses."""


@dataclass(frozen=True)
class _SourcePosition:
    """The part of a source that has been read."""

    batches: int = 0
    documents: int = 0
    characters: int = 0
    bytes: int = 0
    digest: str = ""


@dataclass(frozen=True)
class TokenizingProgress:
    """What `data prepare` has read and written; `open_document`: tokens of a last document without an end yet."""

    read: _SourcePosition = field(default_factory=_SourcePosition)
    tokens: int = 0
    sequences: int = 0
    open_document: int = 0

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> TokenizingProgress:
        """The progress of which `saved` is the `dataclasses.asdict`."""
        return cls(**{**saved, "read": _SourcePosition(**saved["read"])})


@dataclass(frozen=True)
class _TextBatch:
    """Documents or sentences to tokenize one by one; `ends`: number of texts before the end of each document."""

    texts: list[str]
    ends: list[int]
    stop: _SourcePosition


def text_batches(source: Source, sentences: bool) -> Iterator[_TextBatch]:
    """All text of a source in batches to tokenize, which are always the same: documents, or `sentences`."""
    digest = encoding.ContentDigest()
    watched: Iterator[tuple[Part, TextPiece]] = (("train", piece) for piece in digest.watch(source.pieces()))
    cut = encoding.sentence_pieces(watched) if sentences else encoding.document_texts(watched)
    pieces = (piece for _, piece in cut)
    position = _SourcePosition()
    # `digest` is that of the text up to the end of a batch, or of one piece more if it ends within a document.
    for batch in encoding.group_by_size(pieces, lambda piece: piece.characters, BATCH_CHARACTERS):
        counts = accumulate(len(piece.texts) for piece in batch)
        ends = [count for count, piece in zip(counts, batch, strict=True) if piece.ends_document]
        position = _SourcePosition(
            position.batches + 1,
            position.documents + len(ends),
            position.characters + sum(piece.characters for piece in batch),
            digest.bytes,
            digest.hexdigest(),
        )
        yield _TextBatch([text for piece in batch for text in piece.texts], ends, position)


TokenRow = tuple[Int32Array, IntArray]
"""The ids of all texts of a batch one after another, and the number of ids of each text."""
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
# One process turns ids into arrays as fast as this many cores produce them; its threads share the tokenizer's caches.
CORES_OF_A_PROCESS = 8
# Four processes stay below 1 GiB together.
_MOST_PROCESSES = 4
_tokenizer: Tokenizer | None = None  # the tokenizer of this process, which is opened once for all its tasks


class TokenizingWorkers:
    """Threads or processes that tokenize text."""

    def __init__(self, pool: Executor, count: int) -> None:
        self._pool = pool
        self._count = count

    @classmethod
    def for_tokenizing(cls, path: str, tokenizer: Tokenizer, *, small: bool) -> TokenizingWorkers:
        """Workers on all cores: this process, or several for much text, which open the tokenizer at `path`."""
        global _tokenizer
        if small or cpu_count() <= CORES_OF_A_PROCESS:
            _tokenizer = tokenizer
            # One thread makes arrays while the library encodes the next batch for the other one, on all cores.
            return cls(ThreadPoolExecutor(2), 2)
        return cls.processes(min(_MOST_PROCESSES, -(-cpu_count() // max(CORES_OF_A_PROCESS, 1))), path)

    @classmethod
    def processes(cls, count: int, path: str | None) -> TokenizingWorkers:
        """New processes, which open the tokenizer at `path` if that is not None."""
        arguments = (path, max(1, cpu_count() // count), os.getpid())
        # They are not forked: a copy of this process would lack the threads that its libraries wait for.
        return cls(ProcessPoolExecutor(count, get_context("spawn"), _begin, arguments), count)

    def __enter__(self) -> TokenizingWorkers:
        return self

    def __exit__(self, *_error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def each(self, call: Callable[[_Task], _Result], tasks: Iterable[_Task]) -> Iterator[tuple[_Task, _Result]]:
        """Each task and its result, in order; only a few tasks are taken ahead. RunError if a process has ended."""
        pending: deque[tuple[_Task, Future[_Result]]] = deque()
        try:
            for task in tasks:
                pending.append((task, self._pool.submit(call, task)))
                while len(pending) > 2 * self._count or (pending and pending[0][1].done()):
                    first, future = pending.popleft()
                    yield first, future.result()
            for first, future in pending:
                yield first, future.result()
        except BrokenProcessPool:
            raise RunError(
                "a process that prepares data has ended early, perhaps because memory ran out: start the same command "
                "again, it continues after what is finished"
                f"{see('data#worker-ended')}"
            ) from None


def _tokenize_batch(batch: _TextBatch, literally: bool) -> TokenRow:
    """The tokens of a batch; called in a process or thread of `TokenizingWorkers.for_tokenizing`."""
    assert _tokenizer is not None
    return _tokenizer.encode_rows(batch.texts, literally=literally)


def _begin(path: str | None, threads: int, parent: int) -> None:
    global _tokenizer
    os.environ[PARENT_PID] = str(parent)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the parent reports it
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    if path is not None:
        _tokenizer = Tokenizer.load(path)


@dataclass(frozen=True)
class SequenceOptions:
    """The rules by which text becomes sequences of tokens: each sentence is one, or each document with its marks."""

    sentences: bool
    marks: encoding.DocumentMarks


def write_tokens(
    source: Source,
    workers: TokenizingWorkers,
    output: PreparedOutput,
    sequences: SequenceOptions,
    tokenizer: Tokenizer,
    progress: TokenizingProgress,
    advance: Callable[[int], None],
) -> TokenizingProgress:
    """Tokenizes the source; returns the progress at its end, when tokens.bin and tokens.idx are complete.

    Args:
        output: place of the data, whose work folder has the files and the progress.
        progress: progress of an earlier process, after which this one continues.
        advance: called with the bytes of text that were read.

    Raises:
        ChangedError: the text up to `progress` differs from what was read before.
        DataError: the source cannot be read, or a disk is full.
    """
    read = progress.read
    with output.writing():
        index = UnfinishedIndex(output.made, tokenizer.vocab_size, progress.tokens, progress.sequences, read.documents)
    with index:
        saved = time.monotonic()
        batches = _after(text_batches(source, sequences.sentences), read, advance)
        for batch, row in workers.each(functools.partial(_tokenize_batch, literally=sequences.sentences), batches):
            advance(batch.stop.bytes - progress.read.bytes)
            with output.writing():
                progress = _append(index, sequences, progress, batch, row)
                if time.monotonic() - saved >= COMMIT_SECONDS:
                    index.to_disk()  # first: a state must never describe tokens that a crash could lose
                    output.save(asdict(progress))
                    saved = time.monotonic()
        with output.writing():
            index.to_disk()
            output.save(asdict(progress))
            index.finish()
    return progress


def _after(
    batches: Iterator[_TextBatch], begin: _SourcePosition, advance: Callable[[int], None]
) -> Iterator[_TextBatch]:
    """The batches after a position, which must be the same text as before."""
    if begin.batches:
        last = next((batch for batch in batches if batch.stop.batches == begin.batches), None)
        if last is None or last.stop != begin:
            raise ChangedFilesError("the text has changed since its preparation began")
        advance(begin.bytes)
    yield from batches


def _append(
    index: UnfinishedIndex, sequences: SequenceOptions, progress: TokenizingProgress, batch: _TextBatch, row: TokenRow
) -> TokenizingProgress:
    """Appends the tokens of a batch; the next batch continues a document that is open at its end."""
    tokens, sizes = row
    ends = np.array(batch.ends, dtype=np.int64)
    end = sequences.marks.end
    if not sequences.sentences:  # each text is a window of a document
        is_last = np.isin(np.arange(1, len(sizes) + 1), ends).tolist()
        tokens, sizes = sequences.marks.put(tokens, sizes, is_last, begun=progress.open_document > 0)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
    document_ends = starts[ends]  # tokens of the batch before each end of a document
    if sequences.sentences:
        lengths, bounds = _sentences(sizes, ends, closed=end is not None)
        if end is not None:
            tokens = np.insert(tokens, document_ends, end)
    else:  # the first document began before the batch; documents without tokens have no sequence
        document_lengths = np.diff(document_ends, prepend=-progress.open_document)
        has_tokens = document_lengths > 0
        lengths = document_lengths[has_tokens]
        bounds = np.cumsum(has_tokens)
    index.extend(tokens, lengths, bounds)
    open_document = int(starts[-1])
    if len(document_ends):
        open_document -= int(document_ends[-1])
    else:
        open_document += progress.open_document
    return TokenizingProgress(batch.stop, progress.tokens + len(tokens), index.sequences, open_document)


def _sentences(sizes: IntArray, ends: IntArray, *, closed: bool) -> tuple[IntArray, IntArray]:
    """Sizes of the sentences that have tokens, and the number of them before each end of a document.

    A token that closes a document belongs to its last sentence; if that lies in an earlier batch, the token is a
    sentence by itself.
    """
    has_tokens = sizes > 0
    before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(has_tokens)])[ends]
    lengths = sizes[has_tokens]
    if not closed:
        return lengths, before
    is_by_itself = np.diff(before, prepend=0) == 0
    lengths[before[~is_by_itself] - 1] += 1
    return np.insert(lengths, before[is_by_itself], 1), before + np.cumsum(is_by_itself)
