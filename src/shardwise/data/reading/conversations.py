"""Conversations in JSON lines: `{"messages": [{"role": "user", "content": "…"}, …]}`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.base.errors import DataError, listing
from shardwise.data.reading import text_files
from shardwise.data.reading.content import opened

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT)
Conversation = list[dict[str, str]]
"""Messages, each with its `role`, its `content` and other fields that are text."""
Chat = tuple[Callable[[], str], Conversation]
"""A conversation, after a function that gives its place for messages."""


def conversations(path: Path, key: str) -> Iterator[Chat]:
    """The conversations of a file, packed or not.

    Args:
        key: field that holds the messages.

    Raises:
        DataError: a line holds no conversation with an answer; names the line.
    """
    is_empty = True
    with opened(path) as content:
        for number, line in enumerate(content.stream, start=1):
            if line.strip():
                is_empty = False
                where = partial(text_files.line_name, path, 0, number)
                yield where, _conversation(line, where, key)
    if is_empty:
        raise DataError(f"{path} is empty: remove it or put one conversation on each line")


def _conversation(line: bytes, where: Callable[[], str], key: str) -> Conversation:
    record = text_files.line_record(line, where, key)
    values = text_files.record_field(record, where, key, "messages")
    if not isinstance(values, list) or not values:
        raise DataError(
            f"{where()}: the field {key!r} must hold a list of messages, each with a role and a content, and it holds "
            f"{'an empty list' if values == [] else type(values).__name__}: mend or remove the line"
        )
    messages = [_message(value, where, f"{key}.{number}") for number, value in enumerate(values)]
    if all(message["role"] != ASSISTANT for message in messages):
        raise DataError(
            f"{where()}: the field {key!r} must have a message of the role {ASSISTANT}, whose text is learned, and its "
            f"roles are {listing(dict.fromkeys(message['role'] for message in messages))}: remove the line"
        )
    return messages


def _message(value: Any, where: Callable[[], str], name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise DataError(f"{where()}: {name} must be an object with a role and a content, not {type(value).__name__}")
    role = value.get("role")
    if role not in ROLES:
        shown = "no role" if role is None else f"the role {role!r}"
        raise DataError(
            f"{where()}: {name} has {shown}, and it must be {listing(ROLES, 'or')}: mend or remove the line"
        )
    content = value.get("content")
    if not isinstance(content, str):
        kind = type(content).__name__
        raise DataError(f"{where()}: {name}.content must be text, not {kind}: mend or remove the line")
    message = {field: text for field, text in value.items() if isinstance(text, str)}
    for text in message.values():
        text_files.require_characters(text, where, name)
    return message
