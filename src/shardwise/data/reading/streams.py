"""The files that a stream is read from, each of which can be read from any of its documents on."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.base.errors import DataError, RunError, ShardwiseError
from shardwise.config import DataConfig
from shardwise.data.reading.content import HubFile, first_line, unpacked_name
from shardwise.data.reading.datasets import require_whole
from shardwise.data.reading.file_kinds import LINES, Kind, chosen_kind
from shardwise.data.reading.text import column_at, documents, require_sound, require_text, row_text, slices

BLOCK_CHARACTERS = 1 << 26
"""Characters that a block ends with, whatever the buffer is, and the longest document of a plain text."""


@dataclass(frozen=True)
class FileShard:
    """A file of text, on this machine or on the hub, where lines and rows without text are left out."""

    path: Path | HubFile
    kind: Kind | None
    text_key: str

    def documents(self, start: int) -> Iterator[tuple[int, Iterable[str]]]:
        """Each document from the one that begins at `start` on, as blocks of text, and where the next one begins.

        Raises:
            DataError: naming file and line, row or byte. RunError: the hub does not answer.
        """
        on_hub = isinstance(self.path, HubFile)
        try:
            yield from documents(self.path, self.kind, self.text_key, start, empty=on_hub, longest=BLOCK_CHARACTERS)
        except ShardwiseError:
            raise
        except Exception as error:
            if not on_hub:
                raise
            raise RunError(f"{self.path} cannot be read: {type(error).__name__}: {first_line(error)}") from None


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
        return column_at(table, require_text(arrow, self.path, table.schema, self.column))


Shard = FileShard | TableShard


def open_shard(file: str, data: DataConfig) -> Shard:
    """The shard of a file, or of an address on the hub; DataError where it cannot be streamed."""
    if data.is_hub_dataset:
        if unpacked_name(file).endswith(LINES):
            return FileShard(HubFile(file), "jsonl", data.text_key)
        if file.endswith(".parquet"):
            return FileShard(HubFile(file), "parquet", data.text_key)
        raise DataError(
            f"{file} must be a .parquet, .jsonl or .json file for data.streaming: set it to false, or data.path to a "
            "copy of the files"
        )
    path = Path(file)
    if path.suffix == ".arrow":
        return TableShard(path, data.text_key)
    return FileShard(path, chosen_kind(data.format), data.text_key)
