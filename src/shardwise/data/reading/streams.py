"""What a stream is read from: files, each of which is read on from any document."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, Protocol

from shardwise.config import DataConfig
from shardwise.data.reading.datasets import require_whole
from shardwise.data.reading.text import Kind, documents, kind_of, require_sound, require_text, row_text, slices
from shardwise.errors import DataError, RunError, ShardwiseError

BLOCK_CHARACTERS = 1 << 26
"""Characters that a block ends with, whatever the buffer is, and the longest document of a plain text."""
_LINES = (".jsonl", ".json")


class Shard(Protocol):
    """A file of documents."""

    def documents(self, start: int) -> Iterator[tuple[int, Iterable[str]]]:
        """Each document from the one that begins at `start` on, as blocks of text, and where the next one begins.

        Raises:
            DataError: naming file and line, row or byte. RunError: the hub does not answer.
        """
        ...


@dataclass(frozen=True)
class FileShard:
    """A file of text on this machine."""

    path: Path
    kind: Kind
    text_key: str

    def documents(self, start: int) -> Iterator[tuple[int, Iterable[str]]]:
        return documents(self.path, self.kind, self.text_key, start, longest=BLOCK_CHARACTERS)


@dataclass(frozen=True)
class TableShard:
    """A file of a data set's table, mapped into memory; rows without text are left out."""

    path: Path
    column: str

    def documents(self, start: int) -> Iterator[tuple[int, Iterable[str]]]:
        row = start
        for array in self._values.slice(start).chunks:
            require_sound(array, f"{self.path}: rows {row} to {row + len(array) - 1}", self.column)
            for value in array:
                text = row_text(value, f"{self.path}: row {row}", self.column, empty=True)
                row += 1
                if text:
                    yield row, slices(text)

    @cached_property
    def _values(self) -> Any:
        require_whole(self.path)
        arrow = importlib.import_module("pyarrow")
        table = arrow.ipc.open_stream(arrow.memory_map(str(self.path))).read_all()
        require_text(arrow, self.path, table.schema, self.column)
        return table.column(self.column)


@dataclass(frozen=True)
class HubShard:
    """A file of text on the hub (hf://…): what is read of it goes over the wire, and nothing is kept."""

    address: str
    kind: Kind
    text_key: str

    def documents(self, start: int) -> Iterator[tuple[int, Iterable[str]]]:
        try:
            yield from documents(_HubFile(self.address), self.kind, self.text_key, start, empty=True)
        except ShardwiseError:
            raise
        except Exception as error:  # noqa: BLE001  the hub's client and its transport: any
            reason = str(error).partition("\n")[0]
            raise RunError(f"{self.address} cannot be read: {type(error).__name__}: {reason}") from None


@dataclass(frozen=True)
class _HubFile:
    address: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.address).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.address).suffix

    def open(self, mode: Literal["rb"], /) -> IO[bytes]:
        from huggingface_hub import HfFileSystem

        opened: IO[bytes] = HfFileSystem().open(self.address, mode)
        return opened

    def __str__(self) -> str:
        return self.address


def open_shard(file: str, data: DataConfig) -> Shard:
    """The shard that a file, or an address on the hub, of the `data` section is.

    Raises:
        DataError: it cannot be streamed.
    """
    if data.is_hub_dataset:
        if PurePosixPath(file.removesuffix(".gz")).suffix in _LINES:
            return HubShard(file, "jsonl", data.text_key)
        if file.endswith(".parquet"):
            return HubShard(file, "parquet", data.text_key)
        raise DataError(
            f"{file} must be a .parquet, .jsonl or .json file for data.streaming: set it to false, or data.path to a "
            "copy of the files"
        )
    path = Path(file)
    if path.suffix == ".arrow":
        return TableShard(path, data.text_key)
    return FileShard(path, kind_of(path, data.format), data.text_key)
