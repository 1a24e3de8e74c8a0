"""From the `data` section to tokens: text is tokenized once, cached by its content, and mapped into memory."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.config import Config
from shardwise.data import cache
from shardwise.data.batch import TokenArray
from shardwise.data.hashing import mix_integer
from shardwise.data.sources import Piece, Source, open_source
from shardwise.data.split import PARTS, Part, Split, plan_split
from shardwise.data.tokenizer import (
    Tokenizer,
    export_user_tokenizer,
    open_user_tokenizer,
    train_tokenizer,
    user_tokenizer_digest,
)
from shardwise.errors import DataError
from shardwise.units import count, size

_BATCH_CHARACTERS = 1 << 23
# More text changes the merges of a small vocabulary little and costs memory and time.
_TOKENIZER_CHARACTERS = 1 << 25


@dataclass(frozen=True)
class PreparedData:
    """Tokenized text, ready to be read."""

    tokenizer_path: Path
    """A folder that `transformers.AutoTokenizer.from_pretrained` and `Tokenizer.load` open."""
    train_tokens: TokenArray
    eval_tokens: TokenArray
    fingerprint: str
    """A digest of the text and of all its tokens: equal data, equal fingerprint, on any machine."""
    vocab_size: int
    """Of the tokenizer; at most the model's."""
    summary: str


@dataclass(frozen=True)
class _Scan:
    """What one reading of a text tells: a digest, its size, and the length of each document."""

    content: str
    bytes: int
    characters: npt.NDArray[np.int64]


def prepare(
    config: Config, cache_dir: Path | None = None, announce: Callable[[str], None] | None = None
) -> PreparedData:
    """Opens the data of `config`, tokenizing it first where the cache has none.

    Any number of processes may call it at once: one builds and the others wait. `announce` is called with one line
    when something is built.

    Raises:
        DataError: when the text or the tokenizer is missing, unreadable or too small, or the cache cannot be written.
    """
    train_weight, eval_weight = config.data.split_weights
    if eval_weight == 0 and config.train.eval_every > 0:
        raise DataError(
            f"data.split ({config.data.split}) holds nothing out, and train.eval_every ({config.train.eval_every}) "
            "asks for evaluations: give the second part a weight, such as data.split=95,5, or set train.eval_every=0"
        )
    root = cache.cache_root(cache_dir)
    source = open_source(config.data)
    stamp = source.stamp()
    content = cache.known_content(root, stamp)
    scan = None
    if content is None:
        scan = _scan(source)
        content = scan.content
        cache.remember_content(root, stamp, content)
    key = _key(content, config, (train_weight, eval_weight))
    entry = cache.open_entry(root, key)
    if entry is None:
        with cache.locked(root, key) as exclusive:
            entry = cache.open_entry(root, key)
            if entry is None:
                if announce is not None:
                    announce(f"preparing the data {source.name}: once, then cached in {root}")
                _build(root, key, exclusive, source, scan or _scan(source), config)
                entry = cache.open_entry(root, key)
    if entry is None:
        raise DataError(f"the data cache {root} returns other bytes than were written: set SHARDWISE_CACHE elsewhere")
    return _prepared(entry, source, config)


def _scan(source: Source) -> _Scan:
    digest = hashlib.sha256()
    total, document = 0, 0
    characters = array("q")
    for piece in source.pieces():
        encoded = piece.text.encode()
        digest.update(encoded)
        total += len(encoded)
        document += len(piece.text)
        if piece.ends_document:
            digest.update(b"\xff")  # in no UTF-8 text
            characters.append(document)
            document = 0
    return _Scan(digest.hexdigest(), total, np.array(characters, dtype=np.int64))


