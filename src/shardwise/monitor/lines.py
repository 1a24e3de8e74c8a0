"""Reading of growing files of JSON lines: what was added since the last time, or their ends alone."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

_NO_STEP = re.compile(rb'\n\{"event": "(?!step"|eval")[^\n]*')  # `^` in place of `\n` takes ten times as long
_START, _STEP = b'\n{"event": "start"', b'\n{"event": "step"'
_END_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20
"""Read at once of a long file: what was made of its lines takes many times their memory."""


class Growing:
    """A file of JSON lines that another process appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """The whole lines that were added since the last call; of a file that was cut or replaced, all lines again."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            size = file.seek(0, 2)
            if size < self._read:
                self._read = 0
            file.seek(self._read)
            rest = b""
            while piece := file.read(min(_PIECE_BYTES, size - self._read - len(rest))):
                rest += piece
                whole = rest.rfind(b"\n") + 1  # what follows is in the next piece, or still being written
                lines, rest = rest[:whole], rest[whole:]
                self._read += whole
                yield from _parsed(lines)


def events(path: Path) -> list[dict[str, Any]]:
    """All events of `metrics.jsonl` but evaluations and steps, in their order, and the last step before each start.

    The other steps are not parsed: they are many.
    """
    found: list[bytes] = []
    try:
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as lines:
            first = lines.readline()
            if not first.startswith((b'{"event": "step"', b'{"event": "eval"')):
                found.append(first)
            for match in _NO_STEP.finditer(lines):
                if match[0].startswith(_START):
                    at = lines.rfind(_STEP, 0, match.start())
                    if at >= 0:
                        found.append(lines[at + 1 : lines.find(b"\n", at + 1)])
                found.append(match[0])
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        pass
    return list(_parsed(b"\n".join(found)))


def last(path: Path, bytes_: int = _END_BYTES) -> list[dict[str, Any]]:
    """The whole lines among the last bytes of a file, in their order."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - bytes_))
            content = file.read(bytes_)
    except OSError:
        return []
    begin = content.find(b"\n") + 1 if size > bytes_ else 0
    return list(_parsed(content[begin : content.rfind(b"\n") + 1]))


def _parsed(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.splitlines():
        try:
            value = json.loads(line)
        except ValueError:  # a crash, or a full disk, cut the line short
            continue
        if isinstance(value, dict):
            yield value
