"""The files of copies in memory (`memory_copies.py`), one for each rank and step.

The folder is this user's alone. A file has the length of a header, the header (JSON), the bytes of tensors, and a
digest of all these. A file that cannot be read or is damaged counts as missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from shardwise.base import files, parsing

_NAME = re.compile(r"rank-(\d{4,})-step-(\d{8,})")
_HEADER_BYTES = 8
"""Bytes of the number that is the header's length."""
_DIGEST_BYTES = 16
"""Bytes of a digest of xxh3_128."""


class CopyPart(NamedTuple):
    """The name of the state that one rank has after a step."""

    rank: int
    step: int

    @property
    def file_name(self) -> str:
        return f"rank-{self.rank:04d}-step-{self.step:08d}"


class CopyFiles:
    """The folder at a path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def is_open(self) -> bool:
        """The folder exists, and is this user's alone."""
        return self._lock is not None

    def open(self) -> None:
        """Show other runs until the end of this process that the folder, if it exists, is in use.

        Raises:
            OSError: another user owns it or may use it, or it is a link.
        """
        if self._lock is None:
            with contextlib.suppress(FileNotFoundError):
                self._lock = _locked(self.path, fcntl.LOCK_SH)

    def make(self) -> None:
        """Make the folder if it does not exist, and open it."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.open()

    def parts(self) -> list[CopyPart]:
        """The parts by their names, in the order of ranks and steps."""
        matches = (_NAME.fullmatch(path.name) for path in self.path.glob("rank-*"))
        return sorted(CopyPart(int(match[1]), int(match[2])) for match in matches if match is not None)

    def bytes(self) -> int:
        """Bytes of all parts together."""
        return sum((self.path / part.file_name).lstat().st_size for part in self.parts())

    def write(self, part: CopyPart, header: Mapping[str, Any], tensors: Iterable[Tensor]) -> None:
        """Write a part."""
        text = json.dumps({**header, **part._asdict()}).encode()
        digest = xxhash.xxh3_128()
        head: list[Any] = [len(text).to_bytes(_HEADER_BYTES, "little"), text]
        path = self.path / part.file_name
        # Piece by piece, so that the host never has a second copy of the whole state.
        with path.with_suffix(".new").open("wb") as file:
            for piece in chain(head, map(raw, tensors)):
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())
        path.with_suffix(".new").replace(path)

    def write_content(self, part: CopyPart, content: Tensor) -> None:
        """Write a part from bytes that `content` returned."""
        path = self.path / part.file_name
        path.with_suffix(".new").write_bytes(raw(content))
        path.with_suffix(".new").replace(path)

    def content(self, part: CopyPart) -> Tensor:
        """The bytes of a part's file, which are not copied. OSError or ValueError: it is not there, or is empty."""
        with (self.path / part.file_name).open("rb") as file:
            # Private and writable, as torch warns of memory that it may not write; a write would copy its page.
            mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def read(self, part: CopyPart, *, checked: bool = True) -> tuple[dict[str, Any], Tensor] | None:
        """The header of a part and the bytes of its tensors; None where the file is no complete part of this name.

        Args:
            checked: compare the digest, for which all bytes are read.
        """
        try:
            content = self.content(part)
            data = raw(content)
            if checked and xxhash.xxh3_128(data[:-_DIGEST_BYTES]).digest() != bytes(data[-_DIGEST_BYTES:]):
                return None
            end = _HEADER_BYTES + int.from_bytes(data[:_HEADER_BYTES], "little")
            header = parsing.json_value(bytes(data[_HEADER_BYTES:end]))
            is_named_so = (header["rank"], header["step"]) == part
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (header, content[end:-_DIGEST_BYTES]) if is_named_so else None

    def remove(self, part: CopyPart) -> None:
        (self.path / part.file_name).unlink(missing_ok=True)

    def remove_half_written(self) -> None:
        """Remove files that killed ranks have not written to the end."""
        for path in self.path.glob("*.new"):
            path.unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Remove the folder with all its content."""
        shutil.rmtree(self.path, ignore_errors=True)


def is_in_use(folder: Path) -> bool:
    """Return whether a process may write to a folder of parts. OSError: it is gone, or may be another user's."""
    try:
        os.close(_locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        return True
    return False


def _locked(folder: Path, kind: int) -> int:
    """A descriptor of a folder, locked until it is closed or the process ends. BlockingIOError: another has the lock.

    Ranks share their lock: while any of them lives, no other process can lock the folder alone.
    """
    files.require_trusted(folder, files.OTHERS)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, on the host."""
    plain: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(plain)
