"""The files of copies in memory (`memory_copies.py`), one for each rank and step.

The folder may be opened by no other user. A file has the length of a header, the header (JSON), the bytes of tensors,
and a digest of all these. A file that has another name, is no plain file or is damaged counts as missing.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash
from torch import Tensor

from shardwise.base import files, parsing

_NAME = re.compile(r"rank-(\d{4,})-step-(\d{8,})")
_NEW = ".new"
_IN_USE = "in-use"
"""A file that the ranks of a run keep locked while they may write beside it."""
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
    """The folder at a path. All methods but `open` and `make` need it to be open.

    Attributes:
        is_open: the folder exists, and is this user's alone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder: int | None = None
        self._in_use: BinaryIO | None = None

    @property
    def is_open(self) -> bool:
        return self._folder is not None

    def open(self) -> None:
        """Open the folder if it exists.

        Raises:
            OSError: another user owns it or may use it, or it is a link.
        """
        if self._folder is None:
            with contextlib.suppress(FileNotFoundError):
                self._folder = files.open_folder(self.path, files.OTHERS)

    def make(self) -> None:
        """Make and open the folder, and let other runs know that it is in use until this process ends.

        Raises:
            OSError: as `open`, or it cannot be made.
        """
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.open()
        if self._in_use is None:
            path = self.path / _IN_USE
            self._in_use = os.fdopen(files.open_own(path, os.O_RDWR | os.O_CREAT, folder=self._folder), "r+b")
            files.lock(self._in_use, wait=False, shared=True)

    def parts(self) -> list[CopyPart]:
        """The parts by their names, in the order of ranks and steps."""
        parts = []
        for name in self._names():
            match = _NAME.fullmatch(name)
            if match is not None:
                part = CopyPart(int(match[1]), int(match[2]))
                # Each part has one name: more leading zeros are another file.
                if part.file_name == name:
                    parts.append(part)
        return sorted(parts)

    def bytes(self) -> int:
        """Bytes of all parts together."""
        names = [part.file_name for part in self.parts()]
        return sum(os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_size for name in names)

    def write(self, part: CopyPart, header: Mapping[str, Any], tensors: Iterable[Tensor]) -> None:
        """Write a part; its file gets its name once it is complete."""
        text = json.dumps({**header, **part._asdict()}).encode()
        digest = xxhash.xxh3_128()
        head: list[Any] = [len(text).to_bytes(_HEADER_BYTES, "little"), text]
        with self._new(part) as file:
            # Piece by piece, so that the host never has a second copy of the whole state.
            for piece in chain(head, map(raw, tensors)):
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())
        self._name_new(part)

    def write_content(self, part: CopyPart, content: Tensor) -> None:
        """Write a part from bytes that `content` returned."""
        with self._new(part) as file:
            file.write(raw(content))
        self._name_new(part)

    def content(self, part: CopyPart) -> Tensor:
        """The bytes of a part's file, which are not copied.

        Raises:
            OSError: it is not there, or is no plain file. ValueError: it is empty.
        """
        with os.fdopen(files.open_own(self.path / part.file_name, os.O_RDONLY, folder=self._folder), "rb") as file:
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
        """Remove a part, or a folder of its name."""
        self._remove(part.file_name)

    def remove_half_written(self) -> None:
        """Remove files that killed ranks have not written to the end."""
        for name in self._names():
            if name.endswith(_NEW):
                self._remove(name)

    def remove_all(self) -> None:
        """Remove the folder with all its content."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _remove(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._folder)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            shutil.rmtree(name, dir_fd=self._folder)

    def _names(self) -> list[str]:
        # A scan moves the position of its descriptor: each has its own.
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._folder)
        try:
            with os.scandir(folder) as entries:
                return [entry.name for entry in entries]
        finally:
            os.close(folder)

    def _new(self, part: CopyPart) -> BinaryIO:
        """A new file to write, which has no part's name yet."""
        name = part.file_name + _NEW
        # A rank that was killed may have left one. O_EXCL: whatever else gets this name meanwhile is not followed.
        self._remove(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.fdopen(os.open(name, flags, 0o600, dir_fd=self._folder), "wb")

    def _name_new(self, part: CopyPart) -> None:
        name = part.file_name
        os.replace(name + _NEW, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)


def is_in_use(folder: Path) -> bool:
    """Return whether a process may write to a folder of parts.

    Raises:
        OSError: as `open_lock`; the folder may be another user's.
    """
    # A lock ends with its process, however that ends. Ranks share theirs: while any lives, no other can lock alone.
    with files.open_lock(folder / _IN_USE) as file:
        return not files.lock(file, wait=False)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, on the host."""
    plain: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(plain)
