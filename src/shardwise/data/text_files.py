"""Files of text: plain text, `.jsonl` and `.parquet`; the first two also packed by gzip."""

from __future__ import annotations

import codecs
import gzip
import importlib
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from shardwise.errors import DataError, listing

Kind = Literal["text", "jsonl", "parquet"]

BLOCK = 1 << 18
"""Characters, and bytes of a plain text, that are read at once."""
# Decoded at once, so that long texts take little memory too.
_ROWS = 64
_PAGE_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"


def kind_of(path: Path) -> Kind:
    """What the file's name says that it holds."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".jsonl"):
        return "jsonl"
    return "parquet" if path.suffix == ".parquet" else "text"


def documents(path: Path, kind: Kind, key: str) -> Iterator[Iterable[str]]:
    """Each document of a file, as blocks of its text: the whole file, a line's field `key`, or a row's column `key`.

    The blocks of a document are read before the next document. Memory is bounded by the longest line, and by a page
    of a parquet file.

    Raises:
        DataError: naming file and line, row or byte.
    """
    if kind == "parquet":
        yield from _rows(path, key)
    elif kind == "jsonl":
        yield from _lines(path, key)
    else:
        yield _decoded(path)


def slices(text: str) -> Iterator[str]:
    """`text` in blocks."""
    for start in range(0, len(text), BLOCK):
        yield text[start : start + BLOCK]


def unreadable(path: Path, error: OSError) -> DataError:
    """What the user reads where the system refuses a file."""
    return DataError(f"{path} cannot be read: {error.strerror or error}")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """The file, unpacked as it is read where its name ends in .gz."""
    try:
        with path.open("rb") as file:
            if path.suffix != ".gz":
                yield file
                return
            if file.read(len(_GZIP)) not in (b"", _GZIP):
                raise DataError(f"{path} is not packed by gzip, as its name says: pack it, or rename it")
            file.seek(0)
            try:
                with gzip.GzipFile(fileobj=file, mode="rb") as unpacked:
                    yield unpacked
            except EOFError:
                raise DataError(
                    f"{path} is cut off: its {file.tell():,} bytes end before what gzip packed does; fetch or copy it "
                    "again"
                ) from None
            except (gzip.BadGzipFile, zlib.error) as error:
                raise DataError(
                    f"{path} is damaged before byte {file.tell():,}, gzip cannot unpack it ({error}): fetch or copy it "
                    "again"
                ) from None
    except OSError as error:
        raise unreadable(path, error) from None


def _decoded(path: Path) -> Iterator[str]:
    """The file's text, without a byte-order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    empty = True
    with _opened(path) as file:
        while True:
            block = file.read(BLOCK)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                at = offset + len(block) - len(error.object) + error.start
                raise _not_utf8(f"{path}: byte {at}", error.object[error.start]) from None
            text = text.removeprefix("\ufeff") if offset == 0 else text
            offset += len(block)
            if text:
                empty = False
                yield text
            if not block:
                break
    if empty:
        raise DataError(f"{path} is empty: remove it or put text into it")


def _lines(path: Path, key: str) -> Iterator[Iterable[str]]:
    empty = True
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                empty = False
                yield slices(_line_text(line, f"{path}: line {number}", key))
    if empty:
        raise DataError(f"{path} is empty: remove it or put one JSON object on each line")


def _line_text(line: bytes, where: str, key: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{where}, byte {error.start}", line[error.start]) from None
    except ValueError as error:
        raise DataError(
            f'{where} is not JSON ({error}): a .jsonl holds one object such as {{"{key}": "…"}} on each line; '
            "for plain text set data.format=text"
        ) from None
    if not isinstance(record, dict):
        raise DataError(f'{where} is JSON but not an object: each line must read like {{"{key}": "…"}}')
    if key not in record:
        fields = ", ".join(sorted(record)) or "no fields"
        raise DataError(f"{where} has no field {key!r}: set data.text_key to the field that holds the text ({fields})")
    text = record[key]
    if not isinstance(text, str):
        raise DataError(f"{where}: the field {key!r} must hold text, not {type(text).__name__} (data.text_key)")
    if not text:
        raise DataError(f"{where}: the field {key!r} is empty: remove the line")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: the field {key!r} has half a surrogate pair (\\ud800 to \\udfff): fix it") from None
    return text


def _rows(path: Path, key: str) -> Iterator[Iterable[str]]:
    arrow, parquet = _arrow("pyarrow"), _arrow("pyarrow.parquet")
    try:
        with path.open("rb") as opened, _parquet_file(arrow, parquet, path, opened) as file:
            _require_text(arrow, path, file.schema_arrow, key)
            number = 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=[key]):
                for value in batch.column(0):
                    yield slices(row_text(value, f"{path}: row {number}", key))
                    number += 1
    except arrow.ArrowException as error:
        raise _damaged(path, error) from None
    except OSError as error:  # pyarrow's own have neither number nor file
        raise (unreadable(path, error) if error.errno else _damaged(path, error)) from None
    if not number:
        raise DataError(f"{path} is empty: remove it or put rows into it")


def _parquet_file(arrow: Any, parquet: Any, path: Path, opened: IO[bytes]) -> Any:
    try:
        return parquet.ParquetFile(opened, buffer_size=_PAGE_BYTES, pre_buffer=False)
    except arrow.ArrowInvalid as error:
        raise DataError(
            f"{path} must be a parquet file, and it is none or is cut off ({_first_sentence(error)}): leave it out, or "
            "fetch or copy it again"
        ) from None


def _require_text(arrow: Any, path: Path, schema: Any, key: str) -> None:
    if schema.names.count(key) != 1:
        raise DataError(
            f"{path} has no column {key!r}: set data.text_key to the column that holds the text "
            f"({listing(schema.names) or 'there is none'})"
        )
    held, types = schema.field(key).type, arrow.types
    if types.is_dictionary(held):
        held = held.value_type
    if not (types.is_string(held) or types.is_large_string(held) or types.is_string_view(held)):
        raise DataError(f"{path}: the column {key!r} must hold text, not {held} (data.text_key)")


def row_text(value: Any, where: str, key: str, *, empty: bool = False) -> str:
    """The text of an arrow scalar, the value of column `key`; `empty`: it may have none.

    Raises:
        DataError: it is null, empty or not UTF-8.
    """
    try:
        text: str | None = value.as_py()
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{where}, byte {error.start} of the column {key!r}", error.object[error.start]) from None
    if text is None or not (text or empty):
        raise DataError(f"{where}: the column {key!r} is {'null' if text is None else 'empty'}: remove the row")
    return text


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is damaged ({_first_sentence(error)}): fetch or copy it again")


def _first_sentence(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0].rstrip(".")


def _arrow(module: str) -> Any:
    """pyarrow, which is imported where it is needed and nowhere else."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"parquet files need pyarrow ({error}): pip install 'shardwise[parquet]'") from None


def _not_utf8(where: str, byte: int) -> DataError:
    return DataError(
        f"{where} (0x{byte:02x}) is not UTF-8: convert the file, for example with iconv -f LATIN1 -t UTF-8, "
        "or leave it out"
    )
