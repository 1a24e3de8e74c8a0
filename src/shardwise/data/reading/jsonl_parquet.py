"""Documents of files of text: plain text, JSON lines and parquet; the first two also packed."""

from __future__ import annotations

import codecs
import contextlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardwise.base.errors import DataError, first_line, listing, see
from shardwise.base.registered import optional_library
from shardwise.base.yaml_and_json import json_value
from shardwise.data.reading.content import BLOCK, HubFile, Kind, open_unpacked, read_errors, reading_of

# Rows that are decoded at once, so that long texts take little memory too.
_ROWS = 64
_PAGE_BYTES = 1 << 20
# Numbers are no text, and Python refuses to read those of more than 4,300 digits.
_DECODER = json.JSONDecoder(parse_int=lambda _digits: 0)
TOKENS = "input_ids"
"""The field or column of token ids in tables that other programs tokenized."""


def documents_of_file(
    file: Path | HubFile, kind: Kind | None, key: str, start: int = 0, *, longest: int | None = None
) -> Iterator[tuple[int, Iterable[str]]]:
    """The documents of a data file, as blocks of their text, with the place of the next document.

    A document is the whole file, a line's field `key`, or a row's column `key`. It begins at 0, at a byte (of the
    unpacked content) or at a row. Its blocks must be read before the next document. Memory is bounded by the longest
    line, and by a page of a parquet file. An empty file has no documents, or one without text.

    Args:
        kind: kind of the file; None: its content decides.
        start: place of the first document. A packed file is still unpacked from its beginning; a parquet file is read
            from the row group that holds the row.
        longest: number of characters at which a plain text is cut into several documents, each of which begins at a
            byte; None: a plain text is one document.

    Raises:
        DataError: a document cannot be read; names file and line, row or byte.
    """
    if kind is None:
        kind = reading_of(file, None, key).kind
    if kind == "parquet":
        yield from _rows(file, key, start)
    elif kind == "jsonl":
        yield from _lines(file, key, start)
    elif longest is not None:
        yield from _parts(file, start, longest)
    elif start == 0:
        yield 1, (text for _, text in _decoded(file))


def _parts(path: Path | HubFile, start: int, longest: int) -> Iterator[tuple[int, list[str]]]:
    """A plain text in documents of about `longest` characters, each with the byte after it."""
    blocks: list[str] = []
    characters = 0
    stop = start
    for stop, text in _decoded(path, start):
        blocks.append(text)
        characters += len(text)
        if characters >= longest:
            yield stop, blocks
            blocks = []
            characters = 0
    if blocks:
        yield stop, blocks


def _decoded(path: Path | HubFile, start: int = 0) -> Iterator[tuple[int, str]]:
    """The file's text from byte `start` on, without a byte-order mark: blocks, each with the byte after it."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = start
    with open_unpacked(path, start) as content:
        while True:
            block = content.read(BLOCK)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                at = offset + len(block) - len(error.object) + error.start
                raise _not_utf8(f"{path}: byte {at}", error) from None
            if offset == 0:
                text = text.removeprefix("\ufeff")
            offset += len(block)
            if text:
                # The decoder keeps the bytes of a character that the block cuts: they belong to the next text.
                yield offset - len(decoder.getstate()[0]), text
            if not block:
                break


def _lines(path: Path | HubFile, key: str, start: int) -> Iterator[tuple[int, Iterable[str]]]:
    stop = start
    with open_unpacked(path, start) as content:
        for number, line in enumerate(content, start=1):
            stop += len(line)
            if line.strip():
                yield stop, [_line_text(path, line, partial(line_name, path, start, number), key)]


def line_name(path: Path | HubFile, start: int, number: int) -> str:
    """The data file and the number of a line, for messages: `number` lines after byte `start`.

    Only a message needs it, so the lines before `start` are counted here and not while reading.
    """
    before = 0
    with open_unpacked(path) as content:
        while start > 0 and (block := content.read(min(start, BLOCK))):
            before += block.count(b"\n")
            start -= len(block)
    return f"{path}: line {before + number}"


def _holds_tokens(path: Path | HubFile, key: str) -> DataError:
    if isinstance(path, HubFile) or path.suffix == ".arrow":
        way = "set data.streaming=false, and they are read as tokens"
    else:
        way = f"set data.format=tokens, and data.text_key={key}, and all files are read as tokens"
    return DataError(f"{path} holds token ids in {key!r}, not text: {way}")


def _line_text(path: Path | HubFile, line: bytes, where: Callable[[], str], key: str) -> str:
    record = json_line(line, where, key, _DECODER.decode)
    ids = key if key in record else TOKENS
    if isinstance(values := record.get(ids), list) and values and {*map(type, values)} == {int}:
        raise _holds_tokens(path, ids)
    text = record_field(record, where, key, "text")
    if not isinstance(text, str):
        raise DataError(
            f"{where()}: the field {key!r} must hold text, not {json_type(text)} (data.text_key){_chat_hint(record)}"
        )
    require_characters(text, where, key)
    return text


def json_line(line: bytes, where: Callable[[], str], key: str, read: Callable[[str], Any]) -> dict[str, Any]:
    """The JSON object in a line, for which messages give the field `key` as an example; DataError if it holds none."""
    try:
        record = read(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{where()}, byte {error.start}", error) from None
    except (ValueError, RecursionError) as error:  # no JSON, or with too many levels
        raise DataError(
            f"{where()} is not JSON that can be read ({first_line(error)}): a .jsonl holds one object such as "
            f'{{"{key}": "…"}} on each line; for plain text set data.format=text'
        ) from None
    if not isinstance(record, dict):
        raise DataError(f'{where()} is JSON but not an object: each line must read like {{"{key}": "…"}}')
    return record


def json_type(value: Any) -> str:
    """The name of the type of a value in a row of JSON lines, for messages; `null` as JSON spells it."""
    return "null" if value is None else type(value).__name__


def record_field(record: Mapping[str, Any], where: Callable[[], str], key: str, content: str) -> Any:
    """The value of a JSON line's field, which holds `content`, or of one in another (`meta.body`); DataError: none."""
    try:
        return nested_field(record, key)
    except KeyError:
        names = [
            f"{name}.{inner}" if inner else name
            for name, value in record.items()
            for inner in (isinstance(value, dict) and value) or [""]
        ]
        hint = _chat_hint(record) if content == "text" else ""
        raise DataError(
            f"{where()} has no field {key!r}: set data.text_key to the field that holds the {content} "
            f"({', '.join(sorted(names)) or 'no fields'}){hint}{see('data#no-such-field')}"
        ) from None


