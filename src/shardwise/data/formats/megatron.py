"""From the `data` section to the documents of one Megatron data set, or of several in a blend."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.config import Config, DataConfig
from shardwise.data.formats.common import (
    in_pairs,
    kept_tokenizer,
    padding_problems,
    pair_batches,
    shortage,
    without_tokenizer,
)
from shardwise.data.reading.manifest import of_prefix, tokenizer_problems
from shardwise.data.reading.megatron import IndexedFile, is_indexed
from shardwise.data.samples.batch import Batches, SampledBatches
from shardwise.data.samples.blend import BlendedBatches
from shardwise.data.samples.causal import DocumentEnds
from shardwise.data.samples.documents import DocumentBatches, Documents
from shardwise.data.samples.hashing import mix_integer
from shardwise.data.samples.rows import TokenBatches
from shardwise.data.tokens.split import PART_NAMES, Part, part_bounds
from shardwise.data.tokens.tokenizer import PairTokens, Tokenizer, open_user_tokenizer
from shardwise.errors import DataError, listing
from shardwise.units import count, size


@dataclass(frozen=True)
class PreparedDocuments:
    """`PreparedData` of one Megatron data set, or of several in a blend.

    Attributes:
        weights: of the data sets. parts: of each part, its documents in each of them. vocab_size: the tokenizer's, or
        the model's where there is none.
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
    ) -> SampledBatches | None:
        seed = config.train.seed
        if number:  # two data sets of one size must not go through it in one order
            seed = mix_integer(seed, number)
        if self.pair_tokens is not None:
            sentences = documents.sentences
            return pair_batches(config, documents, sentences, self.pair_tokens, self.vocab_size, seed)
        length = config.train.sequence_length
        if len(documents) <= (1 if tail else length):
            return None
        ends = DocumentEnds.of(config, self.tokenizer_path)
        if evaluation:  # in the order of the file, as any other program reads it
            return TokenBatches(documents, length, seed, tail=tail, ends=ends)
        return DocumentBatches(documents, length, seed, ends=ends)


def reads_indexed(data: DataConfig) -> bool:
    """Whether the `data` section names Megatron data sets: by format, as a blend, or by what lies at the path."""
    if data.format == "megatron" or data.blend is not None:
        return True
    try:
        return data.format == "auto" and data.path is not None and is_indexed(data.path)
    except OSError:
        return False  # who opens the path tells of it


def prepare_indexed(config: Config, root: Path, *, any_size: bool) -> PreparedDocuments:
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
    tokenizer: Tokenizer | None = None
    if config.data.tokenizer is not None:
        try:
            tokenizer = open_user_tokenizer(config.data.tokenizer, config.model.vocab_size, pairs=in_pairs(config))
        except DataError as error:
            problems += error.problems
    problems += tokenizer_problems(tokenizer, config.data.tokenizer, (of_prefix(file.prefix) for file in files))
    if problems:
        raise DataError(problems)
    special = tokenizer.pair_tokens() if tokenizer is not None and in_pairs(config) else None
    parts = _parts(files, config)
    problems = padding_problems(special, config) + ([] if any_size else _too_short(parts, config))
    if problems:
        raise DataError(problems)
    weights = tuple(weight for weight, _ in config.data.weighted_prefixes)
    bounds = {part: [(each.first, each.after) for each in documents] for part, documents in parts.items()}
    described = {"digests": [file.digest for file in files], "weights": weights, "bounds": bounds}
    return PreparedDocuments(
        tokenizer_path=None if tokenizer is None else kept_tokenizer(config, tokenizer, root),
        weights=weights,
        parts=parts,
        fingerprint=hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest(),
        vocab_size=config.model.vocab_size if tokenizer is None else tokenizer.vocab_size,
        summary=_summary(files, parts, config),
        pair_tokens=special,
    )


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
    for part in ("train", "eval") if config.train.eval_every > 0 else ("train",):
        short = []
        for documents in parts[part]:
            found = shortage(config, len(documents), documents.sentences if in_pairs(config) else None)
            if found is not None:
                held, least = found
                held += f" in {documents.count:,} document{'' if documents.count == 1 else 's'}"
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
    shown = [f"{count(tokens[part])} {PART_NAMES[part]}" for part in PART_NAMES if part != "test" or tokens[part]]
    return (
        f"{name}: {size(sum(file.tokens.nbytes for file in files))}, {number:,} "
        f"document{'' if number == 1 else 's'}, {listing(shown)} tokens"
    )
