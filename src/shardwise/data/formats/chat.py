"""Conversations for supervised fine-tuning: a chat template makes text of them, whose answers are the targets.

They are tokenized once and cached, as text is (`formats.text`). A cache entry has the tokens of all conversations, and
where conversations and answers begin and end; `ConversationBatches` packs them for the sequence length of a run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.base.errors import ConfigError, DataError, listing, raise_problems
from shardwise.base.progress import progress
from shardwise.base.units import counted, size
from shardwise.config import DataConfig
from shardwise.data import cache
from shardwise.data.formats import datasets, inspections, prepared_data
from shardwise.data.formats.data_format import DataFormat, Inspection, LengthStatistics
from shardwise.data.formats.text import TextScan, digest_of_text, files_of_source, plan_text_split
from shardwise.data.reading.chat_files import (
    ASSISTANT,
    Chat,
    Conversation,
    conversations_of_file,
    conversations_of_table,
)
from shardwise.data.reading.dataset_tables import names_data_set
from shardwise.data.reading.text_sources import ColumnSource, FileSource, announce_empty, open_text_source
from shardwise.data.request import Announce, DataRequest
from shardwise.data.rows import PART_NAMES, PARTS, Flags, Part, json_digest, part_sizes_text
from shardwise.data.samples.chat_batches import ConversationBatches, Conversations
from shardwise.data.tokens import encoding
from shardwise.data.tokens.chat_template import ChatTemplate, add_chat_template, encode_chats
from shardwise.data.tokens.tokenizer import Tokenizer, keep_user_tokenizer, train_tokenizer
from shardwise.data.tokens.tokenizer_files import resolve_tokenizer

_RULE = 3  # belongs to the key of every cache entry: raise it when a built-in template or the places of answers change
_REWRITTEN = "the chat template rewrites an answer once messages follow, so the last answer alone is learned there"
# Text that is encoded at once.
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class _PreparedChat(prepared_data.PreparedData):
    conversations: Mapping[Part, Conversations]

    def count(self, part: Part) -> int:
        return len(self.conversations[part].tokens)

    def beginning(self, part: Part, tokens: int) -> list[int]:
        return [int(token) for token in self.conversations[part].tokens[:tokens]]

    def batches(
        self, request: DataRequest, part: Part, *, evaluation: bool = False, tail: bool = False
    ) -> ConversationBatches | None:
        """The batches of a part, see `PreparedData`; every conversation is in a sample, so there is no tail."""
        chats = self.conversations[part]
        length = request.sequence_length
        if not len(chats.usable(length)):
            return None
        return ConversationBatches(chats, length, 0 if evaluation else request.seed)


def _open_data(request: DataRequest) -> _PreparedChat:
    _require_fitting(request)
    source = _source(request.data)
    stamp = source.stamp()
    known = None if stamp is None else json_digest({"chat": stamp})
    content, scan = digest_of_text(request, known, source, lambda: _scan(source, request.announce))
    entry = prepared_data.open_text_tokens(
        request,
        source.name,
        lambda tokenizer: _key(content, request, tokenizer),
        lambda folder: _build(folder, source, scan or _scan(source), request),
    )
    return _prepared(entry, source, request)


def _key(content: str, request: DataRequest, tokenizer: str | None) -> str:
    weights = request.data.split_weights
    return cache.cache_key(
        {
            "chat": _RULE,
            "content": content,
            "split": weights[1] / sum(weights),
            "tokenizer": prepared_data.tokenizer_key(tokenizer),
            "vocab_size": request.vocab_size,
        }
    )


def _require_fitting(request: DataRequest) -> None:
    if request.objectives != ("lm",):
        raise DataError(
            f"model.family ({request.family}) must predict the next token to learn from {request.data.name}"
        )


_Source = FileSource | ColumnSource


def _source(data: DataConfig) -> _Source:
    source = open_text_source(data)
    assert isinstance(source, _Source), "data.format=chat names files or a data set"
    return source


def _conversations(source: _Source) -> Iterator[Chat]:
    if isinstance(source, ColumnSource):
        chats = conversations_of_table(source)
    else:
        files = zip(source.files, source.readings, strict=True)
        chats = chain.from_iterable(
            conversations_of_file(file, reading.kind, source.text_key) for file, reading in files
        )
    kept = 0
    empty = 0
    for where, chat in chats:
        if chat.messages:
            kept += 1
            yield where, chat
        else:
            empty += 1
    source.empty[source.name] = empty
    if not kept:
        raise DataError(f"{source.name} holds no messages: all of its conversations are empty")


def _scan(source: _Source, announce: Announce = None) -> TextScan:
    digest = _ChatDigest()
    with progress("reading", shown=announce is not None, done=lambda: digest.bytes):
        characters = [*map(_characters, digest.watch_chats(_conversations(source)))]
    announce_empty(source, announce, "empty conversation")
    return TextScan(digest.hexdigest(), digest.bytes, np.array(characters, dtype=np.int64))


def _characters(chat: Chat) -> int:
    return sum(map(len, chat[1].texts))


class _ChatDigest(encoding.ContentDigest):
    def watch_chats(self, chats: Iterable[Chat]) -> Iterator[Chat]:
        """The conversations, unchanged, each added to the digest."""
        for where, chat in chats:
            # The digest of messages alone must stay what it was before there was more.
            extras = [dict(chat.variables), sorted(chat.not_learned)] if chat.variables or chat.not_learned else []
            for value in (chat.messages, *extras):
                self._digest.update(json.dumps(value, sort_keys=True).encode() + b"\n")
            self.bytes += sum(len(text.encode()) for text in chat.texts)
            yield where, chat


def _held_out(scan: TextScan, weights: Sequence[float]) -> Flags:
    """True for each conversation that is evaluated: those that `plan_text_split` holds out, or the last ones."""
    split = plan_text_split(scan.characters, weights)
    if split.held_out is not None:
        return split.held_out
    return np.cumsum(scan.characters) > split.boundary


def _build(folder: Path, source: _Source, scan: TextScan, request: DataRequest) -> dict[str, Any]:
    announce = request.announce
    is_held_out = _held_out(scan, request.data.split_weights)
    named = request.data.tokenizer
    kept = folder / "tokenizer"
    if named is None:
        with progress("training a tokenizer", shown=announce is not None):
            tokenizer = _train_tokenizer(source, is_held_out, request)
        tokenizer.save(kept)
    else:
        tokenizer = keep_user_tokenizer(named, request.vocab_size, kept, announce)
    template = add_chat_template(kept, named or source.name)
    digest = _ChatDigest()
    unread: dict[str, bool] = {}
    chats = _noting_unread(digest.watch_chats(_conversations(source)), template, unread)
    with progress("tokenizing", scan.bytes, shown=announce is not None, done=lambda: digest.bytes):
        parts = _encode(chats, is_held_out, template, folder)
    prepared_data.require_unchanged(source.name, digest.hexdigest(), scan.content)
    rewritten = sum(facts["answers_left_out"] for facts in parts.values())
    if rewritten and announce is not None:
        announce(f"warning: {counted(rewritten, 'answer')} of {source.name} not learned: {_REWRITTEN}")
    names = sorted(name for name, is_unread in unread.items() if is_unread)
    if names and announce is not None:
        announce(f"warning: {source.name}: {_unread_text(names)}")
    return {
        "dtype": cache.token_dtype(tokenizer.vocab_size).str,
        "vocab_size": tokenizer.vocab_size,
        "content": scan.content,
        "bytes": scan.bytes,
        "unread": names,
        **parts,
        "tokenizer": cache.tokenizer_digest(kept),
        "fingerprint": cache.data_fingerprint([scan.content, *encoding.part_digests(parts)]),
    }


def _noting_unread(chats: Iterable[Chat], template: ChatTemplate, unread: dict[str, bool]) -> Iterator[Chat]:
    """The conversations, unchanged; `unread` gets each name in them, and whether nothing reads it."""
    for where, chat in chats:
        unread_names = template.unread(chat, unread)
        names = {name for message in chat.messages for name in message} | chat.variables.keys()
        unread.update({name: name in unread_names for name in names if name not in unread})
        unread.update(dict.fromkeys(chat.unread, True))
        yield where, chat


def _unread_text(names: Sequence[str]) -> str:
    fields = "the field" if len(names) == 1 else "the fields"
    return f"neither the chat template nor the training reads {fields} {listing(names)}"


def _train_tokenizer(source: _Source, is_held_out: Flags, request: DataRequest) -> Tokenizer:
    train = (chat for (_, chat), is_out in zip(_conversations(source), is_held_out, strict=False) if not is_out)
    messages = (message for chat in train for message in zip(chat.messages, chat.texts, strict=True))
    texts = (f"{message['role']}\n{text}" for message, text in messages)
    return train_tokenizer(texts, request.vocab_size, source.name, chat=True)


def _encode(chats: Iterable[Chat], is_held_out: Flags, template: ChatTemplate, folder: Path) -> dict[str, Any]:
    with contextlib.ExitStack() as files:
        writers = encoding.token_writers(files, cache.token_dtype(template.tokenizer.vocab_size), folder)
        bounds = encoding.bounds_writers(files, ("conversations", "answers"), folder)
        for part in PARTS:
            bounds[part]["conversations"].write([0])
        is_out = iter(is_held_out.tolist())
        left_out = dict.fromkeys(PARTS, 0)
        for batch in encoding.group_by_size(chats, _characters, _BATCH_CHARACTERS):
            for ids, answers, left_out_of_chat in encode_chats(template, batch):
                chosen: Part = "eval" if next(is_out, False) else "train"
                left_out[chosen] += left_out_of_chat
                writer = writers[chosen]
                bounds[chosen]["answers"].write((answers + writer.length).ravel())
                writer.write(ids)
                writer.documents += 1
                bounds[chosen]["conversations"].write([writer.length])
    parts = encoding.part_facts(writers, bounds)
    return {part: {**parts[part], "answers_left_out": left_out[part]} for part in PARTS}


def _prepared(entry: cache.CacheEntry, source: _Source, request: DataRequest) -> _PreparedChat:
    facts = entry.manifest
    chats = {
        part: Conversations(
            entry.tokens(part), entry.bounds(part, "conversations"), entry.bounds(part, "answers").reshape(-1, 2)
        )
        for part in PARTS
    }
    length = request.sequence_length
    problems = [
        f"the {PART_NAMES[part]} part of {request.data.key} {source.name} "
        f"({counted(facts[part]['documents'], 'conversation')} at data.split={request.data.split}) must have an answer "
        f"that begins within the first train.sequence_length + 1 ({length + 1:,}) tokens of a conversation: give more "
        "conversations, a longer sequence or another split"
        for part in request.needed_parts
        if not len(chats[part].usable(length))
    ]
    raise_problems(DataError, problems)
    return _PreparedChat(entry.tokenizer_path, facts["fingerprint"], _summary(facts, source, chats, length), chats)


def _summary(facts: Mapping[str, Any], source: _Source, chats: Mapping[Part, Conversations], length: int) -> str:
    sizes = {part: facts[part]["tokens"] for part in PARTS}
    number = sum(facts[part]["documents"] for part in PARTS)
    answered = sum(int(np.diff(part.answers).sum()) for part in chats.values())
    cut = sum(int((part.lengths[part.usable(length)] > length + 1).sum()) for part in chats.values())
    left_out = number - sum(len(part.usable(length)) for part in chats.values())
    summary = (
        f"{source.name}: {counted(number, 'conversation')}, {size(facts['bytes'])} of messages, "
        f"{part_sizes_text(sizes)} tokens, "
        f"{answered / max(1, sum(sizes.values())):.0%} of them in answers, vocabulary {facts['vocab_size']:,}"
    )
    # Entries of earlier versions left out none.
    rewritten = sum(facts[part].get("answers_left_out", 0) for part in PARTS)
    if rewritten:
        summary += f"; {counted(rewritten, 'answer')} not learned: {_REWRITTEN}"
    if facts["unread"]:
        summary += f"; {_unread_text(facts['unread'])}"
    if cut:
        summary += f"; {counted(cut, 'conversation')} cut at train.sequence_length + 1 ({length + 1:,} tokens)"
    if left_out:
        summary += f"; {counted(left_out, 'conversation')} left out, whose first answer begins after that"
    return summary + (source.left_out_note() if isinstance(source, FileSource) else "")


def _preview(request: DataRequest) -> str:
    _require_fitting(request)
    if names_data_set(request.data):
        return f"conversations, {datasets.preview(request)}"
    source = _source(request.data)
    assert isinstance(source, FileSource)
    named = request.data.tokenizer
    template = None
    with contextlib.suppress(ConfigError):  # a tokenizer of the hub may not be here yet
        template = named and ChatTemplate.or_built_in(resolve_tokenizer(named, cached=True), named)
    names: set[str] = set()
    for file, reading in zip(source.files, source.readings, strict=True):
        _, chat = next(conversations_of_file(file, reading.kind, source.text_key))
        names |= chat.unread | (template.unread(chat, ()) if template else set())
    total = sum(file.stat().st_size for file in source.files)
    unread = f"; {_unread_text(sorted(names))}" if names else ""
    return (
        f"conversations, {counted(len(source.files), 'file')} of {size(total)}, prepared when the run starts, unless "
        f"the cache has them{source.left_out_note()}{unread}"
    )


def _inspect(data: DataConfig, samples: int) -> Inspection:
    source = _source(data)
    files, described = files_of_source(source)
    template = None
    if data.tokenizer is not None:
        template = ChatTemplate.or_built_in(resolve_tokenizer(data.tokenizer), data.tokenizer)
    notes: list[str] = []
    scan = _scan(source, notes.append)
    total = sum(path.stat().st_size for path in files)
    number = len(scan.characters)
    rows = [("files", f"{len(files):,}, {described}"), ("conversations", f"{number:,}")]
    lengths = LengthStatistics.of("characters of a conversation", scan.characters, number)
    counts: dict[str, Any] = {"files": len(files), "conversations": number}
    if template is not None:
        batches = encoding.group_by_size(_conversations(source), _characters, _BATCH_CHARACTERS)
        encoded = [chat for batch in batches for chat in encode_chats(template, batch)]
        lengths = LengthStatistics.of("tokens of a conversation", np.array([len(chat.ids) for chat in encoded]), number)
        counts["tokens"] = sum(len(chat.ids) for chat in encoded)
        counts["trained"] = sum(int(np.diff(chat.answers).sum()) for chat in encoded)
        rows += [
            ("template", template.name),
            ("tokens", f"{counts['tokens']:,}, {counts['trained']:,} of them in answers, which are trained on"),
        ]
    rows.append(("shown in ⟦ ⟧", "what is trained on"))
    shown = [_shown(chat, template) for _, chat in islice(_conversations(source), samples)]
    return Inspection(
        source.name, "chat", total, rows, counts, lengths, inspections.inspected_texts(shown), notes=notes
    )


def _shown(chat: Conversation, template: ChatTemplate | None) -> str:
    """The text of a conversation with marks around its answers; without a template, the messages and their roles."""
    begin, end = "⟦⟧"
    if template is None:
        learned = {number for number, message in enumerate(chat.messages) if message["role"] == ASSISTANT}
        learned -= chat.not_learned
        texts = [f"{begin}{text}{end}" if number in learned else text for number, text in enumerate(chat.texts)]
        return " ".join(f"{message['role']}: {text}" for message, text in zip(chat.messages, texts, strict=True))
    rendered = template.rendered_chat(chat)
    text = rendered.text
    for first, last in reversed(rendered.answers):
        text = f"{text[:first]}{begin}{text[first:last]}{end}{text[last:]}"
    return text


# Its files are named as those of text are, so that no path shows it.
FORMAT = DataFormat(name="chat", contents="conversations", open_data=_open_data, preview=_preview, inspect=_inspect)
