"""Brings the bytes of a growing local file to the disk while more are written, and frees their pages in the cache."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

WINDOW_BYTES = 32 * 2**20


class WriteBehind:
    """Syncs a growing file window by window, so that at most two windows of 32 MiB are in the page cache.

    A file that is synced only at its end fills the page cache, and displaces pages that other programs will read again.
    On a virtual machine whose host provides memory at first use, a new page also takes more time than the disk: a
    checkpoint then takes three times as long (`benchmarks/checkpoint.py`).

    Args:
        descriptor: of the file, open for as long as this is used.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._start = self._end = 0
        self._thread = ThreadPoolExecutor(1, "write-behind")
        self._pending: Future[None] | None = None

    def wrote(self, count: int) -> None:
        """To be called after each write, with its length. Waits while the previous window is being synced.

        Raises:
            OSError: an earlier window could not be brought to the disk.
        """
        self._end += count
        length = self._end - self._start
        if length < WINDOW_BYTES:
            return
        self._wait()
        self._pending = self._thread.submit(_let_go, self._descriptor, self._start, length)
        self._start = self._end

    def finish(self) -> None:
        """Wait until the last window is synced; raises as `wrote`."""
        with self._thread:
            self._wait()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def _let_go(descriptor: int, start: int, length: int) -> None:
    os.fsync(descriptor)  # pages that are not on the disk yet cannot go
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)
