"""Conversations in JSON lines, `{"messages": [{"role": "user", "content": "…"}, …]}`, or in such rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.base.errors import DataError, listing
from shardwise.data.reading import text_files
from shardwise.data.reading.content import first_line, opened, optional_library, readable
from shardwise.data.reading.dataset_tables import DataSet
from shardwise.data.reading.file_kinds import Kind

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT)
Conversation = list[dict[str, str]]
"""Messages, each with its `role`, its `content` and other fields that are text."""
Chat = tuple[Callable[[], str], Conversation]
"""A conversation, after a function that gives its place for messages."""
# Rows that are decoded at once.
_ROWS = 64


def conversations(path: Path, kind: Kind, key: str) -> Iterator[Chat]:
    """The conversations of a file, in its lines or rows; one may have no messages.

    Args:
        key: field or column that holds the messages.

    Raises:
        DataError: a line or row holds no conversation with an answer; names it.
    """
    if kind == "text":
        raise DataError(f"{path} is plain text, and conversations must be JSON lines or parquet: leave it out")
    located = _in_rows(path, key) if kind == "parquet" else _in_lines(path, key)
    is_empty = True
    for where, values in located:
        is_empty = False
        yield where, _conversation(values, where, key)
    if is_empty:
        raise DataError(f"{path} is empty: remove it or put conversations into it")


def conversations_of_table(dataset: DataSet) -> Iterator[Chat]:
    """The conversations of a data set's column, one split after another; one may have no messages.

    Raises:
        DataError: there is no such column, or a row holds no conversation with an answer; names it.
    """
    for split in dataset.splits:
        row = 0
        for array in dataset.arrays(split):
            for value in array:
                where = partial("{}: row {}".format, dataset.where(split), row)
                yield where, _conversation(value.as_py(), where, dataset.column)
                row += 1


def _in_lines(path: Path, key: str) -> Iterator[tuple[Callable[[], str], Any]]:
    with opened(path) as content:
        for number, line in enumerate(content.stream, start=1):
            if line.strip():
                where = partial(text_files.line_name, path, 0, number)
                record = text_files.line_record(line, where, key)
                yield where, text_files.record_field(record, where, key, "messages")


def _in_rows(path: Path, key: str) -> Iterator[tuple[Callable[[], str], Any]]:
    arrow = optional_library("pyarrow", "parquet files need", "parquet")
    parquet = optional_library("pyarrow.parquet", "parquet files need", "parquet")
    try:
        with readable(path), parquet.ParquetFile(path) as file:
            if key not in file.schema_arrow.names:
                columns = listing(file.schema_arrow.names)
                raise DataError(
                    f"{path} has no column {key!r}: set data.text_key to the column that holds the messages ({columns})"
                )
            row = 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=[key]):
                for value in batch.column(0):
                    yield partial("{}: row {}".format, path, row), value.as_py()
                    row += 1
    except arrow.ArrowException as error:
        raise DataError(f"{path} is damaged ({first_line(error)}): fetch or copy it again") from None


def _conversation(values: Any, where: Callable[[], str], key: str) -> Conversation:
    if not isinstance(values, list):
        raise DataError(
            f"{where()}: the field {key!r} must hold a list of messages, each with a role and a content, and it holds "
            f"{type(values).__name__}: mend or remove it"
        )
    if not values:
        return []
    messages = [_message(value, where, f"{key}.{number}") for number, value in enumerate(values)]
    if all(message["role"] != ASSISTANT for message in messages):
        raise DataError(
            f"{where()}: the field {key!r} must have a message of the role {ASSISTANT}, whose text is learned, and its "
            f"roles are {listing(dict.fromkeys(message['role'] for message in messages))}: remove it"
        )
    return messages


def _message(value: Any, where: Callable[[], str], name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise DataError(f"{where()}: {name} must be an object with a role and a content, not {type(value).__name__}")
    role = value.get("role")
    if role not in ROLES:
        shown = "no role" if role is None else f"the role {role!r}"
        raise DataError(f"{where()}: {name} has {shown}, and it must be {listing(ROLES, 'or')}: mend or remove it")
    content = value.get("content")
    if not isinstance(content, str):
        shown = type(content).__name__
        raise DataError(f"{where()}: {name}.content must be text, not {shown}: mend or remove it")
    message = {field: text for field, text in value.items() if isinstance(text, str)}
    for text in message.values():
        text_files.require_characters(text, where, name)
    return message
