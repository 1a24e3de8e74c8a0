"""From the `data` section to tokens: text is tokenized once, cached by its content, and mapped into memory."""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from shardwise.config import Config
from shardwise.data import cache
from shardwise.data.formats.common import (
    PreparedData,
    PreparedText,
    in_pairs,
    needed_parts,
    padding_problems,
    too_short,
)
from shardwise.data.formats.datasets import prepare_rows
from shardwise.data.formats.hdf5 import prepare_shards, reads_shards
from shardwise.data.formats.megatron import prepare_indexed, reads_indexed
from shardwise.data.formats.stream import prepare_stream, require_streamable
from shardwise.data.reading.datasets import open_dataset, reads_datasets
from shardwise.data.reading.sources import ColumnSource, Piece, Source, open_source
from shardwise.data.samples.hashing import mix_integer
from shardwise.data.samples.pairs import chunk_room
from shardwise.data.tokens.cutting import RULE
from shardwise.data.tokens.encoding import ContentDigest, encode_documents, encode_sentences
from shardwise.data.tokens.split import PART_NAMES, PARTS, Part, Split, plan_split
from shardwise.data.tokens.tokenizer import (
    PairTokens,
    export_user_tokenizer,
    open_user_tokenizer,
    train_tokenizer,
    user_tokenizer_digest,
)
from shardwise.errors import DataError, listing
from shardwise.units import count, size

# More text changes the merges of a small vocabulary little and costs memory and time.
_TOKENIZER_CHARACTERS = 1 << 25
_ALL = Split(None, sys.maxsize)
"""One part."""
DataKind = Literal["stream", "indexed", "shards", "datasets", "text"]


@dataclass(frozen=True)
class _Scan:
    """What one reading of a text tells: a digest, its size, and the length of each document."""

    content: str
    bytes: int
    characters: npt.NDArray[np.int64]


def kind_of_data(config: Config) -> DataKind:
    """As what the data of `config` are read; nothing of them is.

    Raises:
        DataError: other keys ask of such data what they cannot give.
    """
    _, eval_weight, test_weight = config.data.split_weights
    if eval_weight == 0 and config.train.eval_every > 0:
        raise DataError(
            f"data.split ({config.data.split}) holds nothing out, and train.eval_every ({config.train.eval_every}) "
            "asks for evaluations: give the second part a weight, such as data.split=95,5, or set train.eval_every=0"
        )
    if in_pairs(config):
        chunk_room(config.train.sequence_length)
    indexed, shards, datasets = (reads(config.data) for reads in (reads_indexed, reads_shards, reads_datasets))
    if config.data.split_names and not datasets:
        raise DataError(
            f"data.split ({config.data.split}) must be weights such as 95,5 where {config.data.key} "
            f"({config.data.name}) is no data set with splits"
        )
    if config.data.streaming and (indexed or shards):
        raise DataError(
            f"data.streaming (true) must be false with {config.data.key} ({config.data.name}), whose tokens are read "
            "where they lie"
        )
    if config.data.streaming:
        require_streamable(config)
        return "stream"
    if indexed or shards:
        return "indexed" if indexed else "shards"
    if test_weight and not config.data.split_names:
        raise DataError(
            f"data.split ({config.data.split}) must be two weights, training and evaluation, where {config.data.key} "
            f"({config.data.name}) is text: only Megatron data and HDF5 shards have a test part"
        )
    return "datasets" if datasets else "text"


def prepare(
    config: Config,
    cache_dir: Path | None = None,
    announce: Callable[[str], None] | None = None,
    *,
    any_size: bool = False,
) -> PreparedData:
    """Opens the data of `config`, tokenizing it first where the cache has none.

    Any number of processes may call it at once: one builds and the others wait. `announce` is called with one line
    when something is built. `any_size`: the parts need not hold a sample each, as they must for training.

    Raises:
        DataError: when the text or the tokenizer is missing, unreadable or too small, or the cache cannot be written.
    """
    kind = kind_of_data(config)
    root = cache.cache_root(cache_dir)
    if kind == "stream":
        return prepare_stream(config, root, announce, any_size=any_size)
    if kind == "indexed":
        return prepare_indexed(config, root, any_size=any_size)
    if kind == "shards":
        return prepare_shards(config, root, announce, any_size=any_size)
    source: Source
    if kind == "datasets":
        source = ColumnSource(open_dataset(config.data))
        rows = prepare_rows(source.dataset, config, root, announce, any_size=any_size)
        if rows is not None:
            return rows
        if any_size and config.data.tokenizer is None:
            raise DataError(
                f"{source.dataset.shown} holds text, which is read with the model's tokenizer: name it by "
                "data.tokenizer"
            )
    else:
        source = open_source(config.data)
    content, scan = _content(root, source, announce)
    key = _key(content, config)
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
        raise cache.returns_other_bytes(root)
    return _prepared(entry, source, config, any_size)


def _content(root: Path, source: Source, announce: Callable[[str], None] | None) -> tuple[str, _Scan | None]:
    """The digest of a text, and what reading it told, where it was read to know.

    A data set is read by one process, as it is fetched first where it lies on the hub; the others wait.
    """
    stamp = source.stamp()
    content = cache.known_content(root, stamp)
    if content is not None:
        return content, None
    with ExitStack() as held:
        if isinstance(source, ColumnSource):
            held.enter_context(cache.locked(root, source.dataset.stamp()[:32]))
            content = cache.known_content(root, stamp)
            if content is not None:
                return content, None
            if announce is not None:
                announce(f"preparing the data {source.name}: reading them")
        scan = _scan(source)
        cache.remember_content(root, stamp, scan.content)
    return scan.content, scan


