"""Chat templates: a conversation becomes text, and the places of the assistant's answers in it.

A template is jinja2 code beside the tokenizer. It runs as in `apply_chat_template` of transformers: in a sandbox, with
the special tokens as variables, and with the same functions and filters.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2.exceptions import TemplateError

from shardwise.base.errors import RAISED, DataError
from shardwise.base.hub import TOKENIZER_CONFIG
from shardwise.data.reading.chat_files import ASSISTANT, Conversation, Message, message_text
from shardwise.data.rows import IntArray
from shardwise.data.tokens.template_sandbox import BEGIN, END, SandboxedTemplate
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.data.tokens.tokenizer_files import (
    BEGIN_MESSAGE,
    CHAT_TEMPLATE,
    END_MESSAGE,
    ROLES,
    TokenizerFiles,
    read_tokenizer_json,
)

BUILT_IN = "shardwise (built in)"
"""The name of a built-in template, in place of that of its file."""
_DEFAULT = "default"
_TOOL_USE = "tool_use"  # the name of the template for conversations with tools, where a tokenizer has several
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning, of which templates read the first or the second."""

_ANSWER = re.compile(f"[{BEGIN}{END}]")
_PROBE = "An answer."
_READ = ("role", "content", "weight")  # the fields of a message that are read in any case
# {0}: text before the role, {1}: text between role and content, {2}: text that ends a message.
_BUILT_IN = (
    "{{% for message in messages %}}{{{{ {0} + message['role'] + {1} }}}}"
    "{{% if message['role'] == 'assistant' %}}{{% generation %}}{{{{ message['content'] + {2} }}}}{{% endgeneration %}}"
    "{{% else %}}{{{{ message['content'] + {2} }}}}{{% endif %}}{{{{ '\\n' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ {0} + 'assistant' + {1} }}}}{{% endif %}}"
)


def add_chat_template(folder: Path, name: str) -> ChatTemplate:
    """The chat template of the tokenizer in `folder`, which gets a built-in one if it has none."""
    template = ChatTemplate.or_built_in(folder, name)
    if template.name == BUILT_IN:
        (folder / CHAT_TEMPLATE).write_text(template.source, encoding="utf-8")
    return template


def _built_in_template(tokenizer: Tokenizer) -> str | None:
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
class _RenderedChat:
    """A conversation as text."""

    text: str
    # First and next character of each part that the assistant wrote, with the token that ends it.
    answers: Sequence[tuple[int, int]]
    left_out: int = 0  # number of answers that are not among these, as the template rewrites them once messages follow


