"""Text becomes a Megatron data set: once, in parallel, and continued after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, DataError
from shardwise.base.files import cache_root, user_path
from shardwise.base.progress import progress
from shardwise.config import DataConfig
from shardwise.data import cache
from shardwise.data.prepare import tokenizing
from shardwise.data.prepare.output import ANY_VOCABULARY, PreparationOutcome, PreparedOutput
from shardwise.data.reading import dataset_tables, megatron_files, text_sources
from shardwise.data.tokens.encoding import ContentDigest, DocumentMarks, cut_sentences, group_by_size
from shardwise.data.tokens.tokenizer import Tokenizer, announce_tokenizer_note, open_user_tokenizer
from shardwise.data.tokens.tokenizer_files import resolve_tokenizer

# An estimate from the beginning of a text is not exact; a quarter more rarely refuses what would fit.
_MARGIN = 1.25
# Bytes of the files in the work folder for each sequence and document: a size (4) and a bound (8), then in the .idx a
# size (4), a pointer (8) and a bound (8).
_INDEX_BYTES = 32


@dataclass(frozen=True)
class TextConversionJob:
    """A text for `data prepare`, and its result; `options`: `append_eod`, `prepend_bos` and `split_sentences`."""

    data: DataConfig
    output: Path
    tokenizer: str
    options: Mapping[str, bool]


def convert_text(job: TextConversionJob, *, force: bool, announce: Callable[[str], None]) -> PreparationOutcome:
    """Makes a Megatron data set of a text, unless it is there already.

    Args:
        force: True to replace data that were prepared from another text or in another way.

    Raises:
        DataError: the text or the tokenizer cannot be read, other data are at the output, or the disk is too small.
    """
    conversion = _TextConversion(job, announce)
    return conversion.output.produce(conversion.content, conversion.make, force=force)


class _TextConversion:
    def __init__(self, job: TextConversionJob, announce: Callable[[str], None]) -> None:
        self.announce = announce
        options = job.options
        if options.get("prepend_bos") and options["split_sentences"]:
            raise ConfigError("--prepend-bos must be left out with --split-sentences, whose pairs have [CLS] and [SEP]")
        if job.data.path is not None:
            text = user_path(job.data.path)
            # Resolved, as a link may lead into the text too.
            if text.is_dir() and job.output.resolve().parent.is_relative_to(text.resolve()):
                raise ConfigError(f"OUTPUT ({job.output}) must lie outside INPUT ({text}), or it would be read as text")
        self.tokenizer_path = resolve_tokenizer(job.tokenizer, announce=announce)
        self.tokenizer = open_user_tokenizer(job.tokenizer, ANY_VOCABULARY)
        announce_tokenizer_note(self.tokenizer, announce)
        dataset_tables.fetch_dataset(job.data, announce)
        self.source = text_sources.open_text_source(job.data)
        if isinstance(self.source, text_sources.FileSource) and job.data.path is not None:
            announce(f"preparing {job.output}: {self.source.name} is {self.source.described()}")
        stamp = self.source.stamp()
        # The prefix keeps it apart from the digest of a run, which depends on how the run divides the text into parts.
        self.stamp = None if stamp is None else f"prepared-{stamp}"
        marks = DocumentMarks.of(
            self.tokenizer, append_eod=options["append_eod"], prepend_bos=options.get("prepend_bos")
        )
        self.sequences = tokenizing.SequenceOptions(options["split_sentences"], marks)
        self.output = PreparedOutput(job.output, job.tokenizer, self.tokenizer, options)

    def content(self) -> str:
        """The digest of the source's text, which is read unless the cache has the digest."""
        known = cache.known_text_digest(cache_root(), self.stamp)
        if known is not None:
            return known
        digest = ContentDigest()
        for _ in digest.watch(self.source.pieces()):
            pass
        return digest.hexdigest()

    def make(self, saved: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The data set, continued after the progress of an unfinished conversion; returns the manifest."""
        begin = tokenizing.TokenizingProgress() if saved is None else tokenizing.TokenizingProgress.of(saved)
        estimate = _estimated_size(self.source, self.tokenizer, sentences=self.sequences.sentences)
        self.output.require_room(None if estimate is None else estimate.output_bytes, self.announce)
        small = estimate is not None and estimate.bytes < tokenizing.SMALL_BYTES
        total = estimate.bytes if estimate is not None and estimate.exact else None
        with (
            tokenizing.TokenizingWorkers.for_tokenizing(
                str(self.tokenizer_path), self.tokenizer, small=small
            ) as workers,
            progress("tokenizing", total) as advance,
        ):
            done = self._tokenize(workers, begin, advance)
        text_sources.announce_empty(self.source, self.announce)
        read = done.read
        source = {
            "name": self.source.name,
            "sha256": read.digest,
            "documents": read.documents,
            "characters": read.characters,
            "bytes": read.bytes,
        }
        vocab_size = self.tokenizer.vocab_size
        dtype = megatron_files.megatron_dtype(vocab_size).name
        closes = self.sequences.marks.end is not None
        with self.output.writing():
            facts = self.output.complete(
                source, vocab_size, closes=closes, dtype=dtype, sequences=done.sequences, tokens=done.tokens
            )
        cache.remember_text_digest(cache_root(), self.stamp, read.digest)
        return facts

    def _tokenize(
        self,
        workers: tokenizing.TokenizingWorkers,
        begin: tokenizing.TokenizingProgress,
        advance: Callable[[int], None],
    ) -> tokenizing.TokenizingProgress:
        if begin.read.batches:
            self.announce(f"continuing after {begin.read.documents:,} documents, {begin.tokens:,} tokens")
        while True:
            try:
                progress = tokenizing.write_tokens(
                    self.source, workers, self.output, self.sequences, self.tokenizer, begin, advance
                )
            except megatron_files.ChangedFilesError as error:
                self.announce(f"{error}: it starts again from the beginning")
                self.output.clear()
                begin = tokenizing.TokenizingProgress()
                continue
            if not progress.tokens:
                self.output.clear()
                raise DataError(f"{self.source.name} holds no text that becomes tokens: name another source")
            return progress


@dataclass(frozen=True)
class _SizeEstimate:
    """Estimated sizes of a source and of its result, rather more than less; `exact`: `bytes` is that of its text."""

    bytes: int
    exact: bool
    output_bytes: int


def _estimated_size(source: text_sources.Source, tokenizer: Tokenizer, *, sentences: bool) -> _SizeEstimate | None:
    """The size of prepared data, by the files and the text's beginning; None without files, or if packed."""
    if isinstance(source, text_sources.ColumnSource):
        path = source.data.path
        files = [] if path is None else [file for file in user_path(path).rglob("*") if file.is_file()]
        exact = False
    else:
        files = list(source.files)
        readings = source.readings if isinstance(source, text_sources.FileSource) else ()
        if any(reading.packing or reading.kind == "parquet" for reading in readings):
            return None
        exact = all(reading.kind == "text" for reading in readings)
    if not files:
        return None
    total = sum(file.stat().st_size for file in files)
    digest = ContentDigest()
    pieces = next(
        group_by_size(digest.watch(source.pieces()), lambda piece: piece.characters, text_sources.PIECE_CHARACTERS), []
    )
    texts = [text for piece in pieces for text in (cut_sentences(piece.text) if sentences else [piece.text])]
    tokens = len(tokenizer.encode_rows(texts, literally=sentences)[0])
    # All of the text has as many tokens for each byte as its beginning.
    scale = _MARGIN * total / digest.bytes if digest.bytes else 0.0
    documents = max(len(files), round(sum(piece.ends_document for piece in pieces) * scale))
    sequences = round(len(texts) * scale) + documents
    output_bytes = (round(tokens * scale) + documents) * megatron_files.megatron_dtype(tokenizer.vocab_size).itemsize
    return _SizeEstimate(total, exact, output_bytes + _INDEX_BYTES * (sequences + documents))
