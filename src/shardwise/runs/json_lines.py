"""Reading of growing files of JSON lines: what was added since the last time, or their ends alone.

The steps of a run as columns of numbers, which take little memory.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from shardwise.base.files import open_plain
from shardwise.base.run_records import record_of
from shardwise.runs.lost_time import number, seconds_of

_START, _STEP = b'{"event": "start"', b'{"event": "step"'
_TIME = b'"time": "'
_CHUNK_BYTES = 1 << 22
_HEAD_BYTES = 256
_STEPS_AT_THE_END = 64
_BLOCK_BYTES = 1 << 13
"""Much more than a line of a rank's file has."""


class Growing:
    """A file of JSON lines that another process appends to.

    Args:
        whole: whether `new` returns all steps. Otherwise it returns the last ones, and the last one before each "start"
            event: the others are not parsed, as they are many.
    """

    def __init__(self, path: Path, *, whole: bool) -> None:
        self.path, self.whole = path, whole
        self._read, self._head = 0, b""

    def was_replaced(self) -> bool:
        """Whether the file is another one than before, or was cut: `new` then returns all its lines again.

        Raises:
            OSError: it cannot be read.
        """
        try:
            with open_plain(self.path) as file:
                same = file.read(len(self._head)) == self._head and file.seek(0, 2) >= self._read
        except FileNotFoundError:
            same = self._read == 0
        if not same:
            self._read, self._head = 0, b""
        return not same

    def new(self) -> Iterator[dict[str, Any]]:
        """The whole lines that were added since the last call, in their order.

        Raises:
            OSError: the file cannot be read.
        """
        lines = self._lines()
        return _parsed(lines if self.whole else _few(lines))

    def _lines(self) -> Iterator[bytes]:
        """Read in chunks: a file may have gigabytes. What follows the last line end is still being written."""
        try:
            file = open_plain(self.path)
        except FileNotFoundError:
            return
        with file:
            if len(self._head) < _HEAD_BYTES:
                self._head = file.read(_HEAD_BYTES)
            file.seek(self._read)
            begun = b""
            while chunk := file.read(_CHUNK_BYTES):
                *lines, begun = (begun + chunk).split(b"\n")
                self._read += sum(map(len, lines)) + len(lines)
                yield from lines


def last(path: Path, bytes_: int) -> list[dict[str, Any]]:
    """The whole lines among the last bytes of a file, in their order; none of one that is not there.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with open_plain(path) as file:
            return list(_parsed(_block(file.fileno(), max(0, file.seek(0, 2) - bytes_), bytes_)))
    except FileNotFoundError:
        return []


def last_of_rank(path: Path, *, start: bool, after: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last "start" line and the last step of a rank's file; {} where there is none.

    Args:
        start: whether to look for the start where it is not at the end of the file; {} otherwise.
        after: when the rank's process started last, in seconds since the epoch; None: it started once.

    Raises:
        OSError: the file cannot be read.
    """
    with open_plain(path) as opened:
        file, size = opened.fileno(), os.fstat(opened.fileno()).st_size
        lines = _block(file, max(0, size - _BLOCK_BYTES))
        step = next((line for line in _parsed(reversed(lines)) if "step" in line), {})
        begun = _start_among(lines)
        if not begun and start:
            begun = _start_among(_block(file, 0 if after is None else _begin_of(file, size, after), 2 * _BLOCK_BYTES))
    return begun, step


def _begin_of(file: int, size: int, after: float) -> int:
    """A place in a rank's file within a block before its first line after a time, found by halving."""
    low, high = 0, size
    while high - low > _BLOCK_BYTES:
        middle = (low + high) // 2
        _, _, found = os.pread(file, _BLOCK_BYTES // 2, middle).partition(_TIME)
        time = found[: found.find(b'"')].decode(errors="replace")
        low, high = (low, middle) if seconds_of({"time": time}) >= after else (middle, high)
    return low


def _block(file: int, at: int, bytes_: int = _BLOCK_BYTES) -> list[bytes]:
    """The whole lines of a part of a file."""
    return os.pread(file, bytes_, at).split(b"\n")[(at > 0) : -1]


def _start_among(lines: list[bytes]) -> dict[str, Any]:
    return next(_parsed(line for line in reversed(lines) if line.startswith(_START)), {})


def _few(lines: Iterable[bytes]) -> list[bytes]:
    """All lines but steps, the last step before each start, and the last steps."""
    found: list[tuple[int, bytes]] = []
    steps: deque[tuple[int, bytes]] = deque(maxlen=_STEPS_AT_THE_END)
    for position, line in enumerate(lines):
        if line.startswith(_STEP):
            steps.append((position, line))
            continue
        if line.startswith(_START) and steps:
            found.append(steps[-1])
            steps.clear()
        found.append((position, line))
    return [line for _, line in sorted([*found, *steps])]


def _parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError):  # a crash, or a full disk, cut the line short
            yield record_of(line, orjson.loads)


NUMBERS = (
    "loss",
    "lr",
    "grad_norm",
    "param_norm",
    "tokens",
    "samples",
    "tokens_per_second",
    "samples_per_second",
    "tokens_per_second_per_device",
    "peak_tokens_per_second",
    "mfu",
    "step_seconds",
    "peak_memory_bytes",
    "bubble",
    "loss_spike",
)
"""Numbers of a step that the series of a run has; NaN where a step lacks one."""
PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "other")
"""Of a step's time (`split_seconds`), in the order in which they are shown."""


@dataclass
class Series:
    """The steps of a run, those that were undone left out: by name one number for each step.

    Attributes:
        steps: their numbers, growing.
        seconds: when each was recorded, since the epoch; NaN where that is unknown.
        numbers: by name of `NUMBERS`.
        parts: by name of `PARTS`, seconds of the step.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    numbers: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in NUMBERS})
    parts: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in PARTS})

    def add(self, event: Mapping[str, Any]) -> None:
        """Add a "step" event; steps from its number on are undone."""
        step = event["step"]
        if self.steps and self.steps[-1] >= step:
            self.undo_after(step - 1)
        self.steps.append(step)
        self.seconds.append(seconds_of(event))
        split = event.get("split_seconds")
        for fields, columns in ((event, self.numbers), (split if isinstance(split, dict) else {}, self.parts)):
            for name, values in columns.items():
                value = fields.get(name)
                values.append(value if type(value) is float else number(value))  # there are many: most are floats

    def undo_after(self, step: int) -> None:
        """Forget the steps after `step`: the run went back to it."""
        keep = len(self.steps)
        while keep and self.steps[keep - 1] > step:
            keep -= 1
        if keep < len(self.steps):
            del self.steps[keep:]
            for values in (self.seconds, *self.numbers.values(), *self.parts.values()):
                del values[keep:]
