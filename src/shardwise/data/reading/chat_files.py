"""Conversations in JSON lines, `{"messages": [{"role": "user", "content": "…"}, …]}`, or in such rows of a table.

Rows of ShareGPT (`conversations`, of messages with `from` and `value`) are read too, and rows with `prompt` and
`completion`, of which the completion alone is learned.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from shardwise.base.errors import DataError, listing
from shardwise.base.yaml_and_json import json_value
from shardwise.data.reading import jsonl_parquet
from shardwise.data.reading.content import Kind, open_unpacked
from shardwise.data.reading.dataset_tables import DataSet

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
_CALLING = "function_call"  # the role of a message of ShareGPT whose text is the JSON of a tool's call, or of several
_SHAREGPT = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, _CALLING: ASSISTANT, "observation": "tool"}
"""The roles of ShareGPT's messages, `{"from": "human", "value": "…"}`, where they have other names."""
_OTHER_FIELDS = (("conversations",), ("prompt", "completion"))
"""The fields that hold the messages in rows without `messages`."""
_VARIABLES = ("tools", "documents")
_ARGUMENTS = "chat_template_kwargs"
_RESERVED = ("messages", "add_generation_prompt", "continue_final_message")
Message = Mapping[str, Any]
"""A message: its `role`, its `content`, and other fields that the chat template may read."""


@dataclass(frozen=True)
class Conversation:
    """A conversation in a row of a file of chats.

    Attributes:
        variables: what the chat template reads beside the messages: `tools`, `documents`, `chat_template_kwargs`.
        not_learned: numbers of the assistant's messages that are no targets: of weight 0, or in a prompt.
        unread: names of the row's other fields.
    """

    messages: Sequence[Message]
    variables: Mapping[str, Any] = field(default_factory=dict)
    not_learned: frozenset[int] = frozenset()
    unread: frozenset[str] = frozenset()

    @cached_property
    def texts(self) -> list[str]:
        """The text of each message."""
        return [message_text(message) for message in self.messages]


Chat = tuple[Callable[[], str], Conversation]
"""A conversation, after a function that gives its place for messages."""


def message_text(message: Message) -> str:
    """The text of a message, whose content may be a list of parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def conversations_of_file(path: Path, kind: Kind, key: str) -> Iterator[Chat]:
    """The conversations of a file, in the field or column `key`; DataError names a line or row that holds none."""
    if kind == "text":
        raise DataError(f"{path} is plain text, and conversations must be JSON lines or parquet: leave it out")
    located = _in_rows(path, key) if kind == "parquet" else _in_lines(path, key)
    for where, values in located:
        yield where, _conversation(values, where, key)


def conversations_of_table(dataset: DataSet) -> Iterator[Chat]:
    """The conversations of a data set's column, split by split; DataError for a row that holds none with an answer."""
    for split in dataset.splits:
        names = dataset.column_names(split)
        columns = _columns(names, dataset.data.text_key, dataset.shown)
        unread = dict.fromkeys({*names} - {*columns})
        for row, record in enumerate(dataset.records(split, columns)):
            where = partial("{}: row {}".format, dataset.where(split), row)
            yield where, _conversation(unread | record, where, dataset.data.text_key)


def _in_lines(path: Path, key: str) -> Iterator[tuple[Callable[[], str], Any]]:
    with open_unpacked(path) as content:
        for number, line in enumerate(content, start=1):
            if line.strip():
                where = partial(jsonl_parquet.line_name, path, 0, number)
                yield where, jsonl_parquet.json_line(line, where, key, json_value)


def _in_rows(path: Path, key: str) -> Iterator[tuple[Callable[[], str], Any]]:
    names: list[str] = []

    def columns(schema: Any) -> list[str]:
        names.extend(schema.names)
        return _columns(names, key, str(path))

    for first, batch in jsonl_parquet.parquet_batches(path, columns):
        unread = dict.fromkeys({*names} - {*batch.schema.names})
        for row, record in enumerate(jsonl_parquet.batch_records(batch), start=first):
            yield partial("{}: row {}".format, path, row), unread | record


def _columns(names: Collection[str], key: str, shown: str) -> list[str]:
    fields = _fields(names, key)
    if not set(fields) <= set(names):
        raise DataError(
            f"{shown} has no column {key!r}: set data.text_key to the column that holds the messages ({listing(names)})"
        )
    return [*fields, *(name for name in (*_VARIABLES, _ARGUMENTS) if name in names)]


def _fields(names: Collection[str], key: str) -> tuple[str, ...]:
    alternatives = _OTHER_FIELDS if key == "messages" and key not in names else ()
    return next((fields for fields in alternatives if set(fields) <= set(names)), (key,))


