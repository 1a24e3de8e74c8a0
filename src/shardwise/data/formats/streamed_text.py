"""Text that is tokenized while it is trained on; its first documents are read first, and held-out ones are cached.

Parts other than the training's are a block of documents each, at most, prepared as any text is. Weights of `data.split`
hold their share of the first block out; splits with names are parts, of which the first block is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.base.errors import DataError, raise_problems
from shardwise.base.units import counted
from shardwise.config import DataConfig
from shardwise.data import cache
from shardwise.data.formats import packing_cache, prepared_data
from shardwise.data.reading import text_sources
from shardwise.data.reading.content import read_errors
from shardwise.data.request import DataRequest
from shardwise.data.rows import PARTS, Part, TokenArray, json_digest, part_sizes_text
from shardwise.data.samples import batch, causal, packing, text_stream
from shardwise.data.tokens.encoding import document_marks, encode_documents
from shardwise.data.tokens.tokenizer import Tokenizer, keep_user_tokenizer, user_tokenizer_digest

_DocumentBegin = tuple[int, int]  # number of a shard, and the offset at which a document begins in it


@dataclass(frozen=True)
class _PreparedStream(prepared_data.PreparedText):
    """A stream.

    Attributes:
        tokens: tokens of the parts other than the training's; of that one none, or all if they are less than a block.
            So `count` is 0 for a training part of more than a block, whose number of tokens is not known before it is
            read.
        held_out: documents of these files that are not trained on.
    """

    _: KW_ONLY
    name: str
    files: tuple[str, ...]
    held_out: text_stream.HeldOut
    data: DataConfig

    def beginning(self, part: Part, tokens: int) -> list[int]:
        if part != "train":
            return super().beginning(part, tokens)
        assert self.tokenizer_path is not None
        # The order of an epoch is not asked for: any document of the training part shows what the model reads.
        _, pieces = next(text_stream.stream_documents(self._shards()[0], 0))
        tokenizer = Tokenizer.load(self.tokenizer_path)
        first = tokenizer.encode_rows([pieces[0].text])
        row, _ = document_marks(self.data, tokenizer).put(*first, [False], begun=False)
        return [int(token) for token in row[:tokens]]

    def batches(
        self, request: DataRequest, part: Part, *, evaluation: bool = False, tail: bool = False
    ) -> batch.Batches | None:
        if part != "train":
            return super().batches(request, part, tail=tail)
        if evaluation:
            raise DataError(
                f"data.streaming (true) must be false where the training part of {self.name} is evaluated: set it, or "
                "give --part eval"
            )
        assert self.tokenizer_path is not None
        length = request.sequence_length
        ends = prepared_data.document_ends(request.data, self.tokenizer_path)
        packs_documents = request.data.packs_documents

        def cut(row: TokenArray, seed: int) -> batch.Batches | None:
            if not packs_documents:
                # With the tail, as a block may have fewer tokens than a sample.
                return causal.TokenBatches(row, length, seed, tail=True, ends=ends)
            assert ends is not None, "documents are told apart"
            samples = packing.PackedSamples.from_bounds(packing.document_bounds(row, ends.token), length)
            return prepared_data.packed_batches(request, row, samples, seed)

        tokenizer = Tokenizer.load(self.tokenizer_path)
        stream = text_stream.TextStream(
            self._shards(),
            tokenizer,
            document_marks(self.data, tokenizer),
            cut,
            seed=request.seed,
            buffer=request.data.shuffle_buffer,
            held_out=self.held_out,
        )
        return text_stream.StreamBatches(stream, self.name)

    def _shards(self) -> list[text_sources.TextShard]:
        return [text_sources.open_text_shard(file, self.data) for file in self.files]


def open_stream(request: DataRequest) -> _PreparedStream:
    """Opens text that is streamed; its first documents are read if the data cache does not know them."""
    source = text_sources.open_text_source(request.data)
    # Built-in texts, which are small, are refused by the configuration.
    assert isinstance(source, text_sources.FileSource | text_sources.ColumnSource)
    if isinstance(source, text_sources.ColumnSource):
        stamp = source.stamp()
    else:
        stamp = _digest_of_files(source.files, hashed=False)
    entry = cache.open_or_build_tokens(
        request.root,
        _key(request, stamp),
        lambda folder: _build(folder, source, request),
        f"{request.data.name}: the first documents of a stream",
        request.announce,
    )
    left_out = source.left_out_note() if isinstance(source, text_sources.FileSource) else ""
    return packing_cache.with_packed_samples(request, _prepared(entry, request, left_out))


def _key(request: DataRequest, stamp: str) -> str:
    data = request.data
    assert data.tokenizer is not None
    return cache.cache_key(
        {
            "stream": stamp,
            "text_key": data.text_key,
            "kind": "by content" if data.format == "auto" else data.format,
            "split": list(data.split_names) or _share(request),
            "tokenizer": user_tokenizer_digest(data.tokenizer),
            "vocab_size": request.vocab_size,
            "buffer": data.shuffle_buffer,
            **data.chosen_marks,
        }
    )


def _share(request: DataRequest) -> float:
    """The share of the first block that is held out; text has no test part."""
    train, evaluation, _ = request.data.split_weights
    return evaluation / (train + evaluation)


def _digest_of_files(paths: Sequence[Path], *, hashed: bool) -> str:
    """A digest of names and sizes of files on this machine, and of their paths and times or, `hashed`, content.

    Paths and times are found at once; with the content, the digest is the same on any machine.
    """
    facts: list[Any] = []
    for path in paths:
        with read_errors(path):
            status = path.stat()
            content: Any = [str(path.absolute()), status.st_mtime_ns]
            if hashed:
                # The first and the last block: a stream may have thousands of files.
                content = cache.spread_digest(path, 2)
        facts.append([path.name, status.st_size, content])
    return json_digest(facts)


def _build(
    folder: Path, source: text_sources.FileSource | text_sources.ColumnSource, request: DataRequest
) -> dict[str, Any]:
    announce = request.announce
    if isinstance(source, text_sources.FileSource):
        reading = source.described()
        source.require_text()  # a file that holds no text is refused now, not in the middle of the training
        if announce is not None:
            announce(f"preparing the data {source.name}: {reading}")
    data = request.data
    assert data.tokenizer is not None
    tokenizer = keep_user_tokenizer(data.tokenizer, request.vocab_size, folder / "tokenizer", announce)
    if isinstance(source, text_sources.ColumnSource):
        by_split = source.files_by_split()
    else:  # paths are absolute, as another run may start in another folder
        by_split = {"": [str(path.absolute()) for path in source.files]}
    shards = {name: [text_sources.open_text_shard(file, data) for file in files] for name, files in by_split.items()}
    first = next(iter(shards))
    block = _first_block(shards[first], data.shuffle_buffer)
    # Splits with names are the parts, and nothing of the first one is held out.
    held_out = text_stream.HeldOut(*block.stop, 0.0 if data.split_names else _share(request))

    def parts() -> Iterator[tuple[Part, text_sources.TextPiece]]:
        # Training text is prepared only to count it, if there is less than a block.
        for begin, pieces in block.documents:
            if begin in held_out:
                yield from (("eval", piece) for piece in pieces)
            elif block.is_all:
                yield from (("train", piece) for piece in pieces)
        for part, name in zip(PARTS[1:], list(shards)[1:], strict=False):
            for _, pieces in _first_block(shards[name], data.shuffle_buffer).documents:
                yield from ((part, piece) for piece in pieces)

    facts: dict[str, Any] = dict(encode_documents(parts(), tokenizer, document_marks(data, tokenizer), folder))
    if isinstance(source, text_sources.ColumnSource) and data.is_hub_dataset:
        content = source.stamp()  # a commit, the same on any machine
    else:
        content = _digest_of_files([Path(file) for files in by_split.values() for file in files], hashed=True)
    digest = cache.tokenizer_digest(folder / "tokenizer")
    digests = [content, digest, *(row["sha256"] for row in facts.values())]
    if data.chosen_marks:
        digests.append(json_digest(data.chosen_marks))
    return {
        "dtype": cache.token_dtype(tokenizer.vocab_size).str,
        **facts,
        "files": by_split[first],
        "held": asdict(held_out),
        "whole": block.is_all,
        "tokenizer": digest,
        "fingerprint": cache.data_fingerprint(digests),
    }


@dataclass(frozen=True)
class _FirstBlock:
    """The first documents of a split, each after the place where it begins; `stop` is where the next one begins."""

    documents: Sequence[tuple[_DocumentBegin, list[text_sources.TextPiece]]]
    stop: _DocumentBegin
    is_all: bool


def _first_block(shards: Sequence[text_sources.TextShard], buffer: int) -> _FirstBlock:
    documents: list[tuple[_DocumentBegin, list[text_sources.TextPiece]]] = []
    characters = 0
    for number, shard in enumerate(shards):
        begin = 0
        for stop, pieces in text_stream.stream_documents(shard, 0):
            if len(documents) >= buffer or characters >= text_sources.BLOCK_CHARACTERS:
                return _FirstBlock(documents, (number, begin), is_all=False)
            documents.append(((number, begin), pieces))
            characters += sum(piece.characters for piece in pieces)
            begin = stop
    return _FirstBlock(documents, (len(shards), 0), is_all=True)


def _prepared(entry: cache.CacheEntry, request: DataRequest, left_out: str) -> _PreparedStream:
    name = request.data.name
    facts = entry.manifest
    parts = [part for part in request.needed_parts if part != "train" or facts["whole"]]
    problems = prepared_data.too_short_parts(request, entry, name, parts)
    raise_problems(DataError, problems)
    tokens = {part: entry.tokens(part) for part in PARTS}
    sizes: dict[Part, int] = {part: len(row) for part, row in tokens.items() if part != "train" and len(row)}
    summary = f"{name}: a stream of {counted(len(facts['files']), 'file')}"
    if sizes:
        summary += f", {part_sizes_text(sizes)} tokens"
    return _PreparedStream(
        name=name,
        tokenizer_path=entry.tokenizer_path,
        fingerprint=facts["fingerprint"],
        summary=summary + left_out,
        files=tuple(facts["files"]),
        held_out=text_stream.HeldOut(**facts["held"]),
        tokens=tokens,
        vocab_size=request.vocab_size,
        data=request.data,
    )
