"""Data that are ready for a run, and the checks of a configuration that several formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.base.errors import DataError
from shardwise.base.units import counted
from shardwise.config import Config, DataConfig, FamilyConfig
from shardwise.data import cache
from shardwise.data.parts import PART_NAMES, Part
from shardwise.data.reading.manifest import tokenizer_problems
from shardwise.data.samples.batch import Batches, TokenArray, Tokens
from shardwise.data.samples.causal import DocumentEnds, TokenBatches, without_end
from shardwise.data.samples.sentence_pairs import SentencePairBatches, chunk_room
from shardwise.data.samples.sentences import ChunkIndex, Sentences
from shardwise.data.tokens.encoding import DocumentMarks
from shardwise.data.tokens.tokenizer import (
    PairTokens,
    Tokenizer,
    export_user_tokenizer,
    open_user_tokenizer,
    user_tokenizer_digest,
)

Announce = Callable[[str], None] | None
"""Is called with one line when something is fetched or built."""


@dataclass(frozen=True)
class PreparedData(ABC):
    """Tokens of a training, an evaluation and, where there is one, a test part.

    Attributes:
        tokenizer_path: a folder that `transformers.AutoTokenizer.from_pretrained` and `Tokenizer.load` open; None where
            the data are ids and no tokenizer is named.
        fingerprint: a digest of the data: equal data have equal fingerprints, on any machine.
        summary: one line for the user.
    """

    tokenizer_path: Path | None
    fingerprint: str
    summary: str

    @abstractmethod
    def count(self, part: Part) -> int:
        """Tokens of a part."""

    @abstractmethod
    def beginning(self, part: Part, tokens: int) -> list[int]:
        """The first tokens of a part; fewer where it has no more."""

    @abstractmethod
    def batches(self, config: Config, part: Part, *, evaluation: bool = False, tail: bool = False) -> Batches | None:
        """The batches of a part that the model's family trains on; None where it holds less than one sample.

        Args:
            evaluation: `eval_batches` alone is called, and gives the same samples whatever `train.seed` is (except for
                what BERT masks).
            tail: what is left after the last whole sample is a sample too.
        """


@dataclass(frozen=True)
class PreparedText(PreparedData):
    """Tokenized text, which is one row of tokens in each part.

    Attributes:
        tokens: of each part.
        vocab_size: of the tokenizer, at most the model's; the model's where there is no tokenizer.
        sentences: of each part, where samples are sentence pairs.
        pair_tokens: the special tokens that pairs are made with, likewise.
    """

    tokens: Mapping[Part, TokenArray]
    vocab_size: int
    sentences: Mapping[Part, Sentences] = field(default_factory=dict)
    pair_tokens: PairTokens | None = None

    def count(self, part: Part) -> int:
        return len(self.tokens[part])

    def beginning(self, part: Part, tokens: int) -> list[int]:
        return [int(token) for token in self.tokens[part][:tokens]]

    def batches(self, config: Config, part: Part, *, evaluation: bool = False, tail: bool = False) -> Batches | None:
        row, seed = self.tokens[part], config.train.seed
        if self.pair_tokens is not None:
            return pair_batches(config, row, self.sentences[part], self.pair_tokens, self.vocab_size, seed)
        return row_batches(config, row, self.tokenizer_path, seed, tail=tail)


def make_batches(config: Config, data: PreparedData, part: Part) -> Batches | None:
    """The batches of one part of `data`; None where it holds less than one sample (two for sentence pairs)."""
    return data.batches(config, part, evaluation=part != "train")


def make_evaluation(config: Config, data: PreparedData, part: Part) -> Batches | None:
    """As `make_batches`, with what is left after the last whole sample: `eval_batches` then gives every token once.

    None where the part holds less than one target (two samples for sentence pairs).
    """
    return data.batches(config, part, evaluation=True, tail=True)


def row_batches(config: Config, row: Tokens, tokenizer: Path | None, seed: int, *, tail: bool) -> TokenBatches | None:
    """Batches of a causal model over a row of tokens; None where it holds less than one sample."""
    length = config.train.sequence_length
    if len(row) <= (1 if tail else length):
        return None
    return TokenBatches(row, length, seed, tail=tail, ends=DocumentEnds.of(config, tokenizer))


def pair_batches(
    config: Config, tokens: Tokens, sentences: Sentences, special: PairTokens, vocab_size: int, seed: int
) -> Batches | None:
    """Batches of sentence pairs; None of fewer than two samples, as the second sentence may be of another sample."""
    length = config.train.sequence_length
    if ChunkIndex(sentences, chunk_room(length)).num_chunks < 2:
        return None
    return SentencePairBatches(
        tokens,
        sentences,
        length,
        seed,
        special=special,
        vocab_size=vocab_size,
        masked_fraction=config.data.masked_fraction,
        max_predictions=config.data.predictions(length),
    )


def announce_note(tokenizer: Tokenizer, announce: Announce) -> None:
    """Announces what the user must know of a tokenizer, if there is anything."""
    if announce is not None and tokenizer.note is not None:
        announce(tokenizer.note)


def document_marks(data: DataConfig, tokenizer: Tokenizer) -> DocumentMarks:
    """The tokens that each document of text begins and ends with; DataError where the tokenizer lacks one."""
    return DocumentMarks.of(tokenizer, append_eod=data.append_eod, prepend_bos=data.prepend_bos)


def mark_problems(data: DataConfig) -> list[str]:
    """The problems of keys that ask for marks of documents, where the data are tokens."""
    return data.refused_marks(f"{data.key} ({data.name}), whose tokens are read as they are")


def in_pairs(config: Config) -> bool:
    """Whether samples are pairs of sentences."""
    return "nsp" in config.model.objectives


def require_sentence_pairs(config: Config) -> FamilyConfig:
    """The model that shards train; DataError where it is another one."""
    if config.shapes is None or not config.shapes.predicts_sentences:
        raise DataError(
            f"model.family ({config.model.family}) must be bert where data.path ({config.data.name}) is HDF5 shards, "
            "which hold sentence pairs with masked tokens: name text, or Megatron's .bin and .idx"
        )
    return config.shapes


def without_tokenizer(config: Config) -> list[str]:
    """Which keys need a tokenizer where data are tokens and none is named."""
    if config.data.tokenizer is not None:
        return []
    needs = f"needs data.tokenizer, as {config.data.key} {config.data.name} holds tokens alone: name what made them"
    problems = without_end(config)
    if in_pairs(config):
        problems.append(f"model.family ({config.model.family}) {needs}, for its [CLS], [SEP], [MASK] and [PAD]")
    if config.log.sample_prompt is not None:
        problems.append(f"log.sample_prompt ({config.log.sample_prompt!r}) {needs}")
    return problems


def tokenizer_of_tokens(config: Config, manifests: Iterable[Path], problems: list[str]) -> Tokenizer | None:
    """The tokenizer that `data.tokenizer` names, where data are tokens already; None where it names none.

    Args:
        manifests: the files beside the data that say which tokenizer made them.
        problems: what is wrong with the tokenizer is appended; the result must not be used then.
    """
    named = config.data.tokenizer
    if named is None:
        return None
    try:
        tokenizer = open_user_tokenizer(named, config.model.vocab_size, pairs=in_pairs(config))
    except DataError as error:
        problems += error.problems
        return None
    if in_pairs(config):
        problems += padding_problems(tokenizer.pair_tokens(), config)
    problems += tokenizer_problems(tokenizer, named, manifests)
    return tokenizer


def tokenizer_in_cache(config: Config, tokenizer: Tokenizer | None, root: Path) -> Path | None:
    """The folder in the cache `root` that holds `tokenizer`, which `data.tokenizer` names; None where there is none."""
    path = config.data.tokenizer
    if tokenizer is None or path is None:
        return None

    def build(folder: Path) -> dict[str, str]:
        export_user_tokenizer(path, tokenizer, folder / "tokenizer")
        return {"tokenizer": cache.tokenizer_digest(folder / "tokenizer")}

    key = user_tokenizer_digest(path)[:32]
    return cache.open_or_build(root, "tokenizers", key, cache.has_its_tokenizer, build).tokenizer_path


def padding_problems(special: PairTokens | None, config: Config) -> list[str]:
    """Whether the model pads with the tokenizer's [PAD], where samples are sentence pairs."""
    chosen = getattr(config.model, "pad_token_id", None)
    if special is None or chosen == special.pad:
        return []
    return [
        f"model.pad_token_id ({chosen}) must be the tokenizer's [PAD] ({special.pad}): set "
        f"model.pad_token_id={special.pad}"
    ]