def nested_field(record: Mapping[str, Any], key: str) -> Any:
    """The value of a field of a JSON line, see `record_field`; KeyError if there is none."""
    if key in record:
        return record[key]
    for dot, letter in enumerate(key):
        inner = record.get(key[:dot]) if letter == "." else None
        if isinstance(inner, dict):
            with contextlib.suppress(KeyError):
                return nested_field(inner, key[dot + 1 :])
    raise KeyError(key)


def _chat_hint(record: Mapping[str, Any]) -> str:
    is_chat = isinstance(record.get("messages"), list)
    return "; data.format=chat reads the conversation in 'messages'" if is_chat else ""


def require_characters(text: str, where: Callable[[], str], key: str) -> None:
    """Raises DataError for a data file's text with half a character, which JSON can spell, and which has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{where()}: the field {key!r} has half a surrogate pair (\\ud800 to \\udfff): fix it"
        ) from None


def _rows(path: Path | HubFile, key: str, start: int) -> Iterator[tuple[int, Iterable[str]]]:
    arrow = arrow_library("pyarrow")

    def columns(schema: Any) -> list[str]:
        require_text_column(path, schema, key)
        return [key]

    for row, batch in parquet_batches(path, columns, start):
        skipped = min(max(start - row, 0), len(batch))
        values = with_nested_column(arrow.Table.from_batches([batch]), key).column(key).slice(skipped)
        for number, value in enumerate(values, start=row + skipped):
            yield number + 1, [arrow_text(value, f"{path}: row {number}", key)]


def parquet_batches(
    path: Path | HubFile, columns: Callable[[Any], list[str]], start: int = 0
) -> Iterator[tuple[int, Any]]:
    """Arrow batches of the rows of a parquet file, each after the number of its first row.

    Args:
        columns: function that returns the columns that are read of a table with a schema.
        start: first row that is needed: the row groups before it are not read.
    """
    parquet = arrow_library("pyarrow.parquet")
    with _sound_parquet(path), path.open("rb") as opened:
        file = parquet.ParquetFile(opened, buffer_size=_PAGE_BYTES, pre_buffer=False)
        read = columns(file.schema_arrow)
        sizes = (file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
        begins = list(accumulate(sizes, initial=0))
        first = bisect_right(begins, start) - 1
        row = begins[first]
        groups = list(range(first, file.num_row_groups))
        for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=read):
            yield row, batch
            row += len(batch)


@contextlib.contextmanager
def _sound_parquet(path: Path | HubFile) -> Iterator[None]:
    arrow = arrow_library("pyarrow")
    with read_errors(path):
        try:
            yield
        except (arrow.ArrowException, OSError) as error:
            # An error of the system has a number; those of pyarrow have none.
            if isinstance(error, OSError) and error.errno:
                raise
            raise DataError(
                f"{path} must be a parquet file, and it is none, cut off or damaged ({_first_sentence(error)}): leave "
                f"it out, or fetch or copy it again{see('data#file-cut-off')}"
            ) from None


def parquet_kinds(path: Path, names: Sequence[str]) -> dict[str, str]:
    """The kinds of those of these columns that a parquet file has."""
    parquet = arrow_library("pyarrow.parquet")
    with _sound_parquet(path), path.open("rb") as opened:
        return column_kinds(parquet.ParquetFile(opened).schema_arrow, names)


def column_kinds(schema: Any, names: Sequence[str]) -> dict[str, str]:
    """The kinds of those of these columns that tables with an arrow schema have, also within another column.

    A name that two columns have is none.
    """
    # `empty_table` of pyarrow 26 refuses lists of JSON.
    table = arrow_library("pyarrow").Table.from_batches([], schema)
    fields = {name: with_nested_column(table, name).schema for name in names}
    return {name: column_kind(of.field(name).type) for name, of in fields.items() if of.get_field_index(name) >= 0}


def require_text_column(path: Path | HubFile, schema: Any, key: str) -> None:
    """Raises DataError if a table of arrow with this schema has no column of text `key`, also within another column."""
    kinds = column_kinds(schema, (key, TOKENS))
    if kinds.get(name := key if key in kinds else TOKENS) == "tokens":
        raise _holds_tokens(path, name)
    if key not in kinds:
        raise DataError(
            f"{path} has no column {key!r}: set data.text_key to the column that holds the text "
            f"({listing(schema.names) or 'there is none'}){see('data#no-such-field')}"
        )
    if kinds[key] != "text":
        raise DataError(f"{path}: the column {key!r} must hold text, not {kinds[key]} (data.text_key)")


def column_kind(type_: Any) -> str:
    """The content of columns of an arrow type: "text", "tokens" for lists of integers, or the type's name."""
    types = arrow_library("pyarrow").types
    if types.is_dictionary(type_):
        type_ = type_.value_type
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        return "text"
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    is_list = any(is_kind(type_) for is_kind in lists)
    return "tokens" if is_list and types.is_integer(type_.value_type) else str(type_)


