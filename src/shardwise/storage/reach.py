"""Whether a place answers and can be written to, checked before the work whose result is to be written there."""

from __future__ import annotations

import os
import platform
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from shardwise.storage.root import Root

PATIENCE_SECONDS = 20.0
"""Longest wait for the first answer of a remote place. Clients retry for minutes, which helps only after an answer."""

_T = TypeVar("_T")


def in_time(root: Root, action: Callable[[], _T]) -> _T:
    """What `action`, which asks `root` for something, returns.

    Raises:
        StoreError: a remote place gave no answer in PATIENCE_SECONDS. Whatever `action` raises.
    """
    if root.is_local:
        return action()
    answers: queue.SimpleQueue[tuple[_T | None, Exception | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((action(), None))
        except Exception as error:  # noqa: BLE001  raised where it is waited for
            answers.put((None, error))

    # A client's call cannot be cancelled: the thread continues, and ends with the process.
    threading.Thread(target=ask, name="first answer", daemon=True).start()
    try:
        answer, error = answers.get(timeout=PATIENCE_SECONDS)
    except queue.Empty:
        raise root.failure(TimeoutError(f"no answer within {PATIENCE_SECONDS:.0f} s"), "reached") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


def require_writable(root: Root) -> None:
    """Write a small file into a folder, which is made, and remove it.

    Raises:
        StoreError: why that is not possible.
    """
    probe = root / f".probe-{platform.node()}-{os.getpid()}"
    root.make()
    probe.write(b"shardwise")
    probe.remove()
