"""Data that are ready for a run, and the checks of a configuration that several formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardwise.base import units
from shardwise.base.errors import ConfigError, DataError, see
from shardwise.config import Config, DataConfig
from shardwise.data import cache
from shardwise.data.request import DataRequest
from shardwise.data.rows import PART_NAMES, PairTokens, Part, Sentences
from shardwise.data.samples import batch, causal
from shardwise.data.tokens.tokenizer import Tokenizer, export_user_tokenizer, open_user_tokenizer, user_tokenizer_digest
from shardwise.data.tokens.tokenizer_files import resolve_tokenizer

if TYPE_CHECKING:
    from shardwise.data.samples import packing

# Digits of a digest in messages: enough to tell two apart.
_SHOWN_DIGITS = 12


@dataclass(frozen=True)
class PreparedData(ABC):
    """Data ready for a run: tokens of a training, an evaluation and, if there is one, a test part."""

    # Folder that `transformers.AutoTokenizer.from_pretrained` and `Tokenizer.load` open; None if the data are ids and
    # no tokenizer is named.
    tokenizer_path: Path | None
    fingerprint: str  # digest of the data: equal data have equal fingerprints, on any machine
    summary: str  # one line for the user

    @property
    def source_fingerprints(self) -> dict[str, str]:
        """Fingerprints of the sources of a mixture, by name; empty for other data."""
        return {}

    @abstractmethod
    def count(self, part: Part) -> int:
        """Tokens of a part."""

    @abstractmethod
    def beginning(self, part: Part, tokens: int) -> list[int]:
        """The first tokens of a part; all if it has no more."""

    @abstractmethod
    def batches(
        self, request: DataRequest, part: Part, *, evaluation: bool = False, tail: bool = False
    ) -> batch.Batches | None:
        """The batches of a part that the model's family trains on; None if it holds less than one sample.

        Args:
            evaluation: True if `eval_batches` alone will be called, which gives the same samples whatever `train.seed`
                is (except for the tokens that BERT masks).
            tail: True if the tokens after the last complete sample are a sample too.
        """


@dataclass(frozen=True)
class PreparedText(PreparedData):
    """Tokenized text, which is one row of tokens in each part.

    Attributes:
        vocab_size: vocabulary of the tokenizer, at most the model's; the model's if there is no tokenizer.
        sentences: bounds of each part's sentences; empty unless samples are sentence pairs.
        pair_tokens: special tokens that pairs are made with; None unless samples are sentence pairs.
        packed: samples of each part that has tokens; empty unless whole documents are packed.
    """

    tokens: Mapping[Part, batch.TokenRow]
    vocab_size: int
    sentences: Mapping[Part, Sentences] = field(default_factory=dict)
    pair_tokens: PairTokens | None = None
    packed: Mapping[Part, packing.PackedSamples] = field(default_factory=dict)

    def count(self, part: Part) -> int:
        return len(self.tokens[part])

    def beginning(self, part: Part, tokens: int) -> list[int]:
        return [int(token) for token in self.tokens[part][:tokens]]

    def batches(
        self, request: DataRequest, part: Part, *, evaluation: bool = False, tail: bool = False
    ) -> batch.Batches | None:
        row = self.tokens[part]
        seed = request.seed
        if self.pair_tokens is not None:
            return pair_batches(request, row, self.sentences[part], self.pair_tokens, self.vocab_size, seed)
        together = 1 if evaluation else request.samples_together
        if self.packed:
            return packed_batches(request, row, self.packed.get(part), seed, together)
        return row_batches(request, row, self.tokenizer_path, seed, tail=tail, together=together)


def make_batches(config: Config, data: PreparedData, part: Part) -> batch.Batches | None:
    """The batches of one part of `data`; None if it holds less than one sample (two for sentence pairs).

    They read what is prepared, so that the request's folder of the cache does not matter.
    """
    return data.batches(DataRequest.of(config), part, evaluation=part != "train")


def make_evaluation_batches(config: Config, data: PreparedData, part: Part) -> batch.Batches | None:
    """The batches of one part of `data` for an evaluation of all of it: `eval_batches` gives every token once.

    The tokens after the last complete sample are a sample too. None if the part holds less than one target (two samples
    for sentence pairs).
    """
    return data.batches(DataRequest.of(config), part, evaluation=True, tail=True)


def row_batches(
    request: DataRequest, row: batch.TokenSource, tokenizer: Path | None, seed: int, *, tail: bool, together: int = 1
) -> causal.TokenBatches | None:
    """Batches of a causal model over a row of tokens; None if it holds less than one block of samples."""
    length = request.sequence_length
    # A block has one token more than it reads, the last target; the shortest tail reads one.
    shortest = 1 if tail else length * together
    if len(row) <= shortest:
        return None
    ends = document_ends(request.data, tokenizer)
    return causal.TokenBatches(row, length, seed, tail=tail, ends=ends, together=together)


def packed_batches(
    request: DataRequest, row: batch.TokenSource, packed: packing.PackedSamples | None, seed: int, together: int = 1
) -> packing.PackedBatches | None:
    """Batches of packed samples; None if there is none, which has every token, so that there is no tail."""
    if packed is None or not packed.facts.samples:
        return None
    from shardwise.data.samples import packing

    samples = packed.joined(request.sequence_length // packed.length)
    return packing.PackedBatches(row, samples, seed, together)


def pair_batches(
    request: DataRequest,
    tokens: batch.TokenSource,
    sentences: Sentences,
    special: PairTokens,
    vocab_size: int,
    seed: int,
) -> batch.Batches | None:
    """Batches of sentence pairs; None if there are fewer than two samples, as a pair may take its second sentence from
    another sample.
    """
    from shardwise.data.samples import sentence_pairs

    length = request.sequence_length
    # A chunk is what one sample takes its tokens from.
    if sentence_pairs.ChunkIndex(sentences, sentence_pairs.pair_tokens_room(length)).num_chunks < 2:
        return None
    return sentence_pairs.SentencePairBatches(
        tokens,
        sentences,
        length,
        seed,
        special=special,
        vocab_size=vocab_size,
        masked_fraction=request.data.masked_fraction,
        max_predictions=request.data.predictions(length),
    )


def document_ends(data: DataConfig, tokenizer: Path | None) -> causal.DocumentEnds | None:
    """The changes at ends of documents that `data` asks for, if any; ConfigError: nothing says what ends a document."""
    if not data.document_options:
        return None
    token = data.eod_token
    if token is None and tokenizer is not None:
        token = Tokenizer.load(tokenizer).end_of_document_id
    if token is None:
        raise ConfigError(_document_end_problems(data))
    return causal.DocumentEnds(token, data.eod_mask_loss, data.reset_position_ids, data.reset_attention_mask)


def _document_end_problems(data: DataConfig) -> list[str]:
    if data.needs_document_ends is None or data.eod_token is not None:
        return []
    return [
        f"{data.needs_document_ends} needs the id of the token that ends a document: set data.eod_token, or "
        "data.tokenizer to the one that made the data"
    ]


def document_mark_problems(data: DataConfig, *, of_rows: bool = False) -> list[str]:
    """The problems of prepared data with keys that ask for document marks; `of_rows`: `data.append_eod` is possible."""
    if of_rows and data.append_eod:
        data = data.model_copy(update={"append_eod": None})
    return data.refused_marks(f"{data.key} ({data.name}), whose tokens are read as they are")


def require_sentence_pairs(request: DataRequest) -> int:
    """The segments that the model tells apart, which must be BERT, as shards train no other; else DataError."""
    if request.token_types is None:
        raise DataError(
            f"model.family ({request.family}) must be bert where data.path ({request.data.name}) is HDF5 shards, "
            "which hold sentence pairs with masked tokens: name text, or Megatron's .bin and .idx"
        )
    return request.token_types


def missing_tokenizer_problems(request: DataRequest, *, has_documents: bool = False) -> list[str]:
    """Problems of prepared data if keys need a tokenizer and none is named; `has_documents`: they mark documents."""
    if request.data.tokenizer is not None:
        return []
    needs = f"needs data.tokenizer, as {request.data.key} {request.data.name} holds tokens alone: name what made them"
    problems = [] if has_documents and request.data.packs_documents else _document_end_problems(request.data)
    if request.in_pairs:
        problems.append(f"model.family ({request.family}) {needs}, for its [CLS], [SEP], [MASK] and [PAD]")
    if request.sample_prompt is not None:
        problems.append(f"log.sample_prompt ({request.sample_prompt!r}) {needs}")
    return problems


def tokenizer_of_tokens(request: DataRequest, manifests: Iterable[Path], problems: list[str]) -> Tokenizer | None:
    """The tokenizer that `data.tokenizer` names for tokens, if any; `problems` gets why it cannot be used."""
    named = request.data.tokenizer
    if named is None:
        return None
    try:
        tokenizer = open_user_tokenizer(named, request.vocab_size, pairs=request.in_pairs)
    except DataError as error:
        problems += error.problems
        return None
    if request.in_pairs:
        problems += padding_problems(tokenizer.pair_tokens(), request)
    problems += other_tokenizer_problems(tokenizer, named, manifests)
    return tokenizer


def other_tokenizer_problems(tokenizer: Tokenizer, named: str, manifests: Iterable[Path]) -> list[str]:
    """The problems of data that were prepared with another tokenizer than the one that `data.tokenizer` names.

    Tokenizers are the same if they give the same ids, whatever files they lie in.
    """
    from shardwise.data.reading.data_manifest import read_manifest

    problems = []
    for path in manifests:
        manifest = read_manifest(path)
        if manifest is None:
            continue
        name = manifest["tokenizer"].get("name")
        digest = manifest["tokenizer"]["sha256"] or (name and _digest_of(name))
        if digest not in (None, tokenizer.digest):
            problems.append(
                f"data.tokenizer ({named}, {tokenizer.digest[:_SHOWN_DIGITS]}) must be the tokenizer that {path} "
                f"names ({name}, {digest[:_SHOWN_DIGITS]}): name that one, or prepare the data again"
            )
    return problems


def _digest_of(name: str) -> str | None:
    try:
        return Tokenizer.load(resolve_tokenizer(name, cached=True)).digest
    except ConfigError:
        return None


def tokenizer_in_cache(request: DataRequest, tokenizer: Tokenizer | None) -> Path | None:
    """The folder in the data cache that holds `tokenizer`, which `data.tokenizer` names; None if there is none."""
    path = request.data.tokenizer
    if tokenizer is None or path is None:
        return None

    # Ranks and later runs open the copy: the user's own may change or lie on another machine.
    def build(folder: Path) -> dict[str, str]:
        export_user_tokenizer(path, tokenizer, folder / "tokenizer")
        return {"tokenizer": cache.tokenizer_digest(folder / "tokenizer")}

    key = user_tokenizer_digest(path)[:32]
    return cache.open_or_build(request.root, "tokenizers", key, cache.has_sound_tokenizer, build).tokenizer_path


def padding_problems(special: PairTokens | None, request: DataRequest) -> list[str]:
    """The problem of a model of sentence pairs that pads with another token than the tokenizer's [PAD]."""
    pad = request.pad_token_id
    if special is None or pad == special.pad:
        return []
    return [
        f"model.pad_token_id ({pad}) must be the tokenizer's [PAD] ({special.pad}): set "
        f"model.pad_token_id={special.pad}"
    ]


