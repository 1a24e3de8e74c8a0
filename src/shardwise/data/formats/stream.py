"""Text that is tokenized while it is trained on; its first documents are read first, and what is held out is cached.

Parts other than the training's are a block of documents each, at most, prepared as any text is. Weights of `data.split`
hold their share of the first block out; splits with names are parts, of which the first block is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.config import Config, DataConfig
from shardwise.data import cache
from shardwise.data.formats.common import Announce, in_pairs, needed_parts, row_batches, too_short
from shardwise.data.parts import PART_NAMES, PARTS, Part, describe_sizes
from shardwise.data.reading.datasets import DataSet, open_dataset
from shardwise.data.reading.detect import detect
from shardwise.data.reading.sources import FileSource, Piece, open_source
from shardwise.data.reading.streams import BLOCK_CHARACTERS, Shard, open_shard
from shardwise.data.reading.text import unreadable
from shardwise.data.samples.batch import Batches, TokenArray
from shardwise.data.samples.causal import DocumentEnds, TokenBatches
from shardwise.data.samples.streaming import HeldOut, Stream, StreamBatches, read_documents
from shardwise.data.tokens.encoding import encode_documents
from shardwise.data.tokens.tokenizer import Tokenizer, export_user_tokenizer, open_user_tokenizer, user_tokenizer_digest
from shardwise.errors import DataError
from shardwise.units import counted

_Begin = tuple[int, int]


@dataclass(frozen=True)
class PreparedStream:
    """`PreparedData` of a stream.

    Attributes:
        files: of the training part.
        held: which of their documents are not trained on.
        tokens: of the other parts; of the training part none, or all where they are less than a block.
    """

    name: str
    tokenizer_path: Path
    fingerprint: str
    summary: str
    files: tuple[str, ...]
    held: HeldOut
    tokens: Mapping[Part, TokenArray]
    data: DataConfig

    def count(self, part: Part) -> int:
        """Tokens of a part; 0 of a training part of more than a block, whose number is not known before it is read."""
        return len(self.tokens[part])

    def beginning(self, part: Part, tokens: int) -> list[int]:
        if part != "train":
            return [int(token) for token in self.tokens[part][:tokens]]
        _, pieces = next(read_documents(self._shards()[0], 0))
        return [int(token) for token in Tokenizer.load(self.tokenizer_path).encode(pieces[0].text)[:tokens]]

    def batches(self, config: Config, part: Part, *, evaluation: bool = False, tail: bool = False) -> Batches | None:
        if part != "train":
            return row_batches(config, self.tokens[part], self.tokenizer_path, config.train.seed, tail=tail)
        if evaluation:
            raise DataError(
                f"data.streaming (true) must be false where the training part of {self.name} is evaluated: set it, or "
                "give --part eval"
            )
        length, ends = config.train.sequence_length, DocumentEnds.of(config, self.tokenizer_path)
        stream = Stream(
            self._shards(),
            Tokenizer.load(self.tokenizer_path),
            lambda row, seed: TokenBatches(row, length, seed, tail=True, ends=ends),
            seed=config.train.seed,
            buffer=config.data.shuffle_buffer,
            held=self.held,
        )
        return StreamBatches(stream, self.name)

    def _shards(self) -> list[Shard]:
        return [open_shard(file, self.data) for file in self.files]


def open_data(config: Config, root: Path, announce: Announce, *, any_size: bool) -> PreparedStream:
    """Opens a stream; its first documents are read where the cache `root` does not know them.

    Raises:
        DataError: the data cannot be streamed, or its first documents cannot be read, or they are too few.
    """
    files = _Files.of(config)
    entry = cache.open_or_build_tokens(
        root,
        _key(config, files.stamp()),
        lambda folder: _build(folder, files, config),
        f"{config.data.name}: the first documents of a stream",
        announce,
    )
    return _prepared(entry, config, any_size)


def require_streamable(config: Config) -> None:
    """Raises DataError where the configuration asks of a stream what only prepared text gives."""
    if in_pairs(config):
        raise DataError(
            f"data.streaming (true) must be false with model.family ({config.model.family}): pairs of sentences are "
            "made of prepared text"
        )
    if config.data.split_weights[2] and not config.data.split_names:
        raise DataError(
            f"data.split ({config.data.split}) must be two weights, training and evaluation, with data.streaming "
            "(true), or names of splits"
        )


@dataclass(frozen=True)
class _Files:
    """The files that a stream is read from: of a data set, or those that a path names."""

    dataset: DataSet | None
    paths: tuple[Path, ...]

    @classmethod
    def of(cls, config: Config) -> _Files:
        if detect(config.data) == "datasets":
            return cls(open_dataset(config.data), ())
        source = open_source(config.data)
        assert isinstance(source, FileSource)
        return cls(None, source.files)

    def stamp(self) -> str:
        return self.dataset.stamp() if self.dataset is not None else _facts(self.paths, hashed=False)

    def by_split(self) -> dict[str, list[str]]:
        """By the splits that are parts, by one name where there are none; of use in any folder."""
        if self.dataset is None:
            return {"": [str(path.absolute()) for path in self.paths]}
        return self.dataset.files()

    def digest(self) -> str:
        """The same on any machine."""
        if self.dataset is not None and self.dataset.data.is_hub_dataset:
            return self.dataset.stamp()
        return _facts([Path(file) for files in self.by_split().values() for file in files], hashed=True)


def _key(config: Config, stamp: str) -> str:
    data = config.data
    assert data.tokenizer is not None
    described = {
        "stream": stamp,
        "text_key": data.text_key,
        "kind": data.format,
        "split": list(data.split_names) or _share(config),
        "tokenizer": user_tokenizer_digest(data.tokenizer),
        "vocab_size": config.model.vocab_size,
        "buffer": data.shuffle_buffer,
    }
    return cache.key_of(described)


def _share(config: Config) -> float:
    train, evaluation, _ = config.data.split_weights
    return evaluation / (train + evaluation)


def _facts(paths: Sequence[Path], *, hashed: bool) -> str:
    """A digest of files on this machine: where they are, sizes and times; or `hashed`, names, sizes and content."""
    facts: list[Any] = []
    for path in paths:
        try:
            status = path.stat()
            content = cache.spread_digest(path, 2) if hashed else [str(path.absolute()), status.st_mtime_ns]
        except OSError as error:
            raise unreadable(path, error) from None
        facts.append([path.name, status.st_size, content])
    return cache.digest_of(facts)


def _build(folder: Path, files: _Files, config: Config) -> None:
    data = config.data
    assert data.tokenizer is not None
    tokenizer = open_user_tokenizer(data.tokenizer, config.model.vocab_size)
    export_user_tokenizer(data.tokenizer, tokenizer, folder / "tokenizer")
    by_split = files.by_split()
    shards = {name: [open_shard(file, data) for file in each] for name, each in by_split.items()}
    first = next(iter(shards))
    documents, after, whole = _first_block(shards[first], data.shuffle_buffer)
    held = HeldOut(*after, 0.0 if data.split_names else _share(config))

    def parts() -> Iterator[tuple[Part, Piece]]:
        for begin, pieces in documents:
            part: Part = "eval" if begin in held else "train"
            if part == "eval" or whole:
                yield from ((part, piece) for piece in pieces)
        for own, name in zip(tuple(PART_NAMES)[1:], list(shards)[1:], strict=False):
            for _, pieces in _first_block(shards[name], data.shuffle_buffer)[0]:
                yield from ((own, piece) for piece in pieces)

    facts: dict[str, Any] = dict(encode_documents(parts(), tokenizer, folder))
    digests = [files.digest(), cache.tokenizer_digest(folder / "tokenizer"), *(row["sha256"] for row in facts.values())]
    manifest: dict[str, Any] = {
        "dtype": cache.token_dtype(tokenizer.vocab_size).str,
        **facts,
        "files": by_split[first],
        "held": asdict(held),
        "whole": whole,
        "tokenizer": cache.tokenizer_digest(folder / "tokenizer"),
        "fingerprint": cache.fingerprint_of(digests),
    }
    cache.write_manifest(folder, manifest)


def _first_block(shards: Sequence[Shard], buffer: int) -> tuple[list[tuple[_Begin, list[Piece]]], _Begin, bool]:
    """The first documents, each with where it begins; where the next one does; and whether these are all."""
    documents: list[tuple[_Begin, list[Piece]]] = []
    characters = 0
    for number, shard in enumerate(shards):
        begin = 0
        for after, pieces in read_documents(shard, 0):
            if len(documents) >= buffer or characters >= BLOCK_CHARACTERS:
                return documents, (number, begin), False
            documents.append(((number, begin), pieces))
            characters += sum(piece.characters for piece in pieces)
            begin = after
    return documents, (len(shards), 0), True


def _prepared(entry: cache.Entry, config: Config, any_size: bool) -> PreparedStream:
    name, facts = config.data.name, entry.manifest
    parts = [part for part in needed_parts(config) if part != "train" or facts["whole"]]
    problems = too_short(entry, name, config, [] if any_size else parts)
    if problems:
        raise DataError(problems)
    tokens = {part: entry.tokens(part) for part in PARTS}
    held_out: dict[Part, int] = {part: len(row) for part, row in tokens.items() if part != "train" and len(row)}
    shown = f", {describe_sizes(held_out)} tokens" if held_out else ""
    return PreparedStream(
        name=name,
        tokenizer_path=entry.tokenizer_path,
        fingerprint=facts["fingerprint"],
        summary=f"{name}: a stream of {counted(len(facts['files']), 'file')}{shown}",
        files=tuple(facts["files"]),
        held=HeldOut(**facts["held"]),
        tokens=tokens,
        data=config.data,
    )