def with_nested_column(table: Any, key: str) -> Any:
    """An arrow table in which a field of another column, such as `meta.body`, is a column of that name."""
    for _ in range(key.count(".")):
        if key in table.schema.names:
            break
        table = table.flatten()
    return table


_MESSAGE_TEXTS = ("content", "value", "prompt", "completion", "reasoning_content")
"""Fields of conversations that hold a text, or a list of parts."""


def batch_records(batch: Any) -> list[dict[str, Any]]:
    """The rows of an arrow batch, without fields that are null, which a table has for each field of other rows.

    JSON, as which the library `datasets` stores values of several types, is read. It stores a text that is itself JSON
    as it is, so that a message `42` stays a text; one in quotes cannot be told from a stored text, and loses them.
    """
    fields = arrow_library("pyarrow").struct([*batch.schema])
    return [_plain(row, fields) for row in batch.to_pylist()]


def _plain(value: Any, type_: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        fields = {field.name: field.type for field in getattr(type_, "storage_type", type_)}
        return {name: _plain(inner, fields[name], name) for name, inner in value.items() if inner is not None}
    if isinstance(value, list) and hasattr(type_, "value_type"):
        return [_plain(inner, type_.value_type) for inner in value]
    if isinstance(value, str) and isinstance(type_, arrow_library("pyarrow").JsonType):
        with contextlib.suppress(ValueError):
            read = json_value(value)
            has_parts = isinstance(read, list) and read and all(isinstance(part, dict) for part in read)
            return read if name not in _MESSAGE_TEXTS or isinstance(read, str) or has_parts else value
    return value


def require_sound_array(array: Any, where: str, key: str) -> None:
    """Raises DataError if values of a mapped arrow array lie beyond it, as reading them would end the process."""
    arrow = arrow_library("pyarrow")
    # As text, the values would be checked for UTF-8 too: `arrow_text` does that, and names the row.
    binary = {arrow.string(): arrow.binary(), arrow.large_string(): arrow.large_binary()}
    try:
        if array.type in binary:
            array = array.view(binary[array.type])
        array.validate(full=True)
    except arrow.ArrowInvalid as error:
        raise DataError(
            f"{where}: the column {key!r} is damaged ({_first_sentence(error)}): copy or save the data set again"
        ) from None


def arrow_text(value: Any, where: str, key: str) -> str:
    """The text of an arrow scalar of column `key`; DataError if it is null or not UTF-8."""
    try:
        text: str | None = value.as_py()
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{where}, byte {error.start} of the column {key!r}", error) from None
    if text is None:
        raise DataError(f"{where}: the column {key!r} is null: remove the row")
    return text


def _first_sentence(error: Exception) -> str:
    return first_line(error).partition(". ")[0]


def arrow_library(module: str) -> Any:
    """A module of pyarrow, which parquet files need; DataError if it is not installed."""
    return optional_library(module, "parquet files need", "parquet")


def _not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"{where} (0x{error.object[error.start]:02x}) is not UTF-8, and must be UTF-8: convert the file from the "
        "encoding that it has, for example with `iconv -f LATIN1 -t UTF-8`, or leave it out"
    )