def too_few_samples(
    request: DataRequest,
    part: Part,
    name: object,
    tokens: int,
    sentences: Sentences | None,
    documents: int | None = None,
) -> list[str]:
    """The problem of a part of the data `name` that holds less than one sample, or for sentence pairs two.

    Args:
        sentences: bounds of the part's sentences; None unless samples are pairs of them.
        documents: number of the part's documents; None if the user does not count documents.
    """
    length = request.block_length
    size = f"{tokens:,} tokens"
    if sentences is None:
        is_enough = tokens > length
        least = f"one sample of train.sequence_length + 1 ({length + 1:,} tokens)"
        if length > request.sequence_length:
            least = f"what the lengths of data.stages keep together ({length + 1:,} tokens)"
    else:
        from shardwise.data.samples import sentence_pairs

        room = sentence_pairs.pair_tokens_room(length)
        chunks = sentence_pairs.ChunkIndex(sentences, room).num_chunks
        is_enough = chunks >= 2
        size += f" in {chunks} samples"
        least = f"two samples of about train.sequence_length - 3 ({room:,} tokens)"
    if is_enough:
        return []
    unit = "text"
    if documents is not None:
        unit = "documents"
        size += f" in {units.counted(documents, 'document')}"
    return [
        f"the {PART_NAMES[part]} part of {request.data.key} {name} ({size} at data.split={request.data.split}) must be "
        f"at least {least}: give more {unit}, a shorter sequence or another split"
    ]