def _key(content: str, config: Config, weights: tuple[float, float]) -> str:
    """What decides the tokens, as a folder's name."""
    own = config.data.tokenizer
    parts = {
        "format": cache.FORMAT,
        "content": content,
        "split": weights[1] / sum(weights),
        "tokenizer": "byte-level BPE" if own is None else user_tokenizer_digest(own),
        "vocab_size": config.model.vocab_size,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _build(root: Path, key: str, exclusive: bool, source: Source, scan: _Scan, config: Config) -> None:
    split = plan_split(scan.characters, config.data.split_weights)
    own = config.data.tokenizer
    if own is None:
        texts = _tokenizer_texts(split, source.pieces(), int(scan.characters.sum()))
        tokenizer = train_tokenizer(texts, config.model.vocab_size, source.name)
    else:
        tokenizer = open_user_tokenizer(own, config.model.vocab_size)
    with cache.writing(root), cache.building(root, key, exclusive) as folder:
        if own is None:
            tokenizer.save(folder / "tokenizer")
        else:
            export_user_tokenizer(own, tokenizer, folder / "tokenizer")
        facts = _encode(source, split, scan, tokenizer, folder)
        facts["tokenizer"] = cache.tokenizer_digest(folder / "tokenizer")
        digests = [scan.content, *(facts[part]["sha256"] for part in PARTS)]
        facts["fingerprint"] = hashlib.sha256("\n".join(digests).encode()).hexdigest()
        cache.write_manifest(folder, facts)


def _tokenizer_texts(split: Split, pieces: Iterable[Piece], characters: int) -> Iterator[str]:
    """Training text, thinned by a hash of the piece's number to about as much as a tokenizer needs."""
    for number, (part, piece) in enumerate(split.parts(pieces)):
        if part == "train" and mix_integer(number) % characters < _TOKENIZER_CHARACTERS:
            yield piece.text


def _encode(source: Source, split: Split, scan: _Scan, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    dtype = cache.token_dtype(tokenizer.vocab_size)
    with (folder / "train.bin").open("wb") as train, (folder / "eval.bin").open("wb") as evaluation:
        writers: dict[Part, cache.TokenWriter] = {
            "train": cache.TokenWriter(train, dtype),
            "eval": cache.TokenWriter(evaluation, dtype),
        }
        digest = hashlib.sha256()
        for batch in _batches(split.parts(source.pieces())):
            encoded = tokenizer.encode_batch([piece.text for _, piece in batch])
            for (part, piece), ids in zip(batch, encoded, strict=True):
                digest.update(piece.text.encode())
                if piece.ends_document:
                    digest.update(b"\xff")
                    ids.append(tokenizer.end_of_document_id)
                    writers[part].documents += 1
                writers[part].write(ids)
    if digest.hexdigest() != scan.content:
        raise DataError(f"{source.name} changed while it was read: start again once it is complete")
    return {
        "dtype": dtype.str,
        "vocab_size": tokenizer.vocab_size,
        "content": scan.content,
        "bytes": scan.bytes,
        "documents": len(scan.characters),
        **{part: writer.facts() for part, writer in writers.items()},
    }


def _batches(parts: Iterable[tuple[Part, Piece]]) -> Iterator[list[tuple[Part, Piece]]]:
    batch: list[tuple[Part, Piece]] = []
    characters = 0
    for part, piece in parts:
        batch.append((part, piece))
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _prepared(entry: cache.Entry, source: Source, config: Config) -> PreparedData:
    facts = entry.manifest
    problems = _too_short(entry, source, config)
    if problems:
        raise DataError(problems)
    train, evaluation = facts["train"]["tokens"], facts["eval"]["tokens"]
    documents = "document" if facts["documents"] == 1 else "documents"
    summary = (
        f"{source.name}: {size(facts['bytes'])}, {facts['documents']:,} {documents}, {count(train)} training and "
        f"{count(evaluation)} evaluation tokens, vocabulary {facts['vocab_size']:,}, "
        f"{facts['bytes'] / (train + evaluation):.2f} bytes per token"
    )
    return PreparedData(
        tokenizer_path=entry.tokenizer_path,
        train_tokens=entry.tokens("train"),
        eval_tokens=entry.tokens("eval"),
        fingerprint=facts["fingerprint"],
        vocab_size=facts["vocab_size"],
        summary=summary,
    )


def _too_short(entry: cache.Entry, source: Source, config: Config) -> list[str]:
    length = config.train.sequence_length
    needed: list[tuple[Part, str]] = [("train", "training")]
    if config.train.eval_every > 0:
        needed.append(("eval", "evaluation"))
    key = "data.dataset" if config.data.path is None else "data.path"
    return [
        f"the {words} part of {key} {source.name} ({entry.manifest[part]['tokens']:,} tokens at data.split="
        f"{config.data.split}) must be at least one sample of train.sequence_length + 1 ({length + 1:,} tokens): "
        "give more text, a shorter sequence or another split"
        for part, words in needed
        if entry.manifest[part]["tokens"] < length + 1
    ]
