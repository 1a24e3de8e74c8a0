"""Chat templates: a conversation becomes text, and the places of the assistant's answers in it.

A template is jinja2 code beside the tokenizer. It runs as in `apply_chat_template` of transformers: in a sandbox, with
the special tokens as variables, and with the same functions and filters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import numpy as np
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from shardwise.base.errors import DataError
from shardwise.base.user_code import RAISED
from shardwise.data.reading.conversations import ASSISTANT
from shardwise.data.samples.order import IntArray
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.data.tokens.tokenizer_files import (
    BEGIN_MESSAGE,
    CHAT_TEMPLATE,
    CONFIG,
    END_MESSAGE,
    ROLES,
    TokenizerFiles,
    read_object,
)

BUILT_IN = "shardwise (built in)"
"""The name of a built-in template, in place of that of its file."""
Message = Mapping[str, Any]
"""A message has at least a `role` and a `content`."""

# Unicode has these two for use within a program: they stand for the bounds of an answer until the text is complete.
_BEGIN = "\ufdd0"
_END = "\ufdd1"
_ANSWER = re.compile(f"[{_BEGIN}{_END}]")
_PROBE = "An answer."
# {0}: text before the role, {1}: text between role and content, {2}: text that ends a message.
_BUILT_IN = (
    "{{% for message in messages %}}{{{{ {0} + message['role'] + {1} }}}}"
    "{{% if message['role'] == 'assistant' %}}{{% generation %}}{{{{ message['content'] + {2} }}}}{{% endgeneration %}}"
    "{{% else %}}{{{{ message['content'] + {2} }}}}{{% endif %}}{{{{ '\\n' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ {0} + 'assistant' + {1} }}}}{{% endif %}}"
)


def add_template(folder: Path, name: str) -> ChatTemplate:
    """The template of the tokenizer in `folder`, which gets a built-in one if it has none, for transformers too.

    Args:
        name: the tokenizer's name, for messages.

    Raises:
        DataError: as `ChatTemplate.or_built_in`.
    """
    template = ChatTemplate.or_built_in(folder, name)
    if template.name == BUILT_IN:
        (folder / CHAT_TEMPLATE).write_text(template.source, encoding="utf-8")
    return template


def built_in_template(tokenizer: Tokenizer) -> str | None:
    """A template for a tokenizer that has none; None if it has no token that could end a message.

    It is ChatML where the vocabulary has its marks. Else a message begins with its role as ordinary text, `<|user|>`,
    and ends with the token that ends a document, so that every tokenizer of a pretrained model can have it.
    """
    if tokenizer.token_id(BEGIN_MESSAGE) is not None and tokenizer.token_id(END_MESSAGE) is not None:
        parts = (BEGIN_MESSAGE, "\n", END_MESSAGE)
    elif tokenizer.end_of_document_id is not None and tokenizer.end_of_document is not None:
        parts = ("<|", "|>\n", tokenizer.end_of_document)
    else:
        return None
    return _BUILT_IN.format(*(json.dumps(part, ensure_ascii=False) for part in parts))


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text.

    Attributes:
        answers: first and next character of each part that the assistant wrote, with the token that ends it.
        left_out: number of answers that are not among these, as the template rewrites them once messages follow.
    """

    text: str
    answers: Sequence[tuple[int, int]]
    left_out: int = 0


