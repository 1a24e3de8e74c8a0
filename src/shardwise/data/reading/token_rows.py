"""Rows of token ids in tables that other programs tokenized: columns of arrow, and fields of JSON lines."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from shardwise.base.errors import DataError, see
from shardwise.data.reading import jsonl_parquet
from shardwise.data.reading.content import FileReading, open_unpacked, reading_of
from shardwise.data.rows import Flags, IntArray, Integers

# Lines that are decoded at once.
_LINES = 256
# Kinds of columns of lists: those that hold no whole numbers, such as floats or lists, are refused when they are read.
_LISTS = r"tokens|\w*list\w*<(?!.*: (string|large_string|struct))"
_FIX = "(data.text_key): write it as a list of integers, or name another"


@dataclass(frozen=True)
class TokenRows:
    """Rows of token ids, one after another; `nulls`: True for a token that is null; `place` names a row in messages."""

    lengths: IntArray
    tokens: Integers
    place: Callable[[int], str]
    nulls: Flags | None = None

    @staticmethod
    def of_arrow(array: Any, where: str, first: int, column: str) -> TokenRows:
        """The rows of an arrow array of lists, of which the first is row number `first`; DataError if one is null."""
        if array.null_count:
            row = first + array.is_null().to_pylist().index(True)
            raise DataError(f"{where}: row {row}: the column {column!r} is null: remove the row")
        flat = array.flatten()
        lengths = jsonl_parquet.arrow_library("pyarrow.compute").list_value_length(array)
        return TokenRows(
            lengths.to_numpy(zero_copy_only=False).astype(np.int64),
            # Numpy has no nulls: as 0 the tokens keep their dtype, and the nulls are refused by the mask.
            flat.fill_null(0).to_numpy(zero_copy_only=False),
            lambda row: f"{where}: row {first + row}",
            flat.is_null().to_numpy(zero_copy_only=False) if flat.null_count else None,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def last(self) -> Integers:
        """The last token of each row that has some."""
        return self.tokens[(np.cumsum(self.lengths) - 1)[self.lengths > 0]]

    def ended(self, end: int | None) -> TokenRows:
        """These rows, with the token `end` after each that has tokens and another last one."""
        if end is None:
            return self
        lacks = self.lengths > 0
        lacks[lacks] = self.last != end
        places = np.cumsum(self.lengths)[lacks]
        nulls = None if self.nulls is None else np.insert(self.nulls, places, False)
        tokens = np.insert(self.tokens.astype(np.int64), places, end)
        return replace(self, lengths=self.lengths + lacks, tokens=tokens, nulls=nulls)

    def require_below(self, vocab_size: int) -> None:
        """Raises DataError for the first token that is null, or not of the vocabulary."""
        bad = (self.tokens < 0) | (self.tokens >= vocab_size)
        if self.nulls is not None:
            bad |= self.nulls
        for at in np.flatnonzero(bad)[:1]:
            ends = np.cumsum(self.lengths)
            row = int(np.searchsorted(ends, at, side="right"))
            place = f"{self.place(row)}: token {at - (ends[row] - self.lengths[row])}"
            if self.nulls is not None and self.nulls[at]:
                raise DataError(f"{place} is null: a row must hold tokens alone")
            raise DataError(f"{place} {beyond_vocabulary(self.tokens[at], vocab_size)}")


def beyond_vocabulary(token: np.integer[Any], vocab_size: int) -> str:
    """The end of a message about a token of the data that is not of the vocabulary."""
    return (
        f"({token}) must be in 0 … {vocab_size - 1}: set model.vocab_size to that of the tokenizer that made the data"
    )


def token_column(file: Path, key: str) -> tuple[FileReading, str] | None:
    """The reading of a file whose first row has a list, not of texts, and its column: `key`, or `input_ids` for `text`.

    None if the file has no such rows; DataError if it cannot be read. A column `input_ids` counts whatever it holds.
    """
    reading = reading_of(file, None, key)
    names = [key, *([jsonl_parquet.TOKENS] if key == "text" else [])]
    if reading.kind == "parquet":
        kinds = jsonl_parquet.parquet_kinds(file, names)
        name = next(iter(kinds), key)
        return (reading, name) if name != key or re.match(_LISTS, kinds.get(name, "")) else None
    for number, line in _lines(file) if reading.kind == "jsonl" else ():
        record = jsonl_parquet.json_line(line, partial(jsonl_parquet.line_name, file, 0, number), key, orjson.loads)
        for name in names:
            with contextlib.suppress(KeyError):
                values = jsonl_parquet.nested_field(record, name)
                if values != []:  # which may be anything: the next line tells
                    is_row = isinstance(values, list) and {*map(type, values)}.isdisjoint((str, dict))
                    return (reading, name) if name != key or is_row else None
                break
        else:
            return None
    return None


def token_rows_of_file(file: Path, reading: FileReading, column: str) -> Iterator[TokenRows]:
    """The rows of token ids in a file, some at once; DataError with file and row where one is no row of numbers."""
    if reading.kind == "parquet":
        require = partial(_require_tokens, file, column)
        for first, batch in jsonl_parquet.parquet_batches(file, require):
            table = jsonl_parquet.arrow_library("pyarrow").Table.from_batches([batch])
            values = jsonl_parquet.with_nested_column(table, column).column(column).combine_chunks()
            yield TokenRows.of_arrow(values, str(file), first, column)
        return
    lines = _lines(file)
    while block := list(islice(lines, _LINES)):
        numbers = [number for number, _ in block]
        rows = [_line_tokens(file, number, line, column) for number, line in block]

        def place(row: int, numbers: Sequence[int] = numbers) -> str:
            return jsonl_parquet.line_name(file, 0, numbers[row])

        yield TokenRows(np.array([*map(len, rows)], dtype=np.int64), np.concatenate(rows), place)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    with open_unpacked(file) as content:
        yield from ((number, line) for number, line in enumerate(content, start=1) if line.strip())


def _line_tokens(file: Path, number: int, line: bytes, column: str) -> IntArray:
    where = partial(jsonl_parquet.line_name, file, 0, number)
    values = jsonl_parquet.record_field(
        jsonl_parquet.json_line(line, where, column, orjson.loads), where, column, "tokens"
    )
    if not isinstance(values, list):
        given = jsonl_parquet.json_type(values)
        raise DataError(f"{where()}: the field {column!r} must hold a list of whole numbers, not {given} {_FIX}")
    if not {*map(type, values)} <= {int}:
        at = next(at for at, value in enumerate(values) if type(value) is not int)
        raise DataError(
            f"{where()}: token {at} ({orjson.dumps(values[at]).decode()[:40]}) must be a whole number {_FIX}"
        )
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise DataError(f"{where()}: a token ({max(values, key=abs)}) must be an id, and has too many digits") from None


def _require_tokens(file: Path, column: str, schema: Any) -> list[str]:
    """The column, to read it; DataError if a table with this schema holds no tokens there."""
    kind = jsonl_parquet.column_kinds(schema, [column]).get(column)
    if kind != "tokens":
        cause = f"{file}: the column {column!r} holds {kind}" if kind else f"{file} has no column {column!r}"
        raise DataError(f"{cause}, and must hold lists of whole numbers {_FIX}{see('data#no-such-field')}")
    return [column]
