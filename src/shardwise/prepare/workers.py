"""Where tokenizing and masking run: threads of this process, or processes of their own."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.errors import RunError, see
from shardwise.hardware import cpu_count
from shardwise.launch.environment import PARENT_PID
from shardwise.launch.guard import die_with_parent
from shardwise.prepare.batches import TextBatch

TokenRow = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
"""The ids of all texts of a batch one after another, and how many each text has."""
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
# One process turns ids into arrays as fast as this many cores produce them; its threads share the tokenizer's caches.
CORES_OF_A_PROCESS = 8
# Four processes stay below 1 GiB together.
_MOST_PROCESSES = 4
_tokenizer: Tokenizer | None = None
"""The tokenizer of this process, which is opened once for all its tasks."""


class Workers:
    """Threads or processes that share tasks."""

    def __init__(self, pool: Executor, count: int) -> None:
        self._pool, self._count = pool, count

    @classmethod
    def for_tokenizing(cls, path: str, tokenizer: Tokenizer, *, small: bool) -> Workers:
        """What `tokenize` runs in, on all cores: this process, unless there are many cores and the text is not small.

        Args:
            path: where other processes open `tokenizer`.
        """
        global _tokenizer
        if small or cpu_count() <= CORES_OF_A_PROCESS:
            _tokenizer = tokenizer
            # One thread makes arrays while the library encodes the next batch for the other one, on all cores.
            return cls(ThreadPoolExecutor(2), 2)
        return cls.processes(min(_MOST_PROCESSES, -(-cpu_count() // max(CORES_OF_A_PROCESS, 1))), path)

    @classmethod
    def for_masking(cls, tasks: int, *, small: bool) -> Workers:
        """Processes, at most one for each task; one thread where there is little to do."""
        count = 1 if small else min(cpu_count(), _MOST_PROCESSES, tasks)
        return cls.processes(count, None) if count > 1 else cls(ThreadPoolExecutor(1), 1)

    @classmethod
    def processes(cls, count: int, path: str | None) -> Workers:
        """New processes, which open the tokenizer at `path` if that is not None."""
        arguments = (path, max(1, cpu_count() // count), os.getpid())
        # They are not forked: a copy of this process would lack the threads that its libraries wait for.
        return cls(ProcessPoolExecutor(count, get_context("spawn"), _begin, arguments), count)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def each(self, call: Callable[[_Task], _Result], tasks: Iterable[_Task]) -> Iterator[tuple[_Task, _Result]]:
        """Each task and the result of the call, in order. Only a few tasks are taken before their results are used.

        Raises:
            RunError: a process has ended.
        """
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


def tokenize(batch: TextBatch, literally: bool) -> TokenRow:
    """The tokens of a batch; called where `Workers.for_tokenizing` runs it."""
    assert _tokenizer is not None
    return _tokenizer.encode_rows(batch.texts, contexts=batch.contexts, literally=literally)


def _begin(path: str | None, threads: int, parent: int) -> None:
    """Is called first in each new process."""
    global _tokenizer
    os.environ[PARENT_PID] = str(parent)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the parent reports it
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    if path is not None:
        _tokenizer = Tokenizer.load(path)