def _conversation(record: dict[str, Any], where: Callable[[], str], key: str) -> Conversation:
    fields = _fields(record, key)
    parts = [jsonl_parquet.record_field(record, where, name, "messages") for name in fields]
    if len(parts) > 1:  # a prompt and its completion, as messages or as text
        roles = ("user", ASSISTANT)
        parts = [
            [{"role": role, "content": part}] if isinstance(part, str) else part
            for role, part in zip(roles, parts, strict=True)
        ]
    messages = [message for name, part in zip(fields, parts, strict=True) for message in _messages(part, where, name)]
    if not messages:
        return Conversation(messages)
    in_prompt = len(parts[0]) if len(parts) > 1 else 0
    answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    not_learned = frozenset(n for n in answers if n < in_prompt or messages[n].get("weight", 1) == 0)
    if len(not_learned) == len(answers):
        roles_text = listing(dict.fromkeys(message["role"] for message in messages))
        has = "all of them have the weight 0, or are in the prompt" if answers else f"its roles are {roles_text}"
        raise DataError(
            f"{where()}: the field {fields[-1]!r} must have a message of the role {ASSISTANT}, whose text is learned, "
            f"and {has}: remove it"
        )
    known = {*(name.partition(".")[0] for name in fields), *fields, *_VARIABLES, _ARGUMENTS}
    unread = frozenset(name for name in record if name not in known)
    return Conversation(messages, _variables(record, where), not_learned, unread)


def _variables(record: Mapping[str, Any], where: Callable[[], str]) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    for name in (*_VARIABLES, _ARGUMENTS):
        value: Any = record.get(name)
        if isinstance(value, str) and value:
            with contextlib.suppress(ValueError):
                value = json_value(value)
        if value in (None, ""):
            continue
        is_list = isinstance(value, list) and all(isinstance(inner, dict) for inner in value)
        if not (isinstance(value, dict) if name == _ARGUMENTS else is_list):
            kind = "an object" if name == _ARGUMENTS else "a list of objects"
            raise DataError(f"{where()}: the field {name!r} must hold {kind}, or its JSON as text: mend or remove it")
        _require_json(value, where, name)
        variables |= value if name == _ARGUMENTS else {name: value}
    if names := [name for name in _RESERVED if name in variables]:
        raise DataError(f"{where()}: {_ARGUMENTS} must be without {listing(names)}, which training sets: remove it")
    return variables


def _messages(values: Any, where: Callable[[], str], key: str) -> list[Message]:
    if not isinstance(values, list):
        raise DataError(
            f"{where()}: the field {key!r} must hold a list of messages, each with a role and a content, and it holds "
            f"{jsonl_parquet.json_type(values)}: mend or remove it"
        )
    return [_message(value, where, f"{key}.{number}") for number, value in enumerate(values)]


def _message(value: Any, where: Callable[[], str], name: str) -> Message:
    if not isinstance(value, dict):
        raise DataError(
            f"{where()}: {name} must be an object with a role and a content, not {jsonl_parquet.json_type(value)}"
        )
    if "role" not in value and "from" in value:
        fields = {field: inner for field, inner in value.items() if field not in ("from", "value")}
        sender, content = str(value["from"]), value.get("value")
        if sender == _CALLING:
            content, fields["tool_calls"] = None, _calls(content, where, name)
        value = {"role": _SHAREGPT.get(sender, sender), "content": content, **fields}
    role = value.get("role")
    content = value.get("content")
    if role not in ROLES:
        shown = "no role" if role is None else f"the role {role!r}"
        raise DataError(f"{where()}: {name} has {shown}, and it must be {listing(ROLES, 'or')}: mend or remove it")
    # A message that calls tools may have no content.
    if not (_is_text(content) or (content is None and value.get("tool_calls"))):
        raise DataError(
            f'{where()}: {name}.content must be text, or a list of parts such as {{"type": "text", "text": "…"}}, and '
            f"it is {jsonl_parquet.json_type(content)}{' of others' * isinstance(content, list)}: mend or remove it"
        )
    if value.get("weight") not in (None, 0, 1):
        raise DataError(f"{where()}: {name}.weight ({value['weight']!r}) must be 0 or 1: mend it")
    _require_json(value, where, name)
    return {field: inner for field, inner in value.items() if inner is not None}


def _calls(text: Any, where: Callable[[], str], name: str) -> list[dict[str, Any]]:
    """The `tool_calls` of a message whose text is the JSON of a call, `{"name": …, "arguments": …}`, or of several."""
    calls: Any = None
    with contextlib.suppress(ValueError, TypeError):
        calls = json_value(text)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        raise DataError(
            f"{where()}: {name}.value must be the JSON of a tool's call, "
            f'{{"name": "…", "arguments": {{…}}}}, or of a list of calls, as its role is {_CALLING}: mend or remove it'
        )
    return [{"type": "function", "function": call} for call in calls]


def _is_text(content: Any) -> bool:
    if not isinstance(content, list):
        return isinstance(content, str)
    return all(
        isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


def _require_json(value: Any, where: Callable[[], str], name: str) -> None:
    """Raises DataError for what JSON cannot spell, which a table may hold, and for half a character."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise DataError(f"{where()}: {name} must hold text, numbers, lists and objects ({error}): mend it") from None
    jsonl_parquet.require_characters(text, where, name)