def _scan(source: Source) -> _Scan:
    digest = ContentDigest()
    document = 0
    characters = array("q")
    for _, piece in _parts(source, _ALL, digest):
        document += len(piece.text)
        if piece.ends_document:
            characters.append(document)
            document = 0
    return _Scan(digest.hexdigest(), digest.bytes, np.array(characters, dtype=np.int64))


def _parts(source: Source, split: Split, digest: ContentDigest) -> Iterator[tuple[Part, Piece]]:
    """All pieces of a text with their parts, which are the data set's own where it has them, else those of `split`."""
    if not isinstance(source, ColumnSource) or not source.dataset.data.split_names:
        yield from split.parts(digest.watch(source.pieces()))
        return
    for part, name in zip(PART_NAMES, source.dataset.splits, strict=False):
        for piece in digest.watch(source.pieces_of(name)):
            yield part, piece
        digest.end_part()


def _key(content: str, config: Config) -> str:
    """What decides the tokens, as a folder's name."""
    own, weights = config.data.tokenizer, config.data.split_weights
    parts = {
        "format": cache.FORMAT,
        "content": content,
        "split": list(config.data.split_names) or weights[1] / sum(weights),
        "tokenizer": "byte-level BPE" if own is None else user_tokenizer_digest(own),
        "vocab_size": config.model.vocab_size,
    }
    if in_pairs(config):
        parts["sentences"] = RULE
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _build(root: Path, key: str, exclusive: bool, source: Source, scan: _Scan, config: Config) -> None:
    split = plan_split(scan.characters, config.data.split_weights)
    own, pairs = config.data.tokenizer, in_pairs(config)
    if own is None:
        texts = _tokenizer_texts(_parts(source, split, ContentDigest()), int(scan.characters.sum()))
        tokenizer = train_tokenizer(texts, config.model.vocab_size, source.name, pairs=pairs)
    else:
        tokenizer = open_user_tokenizer(own, config.model.vocab_size, pairs=pairs)
    with cache.writing(root), cache.building(root, key, exclusive) as folder:
        if own is None:
            tokenizer.save(folder / "tokenizer")
        else:
            export_user_tokenizer(own, tokenizer, folder / "tokenizer")
        digest = ContentDigest()
        encode = encode_sentences if pairs else encode_documents
        parts = encode(_parts(source, split, digest), tokenizer, folder)
        if digest.hexdigest() != scan.content:
            raise DataError(f"{source.name} changed while it was read: start again once it is complete")
        digests = [scan.content]
        for part, facts in parts.items():
            if part == "test" and not config.data.split_names:
                continue  # there is none, and the fingerprint is that of before there were any
            digests += [facts["sha256"], *(row["sha256"] for row in facts.get("bounds", {}).values())]
        facts = {
            "dtype": cache.token_dtype(tokenizer.vocab_size).str,
            "vocab_size": tokenizer.vocab_size,
            "content": scan.content,
            "bytes": scan.bytes,
            "documents": len(scan.characters),
            **parts,
            "tokenizer": cache.tokenizer_digest(folder / "tokenizer"),
            "fingerprint": hashlib.sha256("\n".join(digests).encode()).hexdigest(),
        }
        if pairs:
            facts["pair_tokens"] = asdict(tokenizer.pair_tokens())
        cache.write_manifest(folder, facts)


def _tokenizer_texts(parts: Iterable[tuple[Part, Piece]], characters: int) -> Iterator[str]:
    """Training text, thinned by a hash of the piece's number to about as much as a tokenizer needs."""
    for number, (part, piece) in enumerate(parts):
        if part == "train" and mix_integer(number) % characters < _TOKENIZER_CHARACTERS:
            yield piece.text


def _prepared(entry: cache.Entry, source: Source, config: Config, any_size: bool) -> PreparedText:
    facts = entry.manifest
    special = PairTokens(**facts["pair_tokens"]) if in_pairs(config) else None
    needed = [] if any_size else needed_parts(config)
    problems = padding_problems(special, config) + too_short(entry, source.name, config, needed)
    if problems:
        raise DataError(problems)
    tokens = {part: entry.tokens(part) for part in PARTS}
    shown = [f"{count(len(row))} {PART_NAMES[part]}" for part, row in tokens.items() if part != "test" or len(row)]
    documents = "document" if facts["documents"] == 1 else "documents"
    summary = (
        f"{source.name}: {size(facts['bytes'])}, {facts['documents']:,} {documents}, {listing(shown)} tokens, "
        f"vocabulary {facts['vocab_size']:,}, {facts['bytes'] / max(1, sum(map(len, tokens.values()))):.2f} bytes per "
        "token"
    )
    return PreparedText(
        tokenizer_path=entry.tokenizer_path,
        train_tokens=tokens["train"],
        eval_tokens=tokens["eval"],
        test_tokens=tokens["test"],
        fingerprint=facts["fingerprint"],
        vocab_size=facts["vocab_size"],
        summary=summary,
        sentences={part: entry.sentences(part) for part in PARTS} if special else {},
        pair_tokens=special,
    )
