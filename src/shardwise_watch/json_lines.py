"""Reading of growing files of JSON lines: the lines that were added since the last time, or the last ones alone.

A file that is not there has no lines; one that cannot be read raises OSError.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from shardwise.base.files import open_plain
from shardwise.runs.folder import event_bytes
from shardwise.runs.json_records import record_of_json

_START = b"{" + event_bytes("start")
_STEP = b"{" + event_bytes("step")
_CHUNK_BYTES = 1 << 22
_HEAD_BYTES = 256  # bytes by which a file is known again; the first event has its time, so that two runs differ in them
_STEPS_AT_THE_END = 64
"""Steps that are read of a run whose history is left out: more than the 20 over which means are taken."""


class GrowingFile:
    """A file of a run's JSON lines that is read while another process appends to it.

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


def last_lines(path: Path, byte_count: int) -> Iterator[dict[str, Any]]:
    """Yield the complete JSON lines among the last bytes of a watched file, parsed, the last one first."""
    yield from _parsed(reversed(last_raw_lines(path, byte_count)))


def last_raw_lines(path: Path, byte_count: int) -> list[bytes]:
    """Return the complete JSON lines among the last bytes of a growing file, not parsed; [] without a file."""
    try:
        with open_plain(path) as file:
            begin = max(0, file.seek(0, 2) - byte_count)
            file.seek(begin)
            # The first piece is cut unless it begins the file, and the last one is still being written.
            return file.read(byte_count).split(b"\n")[(begin > 0) : -1]
    except FileNotFoundError:
        return []


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
            yield record_of_json(line, orjson.loads)