class EncodedChat(NamedTuple):
    """The tokens of a conversation.

    Attributes:
        answers: first and next token of each answer, [answers, 2].
        left_out: as of `RenderedChat`.
    """

    ids: IntArray
    answers: IntArray
    left_out: int


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer.

    Attributes:
        source: its jinja2 code.
        name: the file that holds it, for messages.
        code: the template, ready to run.
        tokenizer: tokenizer that it was made for.
        variables: special tokens by their roles, such as `bos_token`.
    """

    source: str
    name: str
    code: jinja2.Template
    tokenizer: Tokenizer
    variables: Mapping[str, str]

    @classmethod
    def of(cls, tokenizer_folder: Path) -> ChatTemplate | None:
        """The template of the tokenizer in a folder; None if it has none.

        Raises:
            DataError: a file of the tokenizer is missing or broken, or the template is no jinja2.
        """
        files = TokenizerFiles.find(tokenizer_folder)
        template = read_template(files)
        if template is None:
            return None
        return cls._made(*template, Tokenizer.load(tokenizer_folder), files)

    @classmethod
    def or_built_in(cls, path: Path, name: str) -> ChatTemplate:
        """The template of a tokenizer, else the one that is built in.

        Args:
            path: folder or file of the tokenizer.
            name: the tokenizer's name, for messages.

        Raises:
            DataError: as `of`; or no built-in template fits, as no token could end a message.
        """
        files = TokenizerFiles.find(path)
        tokenizer = Tokenizer.load(path)
        template = read_template(files)
        if template is None:
            source = built_in_template(tokenizer)
            if source is None:
                raise DataError(
                    f"data.tokenizer {name} has no chat template, no {BEGIN_MESSAGE} and {END_MESSAGE}, and no token "
                    f"that ends a document, of which a template could be made: put a {CHAT_TEMPLATE} beside it, or "
                    f"name its eos_token in a {CONFIG}"
                )
            template = (BUILT_IN, source)
        return cls._made(*template, tokenizer, files)

    @classmethod
    def _made(cls, name: str, source: str, tokenizer: Tokenizer, files: TokenizerFiles) -> ChatTemplate:
        variables = {role: token for role in ROLES if (token := files.named(role)) is not None}
        try:
            code = _environment().from_string(source)
        except TemplateError as error:
            raise DataError(f"the chat template in {name} is no jinja2 template ({error}): mend it") from None
        return cls(source, name, code, tokenizer, variables)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a conversation, as `apply_chat_template` gives it.

        Args:
            add_generation_prompt: True to add the text after which the assistant's answer follows.

        Raises:
            DataError: the template refuses the conversation, or fails.
        """
        return _ANSWER.sub("", self._rendered(messages, add_generation_prompt))

    def rendered_chat(self, messages: Sequence[Message]) -> RenderedChat:
        """The text of a conversation, and the places of the answers in it.

        A template with `{% generation %}` marks them itself. For another one, an answer is the text that the
        conversation up to it has beyond the conversation before it with the generation prompt. Some templates rewrite
        answers once messages follow, such as Qwen3's, which drops their reasoning: then the conversation ends with its
        last answer, and only that is learned.

        Raises:
            DataError: as `render`; or the text before the last answer is not the beginning of the conversation's text.
        """
        if not self._marks_answers:
            return self._compared(messages)
        parts = _ANSWER.split(self._rendered(messages, add_generation_prompt=False))
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + len(part))
        # Text of an answer is every second part.
        return RenderedChat("".join(parts), [*zip(ends[1:-1:2], ends[2::2], strict=True)])

    @cached_property
    def stop_tokens(self) -> tuple[str, ...]:
        """The tokens that end an answer: the one that the template puts there, and the tokenizer's end of a text."""
        messages = ({"role": "user", "content": "A question?"}, {"role": ASSISTANT, "content": _PROBE})
        after = self.render(messages, add_generation_prompt=False).partition(_PROBE)[2]
        special = self.tokenizer.added_tokens
        ends = [special[number] for number in self.tokenizer.encode(after).tolist() if number in special][:1]
        return tuple(dict.fromkeys([*ends, *filter(None, [self.tokenizer.end_of_document])]))

    @cached_property
    def _marks_answers(self) -> bool:
        return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source) is not None

    def _rendered(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        if any(_ANSWER.search(str(text)) for message in messages for text in message.values()):
            raise DataError(
                "a message must be without the characters U+FDD0 and U+FDD1, which no text has: remove them"
            )
        # As transformers does: no key of a message is null, and there are neither tools nor documents.
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        values = {"messages": given, "tools": None, "documents": None, **self.variables}
        try:
            return self.code.render(**values, add_generation_prompt=add_generation_prompt)
        except RAISED as error:
            raise DataError(f"the chat template in {self.name} refuses the conversation: {error}") from None

    def _compared(self, messages: Sequence[Message]) -> RenderedChat:
        text = self.render(messages, add_generation_prompt=False)
        answers = []
        rewritten = []
        last = 0
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            last = number
            before = self.render(messages[:number], add_generation_prompt=True)
            after = self.render(messages[: number + 1], add_generation_prompt=False)
            if text.startswith(after) and after.startswith(before):
                answers.append((len(before), self._end_of_answer(text, len(before), len(after))))
            else:
                rewritten.append(number)
        if not rewritten:
            return RenderedChat(text, answers)
        before = self.render(messages[:last], add_generation_prompt=True)
        text = self.render(messages[: last + 1], add_generation_prompt=False)
        if not text.startswith(before):
            raise DataError(
                f"the chat template in {self.name} must render the beginning of a conversation as the beginning of "
                f"its text, and message {rewritten[0] + 1} is rendered otherwise with those after it: put "
                "{% generation %} and {% endgeneration %} around the answers in the template"
            )
        left_out = len(rewritten) + len(answers) - 1
        return RenderedChat(text, [(len(before), self._end_of_answer(text, len(before), len(text)))], left_out)

    def _end_of_answer(self, text: str, begin: int, end: int) -> int:
        """The end of an answer without the white space that a template puts after the token that ends it."""
        answer = text[begin:end].rstrip()
        is_ended = any(answer.endswith(token) for token in self.tokenizer.added_tokens.values())
        return begin + len(answer) if is_ended else end


def encode_chats(
    template: ChatTemplate, chats: Iterable[tuple[Callable[[], str], Sequence[Message]]]
) -> Iterator[EncodedChat]:
    """The tokens of each conversation.

    A token that an answer shares with the text before or after belongs to the answer, as in transformers.

    Raises:
        DataError: the template refuses a conversation; names the place, which its function gives.
    """
    rendered = []
    for where, messages in chats:
        try:
            rendered.append(template.rendered_chat(messages))
        except DataError as error:
            raise DataError(f"{where()}: {error}") from None
    encodings = template.tokenizer.encodings([chat.text for chat in rendered])
    for chat, encoding in zip(rendered, encodings, strict=True):
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        places = np.array(chat.answers, dtype=np.int64).reshape(-1, 2)
        first = np.searchsorted(offsets[:, 1], places[:, 0], side="right")
        stop = np.searchsorted(offsets[:, 0], places[:, 1], side="left")
        yield EncodedChat(np.array(encoding.ids, dtype=np.int64), np.stack([first, stop], axis=1), chat.left_out)


def read_template(files: TokenizerFiles) -> tuple[str, str] | None:
    """The file that holds a tokenizer's template, and the template; None if there is none.

    A file of its own goes before `tokenizer_config.json`, and of several templates the one named default is taken.
    """
    paths = {file.name: file for file in files.companions}
    if CHAT_TEMPLATE in paths:
        try:
            return str(paths[CHAT_TEMPLATE]), paths[CHAT_TEMPLATE].read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise DataError(f"{paths[CHAT_TEMPLATE]} cannot be read: {error}") from None
    if CONFIG not in paths:
        return None
    template = read_object(paths[CONFIG]).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return (str(paths[CONFIG]), template) if isinstance(template, str) else None


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    # jinja2's own filter escapes HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).astimezone().strftime(form)
    environment.globals["namespace"] = _Namespace
    return environment


class _Namespace(Namespace):
    """jinja2's namespace without names of Python's internals, by which a template could leave the sandbox."""

    def __init__(self, /, *args: Any, **values: Any) -> None:
        given = dict(*args, **values)
        for name in given:
            _require_public(name)
        super().__init__(given)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: str) -> None:
    if name.startswith("_"):
        raise TemplateError(f"a namespace must have no name that begins with _, such as {name}")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which puts a private character before and after the text of an answer."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{_BEGIN}{caller()}{_END}"
