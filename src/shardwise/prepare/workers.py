"""Processes that tokenize and mask, several at once where the work is worth their start."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardwise.data.tokenizer import Tokenizer
from shardwise.errors import RunError
from shardwise.launch.environment import PARENT_PID
from shardwise.launch.guard import die_with_parent

Rows = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
# Each has a copy of the tokenizer: with four of them all stay below 1 GiB together. More cores are theirs as threads.
_MOST = 4
_tokenizer: Tokenizer | None = None


class Workers:
    """As many processes as there are cores, four at most, which share out the cores.

    path: of the tokenizer that `tokenize` uses. own: the same, opened: then this process does all itself.
    """

    def __init__(self, path: str, own: Tokenizer | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.count = min(cores, _MOST)
        self._pool: ProcessPoolExecutor | None = None
        if own is not None:
            _use(own)
        else:
            # Not forked: a library of this process may have threads, and these do not come along.
            self._pool = ProcessPoolExecutor(
                self.count, get_context("spawn"), _begin, (path, max(1, cores // self.count), os.getpid())
            )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def each(self, call: Callable[[_Task], _Result], tasks: Iterable[_Task]) -> Iterator[tuple[_Task, _Result]]:
        """Each task and what the call makes of it, in order; few tasks are under way at once.

        Raises:
            RunError: a process has ended.
        """
        if self._pool is None:
            for task in tasks:
                yield task, call(task)
            return
        under_way: deque[tuple[_Task, Future[_Result]]] = deque()
        try:
            for task in tasks:
                under_way.append((task, self._pool.submit(call, task)))
                while len(under_way) > 2 * self.count or (under_way and under_way[0][1].done()):
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


def _use(tokenizer: Tokenizer) -> None:
    global _tokenizer
    _tokenizer = tokenizer


def _begin(path: str, threads: int, parent: int) -> None:
    """In a new process."""
    os.environ[PARENT_PID] = str(parent)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: the parent tells of it
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    _use(Tokenizer.load(path))