def too_short_parts(request: DataRequest, entry: cache.CacheEntry, name: str, parts: Iterable[Part]) -> list[str]:
    """The problems (`too_few_samples`) of these parts of an entry of the cache."""
    problems = []
    for part in parts:
        sentences = entry.sentences(part) if request.in_pairs else None
        problems += too_few_samples(request, part, name, entry.manifest[part]["tokens"], sentences)
    return problems


def open_text_tokens(
    request: DataRequest,
    name: str,
    key_with: Callable[[str | None], str],
    build: Callable[[Path], Mapping[str, object]],
) -> cache.CacheEntry:
    """The cached tokens of the text `name`, built if there are none.

    Args:
        key_with: function that returns the key of the text and a tokenizer, which is None if one is trained on it.
        build: function that fills a folder, see `cache.open_or_build`.
    """
    root = request.root
    key = cache.token_entry_key(root, key_with(request.data.tokenizer))
    entry = cache.open_or_build_tokens(root, key, build, f"{name}: once", request.announce)
    # A run that continues, and an evaluation, name the tokenizer in the checkpoints, which is that of the entry.
    cache.remember_same_tokens(root, key, key_with(str(entry.tokenizer_path)))
    return entry


def tokenizer_key(tokenizer: str | None) -> str:
    """The part of a cache key that says which tokenizer makes the tokens; None: one that is trained on the text."""
    return "byte-level BPE" if tokenizer is None else user_tokenizer_digest(tokenizer)


