"""Text: tokenized once, cached by its content, and mapped into memory."""

from __future__ import annotations

import contextlib
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import DataError, listing, see
from shardwise.base.units import count, counted, size
from shardwise.config import Config, DataConfig
from shardwise.data import cache, hub
from shardwise.data.formats.common import (
    Announce,
    PreparedText,
    announce_note,
    document_marks,
    entry_problems,
    in_pairs,
    needed_parts,
    padding_problems,
)
from shardwise.data.formats.inspection import SAMPLE_CHARACTERS, InspectedSample, Inspection, Lengths
from shardwise.data.reading.text_sources import ColumnSource, FileSource, Source, TextPiece, open_source
from shardwise.data.samples.order import mix_integer
from shardwise.data.split import PART_NAMES, PARTS, Part, TextSplit, describe_sizes, plan_split
from shardwise.data.tokens.encoding import RULE, ContentDigest, encode_documents, encode_sentences
from shardwise.data.tokens.tokenizer import (
    PairTokens,
    Tokenizer,
    export_user_tokenizer,
    open_user_tokenizer,
    train_tokenizer,
    user_tokenizer_digest,
)

# More text changes the merges of a small vocabulary little and costs memory and time.
_TOKENIZER_CHARACTERS = 1 << 25
_ALL = TextSplit(None, sys.maxsize)
"""One part."""
_TEXT_BYTES, _TEXT_ENCODED = 1 << 26, 1 << 20
"""Bytes that an inspection reads and encodes, at most."""


@dataclass(frozen=True)
class _Scan:
    """What one reading of a text shows: a digest, its size, and the length of each document in characters."""

    content: str
    bytes: int
    characters: npt.NDArray[np.int64]


def open_data(
    config: Config, root: Path, announce: Announce, *, any_size: bool, source: Source | None = None
) -> PreparedText:
    """Opens `source`, or the text of `config`, tokenizing it first where the cache `root` has no tokens of it."""
    source = source or open_source(config.data)
    content, scan = _content(root, source, announce)
    entry = cache.open_or_build_tokens(
        root,
        _key(content, config),
        lambda folder: _build(folder, source, scan or _scan(source), config, announce),
        f"{source.name}: once",
        announce,
    )
    return _prepared(entry, source, config, any_size)


def _content(root: Path, source: Source, announce: Announce) -> tuple[str, _Scan | None]:
    """The digest of a text, and what reading it showed, where it had to be read."""
    stamp = source.stamp()
    content = cache.known_content(root, stamp)
    if content is not None:
        return content, None
    with contextlib.ExitStack() as lock:
        if isinstance(source, ColumnSource):
            # One process reads it, as it is fetched first where it lies on the hub; the others wait.
            lock.enter_context(cache.locked(root, source.stamp()[:32]))
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


def _parts(source: Source, split: TextSplit, digest: ContentDigest) -> Iterator[tuple[Part, TextPiece]]:
    """All pieces of a text with their parts, which are the data set's own where it has them, else those of `split`."""
    if not isinstance(source, ColumnSource) or not source.data.split_names:
        yield from split.parts(digest.watch(source.pieces()))
        return
    for part, name in zip(PART_NAMES, source.splits, strict=False):
        for piece in digest.watch(source.pieces_of(name)):
            yield part, piece
        digest.end_part()


def _key(content: str, config: Config) -> str:
    """What decides the tokens, as a folder's name."""
    named, weights = config.data.tokenizer, config.data.split_weights
    described = {
        "content": content,
        "split": list(config.data.split_names) or weights[1] / sum(weights),
        "tokenizer": "byte-level BPE" if named is None else user_tokenizer_digest(named),
        "vocab_size": config.model.vocab_size,
        **config.data.chosen_marks,
    }
    return cache.key_of(described | ({"sentences": RULE} if in_pairs(config) else {}))


def _build(folder: Path, source: Source, scan: _Scan, config: Config, announce: Announce) -> dict[str, Any]:
    if announce is not None and isinstance(source, FileSource) and config.data.path is not None:
        announce(f"preparing the data {source.name}: {source.described()}")
    split = plan_split(scan.characters, config.data.split_weights)
    named, pairs = config.data.tokenizer, in_pairs(config)
    if named is None:
        texts = _tokenizer_texts(_parts(source, split, ContentDigest()), int(scan.characters.sum()))
        tokenizer = train_tokenizer(texts, config.model.vocab_size, source.name, pairs=pairs)
        tokenizer.save(folder / "tokenizer")
    else:
        tokenizer = open_user_tokenizer(named, config.model.vocab_size, pairs=pairs)
        announce_note(tokenizer, announce)
        export_user_tokenizer(named, tokenizer, folder / "tokenizer")
    digest = ContentDigest()
    pieces = _parts(source, split, digest)
    if pairs:
        parts = encode_sentences(pieces, tokenizer, folder)
    else:
        parts = encode_documents(pieces, tokenizer, document_marks(config.data, tokenizer), folder)
    if digest.hexdigest() != scan.content:
        raise DataError(
            f"{source.name} changed while it was read: start again once it is complete{see('data#changed-while-read')}"
        )
    digests = [scan.content]
    for part, facts in parts.items():
        if part == "test" and not config.data.split_names:
            continue  # it is empty, and fingerprints from before there was a test part must stay
        digests += [facts["sha256"], *(row["sha256"] for row in facts.get("bounds", {}).values())]
    return {
        "dtype": cache.token_dtype(tokenizer.vocab_size).str,
        "vocab_size": tokenizer.vocab_size,
        "content": scan.content,
        "bytes": scan.bytes,
        "documents": len(scan.characters),
        **parts,
        "tokenizer": cache.tokenizer_digest(folder / "tokenizer"),
        "fingerprint": cache.fingerprint_of(digests),
        **({"pair_tokens": asdict(tokenizer.pair_tokens())} if pairs else {}),
    }


