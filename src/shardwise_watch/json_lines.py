"""Reading of growing files of JSON lines: the lines that were added since the last time, or the last ones alone.

A file that is not there has no lines; one that cannot be read raises OSError.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from shardwise.base.files import open_plain
from shardwise.base.parsing import record_of
from shardwise.runs.events import seconds_of
from shardwise.runs.folder import event_mark

_START = b"{" + event_mark("start")
_STEP = b"{" + event_mark("step")
_TIME = b'"time": "'
_CHUNK_BYTES = 1 << 22
_HEAD_BYTES = 256
"""Bytes by which a file is known again; the first event has its time, so that two runs differ in them."""
_STEPS_AT_THE_END = 64
"""Steps that are read of a run whose history is left out: more than the 20 over which means are taken."""
_BLOCK_BYTES = 1 << 15
"""Much more than the last twenty lines of a rank's file have."""


class GrowingFile:
    """A file of JSON lines that another process appends to.

    Args:
        all_steps: True if `new` returns all steps. Otherwise it returns the last ones, and the last one before each
            "start" event; the others are not parsed, as they are many.
    """

    def __init__(self, path: Path, *, all_steps: bool) -> None:
        self.path = path
        self.all_steps = all_steps
        self._read_bytes = 0
        self._head = b""

    def was_replaced(self) -> bool:
        """True if the file is another one than before, or was cut: `new` then returns all its lines again."""
        try:
            with open_plain(self.path) as file:
                same = file.read(len(self._head)) == self._head and file.seek(0, 2) >= self._read_bytes
        except FileNotFoundError:
            same = self._read_bytes == 0
        if not same:
            self._read_bytes = 0
            self._head = b""
        return not same

    def new(self) -> Iterator[dict[str, Any]]:
        """Return the complete lines that were added since the last call, in their order."""
        lines = self._lines()
        return _parsed(lines if self.all_steps else _without_most_steps(lines))

    def _lines(self) -> Iterator[bytes]:
        """Read the added lines in chunks: a file may have gigabytes."""
        try:
            file = open_plain(self.path)
        except FileNotFoundError:
            return
        with file:
            if len(self._head) < _HEAD_BYTES:
                self._head = file.read(_HEAD_BYTES)
            file.seek(self._read_bytes)
            begun = b""
            while chunk := file.read(_CHUNK_BYTES):
                # The text after the last line end is still being written: it is not counted as read.
                *lines, begun = (begun + chunk).split(b"\n")
                self._read_bytes += sum(map(len, lines)) + len(lines)
                yield from lines


def last_lines(path: Path, byte_count: int) -> list[dict[str, Any]]:
    """Return the complete lines among the last bytes of a file, in their order; [] if the file does not exist."""
    try:
        with open_plain(path) as file:
            begin = max(0, file.seek(0, 2) - byte_count)
            return list(_parsed(_block(file.fileno(), begin, byte_count)))
    except FileNotFoundError:
        return []


def last_lines_of_rank(
    path: Path, *, steps: int, start: bool, after: float | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the last "start" line of a rank's file, {} if it is missing, and its last steps, the last one first.

    Args:
        steps: largest number of steps. They are those of one process, and stand near the end of the file.
        start: True to search the whole file for the start if it is not near the end; otherwise {} takes its place.
        after: last start of the rank's process, in seconds since the epoch; None if it started once.
    """
    with open_plain(path) as opened:
        file = opened.fileno()
        size = os.fstat(file).st_size
        lines = _block(file, max(0, size - _BLOCK_BYTES))
        last_steps = _last_steps(lines, steps)
        begun = _last_start(lines)
        if not begun and start:
            # Two blocks: the start lies within a block after the place that is found.
            begin = 0 if after is None else _position_of_time(file, size, after)
            begun = _last_start(_block(file, begin, 2 * _BLOCK_BYTES))
    return begun, last_steps


def _last_steps(lines: list[bytes], count: int) -> list[dict[str, Any]]:
    """Return the steps of the process that took the last step of `lines`, at most so many, the last one first."""
    last_steps: list[dict[str, Any]] = []
    for line in _parsed(reversed(lines)):
        if "step" in line:
            last_steps.append(line)
        if len(last_steps) == count or (last_steps and line.get("event") == "start"):
            break
    return last_steps


def _position_of_time(file: int, size: int, after: float) -> int:
    """Find, by halving, a position in a rank's file within a block before the first line after a time.

    Lines are in the order of time, and reading a file of gigabytes from its beginning would take minutes.
    """
    low = 0
    high = size
    while high - low > _BLOCK_BYTES:
        middle = (low + high) // 2
        _, _, text = os.pread(file, _BLOCK_BYTES // 2, middle).partition(_TIME)
        time = text[: text.find(b'"')].decode(errors="replace")
        if seconds_of({"time": time}) >= after:
            high = middle
        else:
            low = middle
    return low


def _block(file: int, begin: int, byte_count: int = _BLOCK_BYTES) -> list[bytes]:
    """Return the complete lines of a part of a file: the first piece is cut unless it begins the file."""
    return os.pread(file, byte_count, begin).split(b"\n")[(begin > 0) : -1]


def _last_start(lines: list[bytes]) -> dict[str, Any]:
    return next(_parsed(line for line in reversed(lines) if line.startswith(_START)), {})


def _without_most_steps(lines: Iterable[bytes]) -> list[bytes]:
    """Keep all lines but steps, the last step before each start, and the last steps."""
    kept: list[tuple[int, bytes]] = []
    steps: deque[tuple[int, bytes]] = deque(maxlen=_STEPS_AT_THE_END)
    for position, line in enumerate(lines):
        if line.startswith(_STEP):
            steps.append((position, line))
            continue
        if line.startswith(_START) and steps:
            kept.append(steps[-1])
            steps.clear()
        kept.append((position, line))
    return [line for _, line in sorted([*kept, *steps])]


def _parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        # A crash, or a full disk, cuts a line short.
        with contextlib.suppress(ValueError):
            yield record_of(line, orjson.loads)