def require_unchanged(name: str, digest: str, content: str) -> None:
    """Raises DataError if the text of a data source has another digest than when it was read first."""
    if digest != content:
        raise DataError(
            f"{name} changed while it was read: start again once it is complete{see('data#changed-while-read')}"
        )


def random_tokens(vocabulary: int = 131, samples: int = 64, length: int = 16, *, pairs: bool = False) -> PreparedText:
    """Prepared data of random tokens for tests and measurements, which a model can learn; `pairs`: in sentences."""
    generator = np.random.default_rng(0)
    tokens = [1]
    for noise in generator.random(samples * length):
        if noise < 0.8:
            tokens.append((tokens[-1] * 7 + 3) % vocabulary)
        else:
            tokens.append(int(noise * 1000) % vocabulary)
    row = np.asarray(tokens, cache.token_dtype(vocabulary))
    evaluation = row[: 8 * length + 1]
    data = PreparedText(Path(), "test", "test", {"train": row, "eval": evaluation, "test": row[:0]}, vocabulary)
    if not pairs:
        return data
    parts: tuple[tuple[Part, int], ...] = (("train", len(row)), ("eval", len(evaluation)))
    sentences = {part: _sentences(tokens) for part, tokens in parts}
    return replace(data, sentences=sentences, pair_tokens=PairTokens(pad=0, unk=1, cls=2, sep=3, mask=4))


def _sentences(tokens: int) -> Sentences:
    bounds = np.append(np.arange(0, tokens - 4, 5), tokens)
    documents = np.append(np.arange(0, len(bounds) - 10, 10), len(bounds) - 1)
    return Sentences(bounds, documents)