class _EncodedChat(NamedTuple):
    """The tokens of a conversation; `answers`: first and next token of each answer, [answers, 2]."""

    ids: IntArray
    answers: IntArray
    left_out: int


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer."""

    source: str
    name: str  # the file that holds it, for messages
    code: SandboxedTemplate
    tokenizer: Tokenizer
    special: Mapping[str, str]  # special tokens by their roles, such as `bos_token`
    # Template of conversations that name tools; None if this one renders them too.
    with_tools: ChatTemplate | None = None

    @classmethod
    def of(cls, tokenizer_folder: Path) -> ChatTemplate | None:
        """The template of the tokenizer in a folder; None if it has none; DataError: a file is missing or broken."""
        files = TokenizerFiles.find(tokenizer_folder)
        templates = _read_templates(files)
        return cls._made(templates, Tokenizer.load(tokenizer_folder), files) if _DEFAULT in templates else None

    @classmethod
    def or_built_in(cls, path: Path, name: str) -> ChatTemplate:
        """The template of a tokenizer, else a built-in one; DataError as `of`, or if no token could end a message."""
        files = TokenizerFiles.find(path)
        tokenizer = Tokenizer.load(path)
        templates = _read_templates(files)
        if _DEFAULT not in templates:
            source = _built_in_template(tokenizer)
            if source is None:
                raise DataError(
                    f"data.tokenizer {name} has no chat template, no {BEGIN_MESSAGE} and {END_MESSAGE}, and no token "
                    f"that ends a document, of which a template could be made: put a {CHAT_TEMPLATE} beside it, or "
                    f"name its eos_token in a {TOKENIZER_CONFIG}"
                )
            templates = {_DEFAULT: (BUILT_IN, source)}
        return cls._made(templates, tokenizer, files)

    @classmethod
    def _made(cls, templates: _Templates, tokenizer: Tokenizer, files: TokenizerFiles) -> ChatTemplate:
        special = {role: token for role in ROLES if (token := files.named(role)) is not None}
        with_tools = None
        for kind in (_TOOL_USE, _DEFAULT):
            if kind in templates:
                name, source = templates[kind]
                try:
                    code = SandboxedTemplate(source)
                except TemplateError as error:
                    raise DataError(f"the chat template in {name} is no jinja2 template ({error}): mend it") from None
                made = cls(source, name, code, tokenizer, special, with_tools)
                with_tools = made
        return made

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None, *, add_generation_prompt: bool
    ) -> str:
        """The text of a conversation, as of `apply_chat_template`; DataError: the template refuses it, or fails."""
        return _ANSWER.sub("", self._rendered(messages, variables or {}, add_generation_prompt))

    def rendered_chat(self, chat: Conversation) -> _RenderedChat:
        """The text of a conversation, and the places of the answers in it.

        A template with `{% generation %}` marks them itself. For another one, an answer is the text that the
        conversation up to it has beyond the conversation before it with the generation prompt. Some templates rewrite
        answers once messages follow, such as Qwen3's, which drops their reasoning: then the conversation ends with its
        last answer, and only that is learned.

        Raises:
            DataError: as `render`; or the text before the last answer is not the beginning of the conversation's text.
        """
        if self.with_tools is not None and chat.variables.get("tools") is not None:
            return self.with_tools.rendered_chat(chat)
        if not re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source):
            return self._compared(chat)
        parts = self._marked(chat, len(chat.messages))
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + len(part))
        # Text of an answer is every second part.
        answers = [*zip(ends[1:-1:2], ends[2::2], strict=True)]
        for number in sorted(chat.not_learned, reverse=True):
            # The answers that the message adds to those before it.
            first, last = (len(self._marked(chat, count)) // 2 for count in (number, number + 1))
            del answers[first:last]
        return _RenderedChat("".join(parts), answers)

    def _marked(self, chat: Conversation, count: int) -> list[str]:
        """The text of the first `count` messages, cut where answers begin and end."""
        if count == 0:
            return [""]
        return _ANSWER.split(self._rendered(chat.messages[:count], chat.variables, add_generation_prompt=False))

    def unread(self, chat: Conversation, known: Container[str]) -> set[str]:
        """The names of variables and fields, but `known` ones, without which a conversation has the same text."""
        template = self.with_tools if self.with_tools is not None and "tools" in chat.variables else self
        fields = {name for message in chat.messages for name in message}
        names = (fields | chat.variables.keys()) - {*_READ} - template._names
        return {name for name in names if name not in known and not template._reads(chat, name)}

    def _reads(self, chat: Conversation, name: str) -> bool:
        """True if a conversation without a variable, or without a field of its messages, has another text."""
        messages = [{key: value for key, value in message.items() if key != name} for message in chat.messages]
        variables = {key: value for key, value in chat.variables.items() if key != name}
        with contextlib.suppress(DataError):
            text = self.render(chat.messages, chat.variables, add_generation_prompt=False)
            return self.render(messages, variables, add_generation_prompt=False) != text
        return True

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.code.names())

    @cached_property
    def stop_tokens(self) -> tuple[str, ...]:
        """The tokens that end an answer: the one that the template puts there, and the tokenizer's end of a text."""
        messages = ({"role": "user", "content": "A question?"}, {"role": ASSISTANT, "content": _PROBE})
        after = self.render(messages, add_generation_prompt=False).partition(_PROBE)[2]
        special = self.tokenizer.added_tokens
        ends = [special[number] for number in self.tokenizer.encode(after).tolist() if number in special][:1]
        return tuple(dict.fromkeys([*ends, *filter(None, [self.tokenizer.end_of_document])]))

    def _rendered(self, messages: Sequence[Message], variables: Mapping[str, Any], add_generation_prompt: bool) -> str:
        given = [self._given(message) for message in messages]
        if _ANSWER.search(json.dumps([given, variables], ensure_ascii=False)):
            raise DataError(
                "a message must be without the characters U+FDD0 and U+FDD1, which no text has: remove them"
            )
        values = {"tools": None, "documents": None, **self.special, **variables}
        if self.name == BUILT_IN and any("content" not in message for message in given):
            raise DataError(
                f"the chat template in {BUILT_IN} writes no tool_calls, and a message has nothing else: put a "
                f"{CHAT_TEMPLATE} that writes them, such as that of Qwen/Qwen3-0.6B, beside data.tokenizer"
            )
        try:
            return self.code.render({**values, "messages": given, "add_generation_prompt": add_generation_prompt})
        except RAISED as error:
            raise DataError(f"the chat template in {self.name} refuses the conversation: {error}") from None

    def _given(self, message: Message) -> Message:
        """A message as transformers gives it to the template: without null fields, its reasoning under each name.

        Parts of text are joined where the template would write their list.
        """
        given = {key: value for key, value in message.items() if value is not None}
        if (reasoning := next((given[name] for name in _REASONING if name in given), None)) is not None:
            given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
        if isinstance(given.get("content"), list) and not self._reads_parts:
            given["content"] = message_text(given)
        return given

    @cached_property
    def _reads_parts(self) -> bool:
        messages = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
        values = {"tools": None, "documents": None, **self.special, "messages": messages}
        with contextlib.suppress(*RAISED):
            text = self.code.render({**values, "add_generation_prompt": False})
            return _PROBE in text and f"'{_PROBE}'" not in text
        return False

    def _compared(self, chat: Conversation) -> _RenderedChat:
        messages = chat.messages
        render = partial(self.render, variables=chat.variables)
        text = render(messages, add_generation_prompt=False)
        answers = []
        rewritten = []
        last = 0
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT or number in chat.not_learned:
                continue
            last = number
            try:
                before = render(messages[:number], add_generation_prompt=True)
            except DataError:
                if number:
                    raise
                raise DataError(
                    f"the first message must not be an answer that is learned, as the chat template in {self.name} "
                    "renders no conversation without a message: give the answer the weight 0, or remove it"
                ) from None
            after = render(messages[: number + 1], add_generation_prompt=False)
            begin = self._begin_of_answer(chat, number, before, after)
            if text.startswith(after) and begin is not None:
                answers.append((begin, self._end_of_answer(text, begin, len(after))))
            else:
                rewritten.append(number)
        if not rewritten:
            return _RenderedChat(text, answers)
        before = render(messages[:last], add_generation_prompt=True)
        text = render(messages[: last + 1], add_generation_prompt=False)
        begin = self._begin_of_answer(chat, last, before, text)
        if begin is None:
            raise DataError(
                f"the chat template in {self.name} must render the beginning of a conversation as the beginning of "
                f"its text, and message {rewritten[0] + 1} is rendered otherwise with those after it: put "
                "{% generation %} and {% endgeneration %} around the answers in the template"
            )
        left_out = len(rewritten) + len(answers) - 1
        return _RenderedChat(text, [(begin, self._end_of_answer(text, begin, len(text)))], left_out)

    def _begin_of_answer(self, chat: Conversation, number: int, before: str, after: str) -> int | None:
        """The character at which message `number` begins in `after`; `before`: the text up to the generation prompt.

        Nemotron 3's prompt for thinking is no beginning of an answer without reasoning, which then begins where the two
        part, as in trl. None: the messages before it are rendered otherwise.
        """
        if after.startswith(before):
            return len(before)
        context = self.render(chat.messages[:number], chat.variables, add_generation_prompt=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
        return shared if after.startswith(context) and shared >= len(context) else None

    def _end_of_answer(self, text: str, begin: int, end: int) -> int:
        """The end of an answer without the white space that a template puts after the token that ends it."""
        answer = text[begin:end].rstrip()
        is_ended = any(answer.endswith(token) for token in self.tokenizer.added_tokens.values())
        return begin + len(answer) if is_ended else end


def encode_chats(
    template: ChatTemplate, chats: Iterable[tuple[Callable[[], str], Conversation]]
) -> Iterator[_EncodedChat]:
    """The tokens of each conversation; those that an answer shares are the answer's. DataError names the place."""
    rendered: list[_RenderedChat] = []
    for where, chat in chats:
        try:
            rendered.append(template.rendered_chat(chat))
        except DataError as error:
            raise DataError(f"{where()}: {error}") from None
    encodings = template.tokenizer.encodings([text.text for text in rendered])
    for text, encoding in zip(rendered, encodings, strict=True):
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        places = np.array(text.answers, dtype=np.int64).reshape(-1, 2)
        first = np.searchsorted(offsets[:, 1], places[:, 0], side="right")
        stop = np.searchsorted(offsets[:, 0], places[:, 1], side="left")
        yield _EncodedChat(np.array(encoding.ids, dtype=np.int64), np.stack([first, stop], axis=1), text.left_out)


_Templates = dict[str, tuple[str, str]]  # name of a template → the file that holds it, and its code


def _read_templates(files: TokenizerFiles) -> _Templates:
    """The templates of a tokenizer; files of their own go before `tokenizer_config.json`."""
    templates: _Templates = {}
    paths = {file.name: file for file in files.companions}
    if TOKENIZER_CONFIG in paths:
        template = read_tokenizer_json(paths[TOKENIZER_CONFIG]).get("chat_template")
        entries = template if isinstance(template, list) else [{"name": _DEFAULT, "template": template}]
        for entry in entries:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name"))] = (str(paths[TOKENIZER_CONFIG]), entry["template"])
    files_of_templates = {_DEFAULT: paths.get(CHAT_TEMPLATE), _TOOL_USE: paths.get(f"{_TOOL_USE}.jinja")}
    if any(files_of_templates.values()):
        templates = {}
    for name, path in files_of_templates.items():
        if path is not None:
            try:
                templates[name] = (str(path), path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise DataError(f"{path} cannot be read: {error}") from None
    return templates
