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
from shardwise.errors import RunError
from shardwise.launch.environment import PARENT_PID
from shardwise.launch.guard import die_with_parent

Rows = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
# One process makes arrays of the ids as fast as so many cores find them; threads share the tokenizer's caches.
CORES_OF_A_PROCESS = 8
# Four processes stay below 1 GiB together.
_MOST = 4
_tokenizer: Tokenizer | None = None


class Workers:
    """Threads or processes that share out tasks."""

    def __init__(self, pool: Executor, count: int) -> None:
        self._pool, self._count = pool, count

    @classmethod
    def for_tokenizing(cls, path: str, own: Tokenizer, *, small: bool) -> Workers:
        """What `tokenize` runs in, on all cores: this process, unless they are many and the text is not small.

        path, own: the tokenizer, and the same one opened. Two threads: one makes arrays while the other one's ids are
        found, by the library's own threads on all cores.
        """
        if small or _cores() <= CORES_OF_A_PROCESS:
            _use(own)
            return cls(ThreadPoolExecutor(2), 2)
        return cls._processes(min(_MOST, -(-_cores() // max(CORES_OF_A_PROCESS, 1))), path)

    @classmethod
    def for_masking(cls, tasks: int, *, small: bool) -> Workers:
        """Processes, one for a task at most; a thread where there is little to do."""
        count = 1 if small else min(_cores(), _MOST, tasks)
        return cls._processes(count, None) if count > 1 else cls(ThreadPoolExecutor(1), 1)

    @classmethod
    def _processes(cls, count: int, path: str | None) -> Workers:
        # Not forked: a library of this process may have threads, and these do not come along.
        start = (path, max(1, _cores() // count), os.getpid())
        return cls(ProcessPoolExecutor(count, get_context("spawn"), _begin, start), count)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def each(self, call: Callable[[_Task], _Result], tasks: Iterable[_Task]) -> Iterator[tuple[_Task, _Result]]:
        """Each task and what the call makes of it, in order; few tasks are under way at once.

        Raises:
            RunError: a process has ended.
        """
        under_way: deque[tuple[_Task, Future[_Result]]] = deque()
        try:
            for task in tasks:
                under_way.append((task, self._pool.submit(call, task)))
                while len(under_way) > 2 * self._count or (under_way and under_way[0][1].done()):
                    first, future = under_way.popleft()
                    yield first, future.result()
            while under_way:
                first, future = under_way.popleft()
                yield first, future.result()
        except BrokenProcessPool:
            raise RunError(
                "a process that prepares data has ended before its time, perhaps for want of memory: start the same "
                "command again, it goes on from what is finished"
            ) from None


def tokenize(texts: list[str], literally: bool) -> Rows:
    """The ids of all texts one after another, and how many each has."""
    assert _tokenizer is not None
    return _tokenizer.encode_rows(texts, literally=literally)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _use(tokenizer: Tokenizer) -> None:
    global _tokenizer
    _tokenizer = tokenizer


def _begin(path: str | None, threads: int, parent: int) -> None:
    """In a new process."""
    os.environ[PARENT_PID] = str(parent)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the parent reports it
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    if path is not None:
        _use(Tokenizer.load(path))