def needed_parts(config: Config) -> list[Part]:
    """The parts that training reads."""
    return ["train", "eval"] if config.train.eval_every > 0 else ["train"]


def shortage(
    config: Config, part: Part, name: object, tokens: int, sentences: Sentences | None, documents: int | None = None
) -> list[str]:
    """The problem of a part of the data `name` that holds less than one sample, or for sentence pairs two.

    Args:
        tokens, sentences: of the part; `sentences` where samples are pairs of them.
        documents: of the part, where the user counts documents.
    """
    length = config.train.sequence_length
    enough, held = tokens > length, f"{tokens:,} tokens"
    least = f"one sample of train.sequence_length + 1 ({length + 1:,} tokens)"
    if sentences is not None:
        room = chunk_room(length)
        chunks = ChunkIndex(sentences, room).num_chunks
        enough, held = chunks >= 2, f"{held} in {chunks} samples"
        least = f"two samples of about train.sequence_length - 3 ({room:,} tokens)"
    if enough:
        return []
    if documents is not None:
        held += f" in {counted(documents, 'document')}"
    return [
        f"the {PART_NAMES[part]} part of {config.data.key} {name} ({held} at data.split={config.data.split}) must be "
        f"at least {least}: give more {'text' if documents is None else 'documents'}, a shorter sequence or another "
        "split"
    ]


def entry_problems(config: Config, entry: cache.Entry, name: str, parts: Iterable[Part]) -> list[str]:
    """As `shortage`, of these parts of an entry of the cache."""
    return [
        problem
        for part in parts
        for problem in shortage(
            config, part, name, entry.manifest[part]["tokens"], entry.sentences(part) if in_pairs(config) else None
        )
    ]
