"""Megatron's data sets: one, or several in a blend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.config import Config, DataConfig
from shardwise.data.cache import digest_of
from shardwise.data.formats.common import (
    Announce,
    in_pairs,
    needed_parts,
    pair_batches,
    row_batches,
    shortage,
    tokenizer_in_cache,
    tokenizer_of_tokens,
    without_tokenizer,
)
from shardwise.data.formats.inspection import (
    SAMPLE_TOKENS,
    Decoder,
    Inspection,
    Lengths,
    describe_ids,
    spread,
    token_notes,
)
from shardwise.data.parts import PART_NAMES, Part, describe_sizes, part_bounds
from shardwise.data.reading.manifest import of_prefix, read_manifest
from shardwise.data.reading.megatron import IndexedFile, count_sequences, prefix_of
from shardwise.data.samples.batch import Batches
from shardwise.data.samples.blend import BlendedBatches
from shardwise.data.samples.causal import DocumentEnds
from shardwise.data.samples.documents import DocumentBatches, Documents
from shardwise.data.samples.hashing import mix_integer
from shardwise.data.tokens.tokenizer import PairTokens
from shardwise.errors import DataError
from shardwise.units import counted, size

_LENGTHS = 1 << 20
"""Documents whose lengths an inspection looks at, at most."""
_BLOCKS, _BLOCK = 256, 1 << 16
"""Blocks of tokens in which it looks for the lowest and the highest, and tokens of each."""


@dataclass(frozen=True)
class PreparedDocuments:
    """`PreparedData` of one Megatron data set, or of several in a blend.

    Attributes:
        weights: of the data sets.
        parts: the documents of each part in each of the data sets.
        vocab_size: the tokenizer's, or the model's where there is none.
    """

    tokenizer_path: Path | None
    weights: tuple[float, ...]
    parts: Mapping[Part, tuple[Documents, ...]]
    fingerprint: str
    vocab_size: int
    summary: str
    pair_tokens: PairTokens | None = None

    def count(self, part: Part) -> int:
        return sum(map(len, self.parts[part]))

    def beginning(self, part: Part, tokens: int) -> list[int]:
        for documents in self.parts[part]:
            if len(documents):
                return documents.beginning(tokens)
        return []

    def batches(self, config: Config, part: Part, *, evaluation: bool = False, tail: bool = False) -> Batches | None:
        """As `PreparedData`; a data set whose part holds less than one sample is left out of it."""
        found = [
            (weight, batches)
            for number, (weight, documents) in enumerate(zip(self.weights, self.parts[part], strict=True))
            if (batches := self._of_one(config, documents, number, evaluation, tail)) is not None
        ]
        if len(found) < 2:
            return found[0][1] if found else None
        weights, sources = zip(*found, strict=True)
        return BlendedBatches(weights, sources)

    def _of_one(
        self, config: Config, documents: Documents, number: int, evaluation: bool, tail: bool
    ) -> Batches | None:
        seed = config.train.seed
        if number:  # two data sets of one size must not go through it in one order
            seed = mix_integer(seed, number)
        if self.pair_tokens is not None:
            sentences = documents.sentences
            return pair_batches(config, documents, sentences, self.pair_tokens, self.vocab_size, seed)
        if evaluation:  # in the order of the file, as any other program reads it
            return row_batches(config, documents, self.tokenizer_path, seed, tail=tail)
        length = config.train.sequence_length
        if len(documents) <= length:
            return None
        return DocumentBatches(documents, length, seed, ends=DocumentEnds.of(config, self.tokenizer_path))


def open_data(config: Config, root: Path, announce: Announce, *, any_size: bool) -> PreparedDocuments:
    """Opens the data sets of `config`; only the tokenizer, where one is named, is kept in the cache `root`.

    Raises:
        DataError: with every problem of the files, of the tokenizer and of the parts' sizes.
    """
    problems = without_tokenizer(config)
    files: list[IndexedFile] = []
    for _, prefix in config.data.weighted_prefixes:
        try:
            files.append(IndexedFile.open(prefix))
        except DataError as error:
            problems += error.problems
    tokenizer = tokenizer_of_tokens(config, (of_prefix(file.prefix) for file in files), problems)
    if problems:
        raise DataError(problems)
    parts = _parts(files, config)
    if not any_size and (problems := _too_short(parts, config)):
        raise DataError(problems)
    weights = tuple(weight for weight, _ in config.data.weighted_prefixes)
    bounds = {part: [(chosen.first, chosen.after) for chosen in documents] for part, documents in parts.items()}
    return PreparedDocuments(
        tokenizer_path=tokenizer_in_cache(config, tokenizer, root),
        weights=weights,
        parts=parts,
        fingerprint=digest_of({"digests": [file.digest for file in files], "weights": weights, "bounds": bounds}),
        vocab_size=config.model.vocab_size if tokenizer is None else tokenizer.vocab_size,
        summary=_summary(files, parts, config),
        pair_tokens=tokenizer.pair_tokens() if tokenizer is not None and in_pairs(config) else None,
    )


def glance(config: Config) -> str:
    """How many sequences there are, by the headers of the .idx files."""
    sequences = [count_sequences(prefix) for _, prefix in config.data.weighted_prefixes]
    return f"{counted(sum(sequences), 'sequence')} in Megatron's format, as the headers of .idx files say"


def inspect(data: DataConfig, tokenizer: str | None, samples: int) -> Inspection:
    """A data set of PREFIX.bin and PREFIX.idx."""
    assert data.path is not None
    prefix = prefix_of(data.path)
    file = IndexedFile.open(prefix)
    record = read_manifest(of_prefix(prefix))
    decoder = Decoder.find(tokenizer, record)
    number, total = file.num_documents, len(file.tokens)
    chosen = spread(number, _LENGTHS)
    lengths = file.starts(chosen + 1) - file.starts(chosen)
    empty = int(np.count_nonzero(lengths == 0))
    blocks = [file.tokens[at : at + _BLOCK] for at in _block_starts(total)]
    seen = sum(map(len, blocks))
    lowest, highest = (min(int(b.min()) for b in blocks), max(int(b.max()) for b in blocks)) if seen else (0, 0)
    found = []
    for document in range(min(samples, number)):
        start, end = file.starts(np.array([document, document + 1])).tolist()
        found.append(decoder.sample(document, file.tokens[start : min(end, start + SAMPLE_TOKENS)]))
    size_ = sum(Path(f"{prefix}{suffix}").stat().st_size for suffix in (".bin", ".idx"))
    counts = {
        "documents": number,
        "sequences": len(file.sizes),
        "tokens": total,
        "dtype": file.tokens.dtype.name,
        "empty_documents": empty,
        "ids": {"lowest": lowest, "highest": highest, "looked_at": seen},
    }
    of_those = "" if len(chosen) == number else f" of {len(chosen):,} that were looked at"
    rows = [
        ("documents", f"{number:,}" + (f", {empty:,} without tokens{of_those}" if empty else "")),
        ("sequences", f"{len(file.sizes):,}"),
        ("tokens", f"{total:,}, {file.tokens.dtype.name}"),
        ("ids", describe_ids(lowest, highest, seen, total)),
    ]
    return Inspection(
        str(prefix), "Megatron .bin and .idx", size_, rows, counts,
        Lengths.of("tokens of a document", lengths, number) if number else None,
        found, record, token_notes(decoder, record, lowest, highest),
    )  # fmt: skip


def _block_starts(total: int) -> list[int]:
    """Where to look: everywhere, or at blocks spread over what is too much."""
    if total <= _BLOCKS * _BLOCK:
        return list(range(0, total, _BLOCK))
    return [(total - _BLOCK) * number // (_BLOCKS - 1) for number in range(_BLOCKS)]


def _parts(files: Sequence[IndexedFile], config: Config) -> dict[Part, tuple[Documents, ...]]:
    cuts = [part_bounds(file.num_documents, config.data.split_weights) for file in files]
    return {
        part: tuple(
            Documents(file, cut[number], cut[number + 1], config.model.vocab_size)
            for file, cut in zip(files, cuts, strict=True)
        )
        for number, part in enumerate(PART_NAMES)
    }


def _too_short(parts: Mapping[Part, tuple[Documents, ...]], config: Config) -> list[str]:
    """Training needs a sample of each data set; an evaluation one of any."""
    problems = []
    for part in needed_parts(config):
        short = []
        for documents in parts[part]:
            found = shortage(config, len(documents), documents.sentences if in_pairs(config) else None)
            if found is not None:
                held, least = found
                held += f" in {counted(documents.count, 'document')}"
                short.append(
                    f"the {PART_NAMES[part]} part of {config.data.key} {documents.file.prefix} ({held} at "
                    f"data.split={config.data.split}) must be at least {least}: give more documents, a shorter "
                    "sequence or another split"
                )
        if part == "train" or len(short) == len(parts[part]):
            problems += short
    return problems


def _summary(files: Sequence[IndexedFile], parts: Mapping[Part, tuple[Documents, ...]], config: Config) -> str:
    if config.data.blend is None:
        name = config.data.name
    else:
        total = sum(weight for weight, _ in config.data.weighted_prefixes)
        name = " + ".join(f"{weight / total:.3g} × {prefix}" for weight, prefix in config.data.weighted_prefixes)
    number = sum(file.num_documents for file in files)
    tokens = {part: sum(map(len, documents)) for part, documents in parts.items()}
    held = size(sum(file.tokens.nbytes for file in files))
    return f"{name}: {held}, {counted(number, 'document')}, {describe_sizes(tokens)} tokens"