def _tokenizer_texts(parts: Iterable[tuple[Part, TextPiece]], characters: int) -> Iterator[str]:
    """Training text, thinned by a hash of the piece's number to about as much as a tokenizer needs."""
    for number, (part, piece) in enumerate(parts):
        if part == "train" and mix_integer(number) % characters < _TOKENIZER_CHARACTERS:
            yield piece.text


def _prepared(entry: cache.Entry, source: Source, config: Config, any_size: bool) -> PreparedText:
    facts = entry.manifest
    special = PairTokens(**facts["pair_tokens"]) if in_pairs(config) else None
    needed = [] if any_size else needed_parts(config)
    problems = padding_problems(special, config) + entry_problems(config, entry, source.name, needed)
    if problems:
        raise DataError(problems)
    sizes = {part: facts[part]["tokens"] for part in PARTS}
    summary = (
        f"{source.name}: {size(facts['bytes'])}, {counted(facts['documents'], 'document')}, {describe_sizes(sizes)} "
        f"tokens, vocabulary {facts['vocab_size']:,}, {facts['bytes'] / max(1, sum(sizes.values())):.2f} bytes per "
        f"token{source.without() if isinstance(source, FileSource) else ''}"
    )
    return PreparedText(
        entry.tokenizer_path,
        facts["fingerprint"],
        summary,
        tokens={part: entry.tokens(part) for part in PARTS},
        vocab_size=facts["vocab_size"],
        sentences={part: entry.sentences(part) for part in PARTS} if special is not None else {},
        pair_tokens=special,
    )


def glance(config: Config) -> str:
    """How much text there is; no more is read than the first line or row of each file."""
    source, then = open_source(config.data), when_read(config)
    if not isinstance(source, FileSource):
        return f"built-in, {then}"
    source.require_text()
    total = sum(file.stat().st_size for file in source.files)
    return f"{counted(len(source.files), 'file')}, {size(total)}, {source.described()}, {then}"


def when_read(config: Config) -> str:
    """When a run will read its text."""
    if config.data.streaming:
        return "read during training"
    return "prepared when the run starts, unless the cache has it"


def inspect(data: DataConfig, samples: int) -> Inspection:
    """Files of text, as training reads them: all of them, or the beginning where they are large."""
    source = open_source(data)
    encoder = None if data.tokenizer is None else Tokenizer.load(hub.resolve_tokenizer(data.tokenizer))
    marks = None if encoder is None else document_marks(data, encoder)
    if encoder is None and data.append_eod is not None:
        raise DataError("data.append_eod needs data.tokenizer, by which tokens are counted")
    lengths: list[int] = []
    beginnings: list[str] = []
    read = tokens = encoded = 0
    whole = begins = True
    for piece in source.pieces():
        if read >= _TEXT_BYTES:
            whole = False
            break
        if begins:
            lengths.append(0)
            beginnings += [""] if len(lengths) <= samples else []
        lengths[-1] += len(piece.text)
        if len(lengths) <= samples:
            beginnings[-1] += piece.text[: SAMPLE_CHARACTERS - len(beginnings[-1])]
        nbytes = len(piece.text.encode())
        if encoder is not None and marks is not None and encoded < _TEXT_ENCODED:
            row = encoder.encode_rows([piece.text])
            tokens += len(marks.put(*row, [piece.ends_document], begun=not begins)[0])
            encoded += nbytes
        read += nbytes
        begins = piece.ends_document
    files, described = (source.files, source.described()) if isinstance(source, FileSource) else ((), "")
    number = len(lengths) if whole else None
    limit = "" if whole else f" in the first {size(read)} of text"
    counts: dict[str, Any] = {
        "files": len(files),
        "documents": number,
        "looked_at": len(lengths),
        "bytes_looked_at": read,
    }
    rows = [("files", f"{len(files):,}, {described}")]
    rows += [("documents", f"{len(lengths):,}{limit}"), ("characters", f"{count(sum(lengths))}{limit}")]
    if encoded and tokens:
        counts["bytes_per_token"] = encoded / tokens
        rows.append(("tokens", f"about {count(read * tokens / encoded)}{limit}, {encoded / tokens:.2f} bytes each"))
    if encoder is not None and marks is not None:
        around = {"begins with": marks.begin, "ends with": marks.end}
        said = [f"{verb} {encoder.decode([token])}" for verb, token in around.items() if token is not None]
        rows.append(("a document", listing(said) or "has no tokens of its own around it"))
    return Inspection(
        source.name,
        "text",
        sum(path.stat().st_size for path in files),
        rows,
        counts,
        Lengths.of("characters of a document", np.array(lengths), number),
        [InspectedSample(number, text, None) for number, text in enumerate(beginnings)],
    )
