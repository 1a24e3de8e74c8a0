"""Text becomes a Megatron data set: once, in parallel, and continued after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, DataError
from shardwise.base.files import cache_root, user_path
from shardwise.base.terminal import progress
from shardwise.config import DataConfig
from shardwise.data import cache
from shardwise.data.prepare import disk_room, tokenizing
from shardwise.data.prepare.output import ANY_VOCABULARY, PreparationOutcome, PreparedOutput
from shardwise.data.reading import dataset_tables, megatron_files, text_sources
from shardwise.data.tokens.encoding import ContentDigest, DocumentMarks
from shardwise.data.tokens.tokenizer import announce_tokenizer_note, open_user_tokenizer
from shardwise.data.tokens.tokenizer_files import resolve_tokenizer


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
        written = self.output.size()
        sentences = self.sequences.sentences
        estimate = disk_room.estimate_size(self.source, self.tokenizer, sentences=sentences)
        needed = None if estimate is None else estimate.output_bytes
        disk_room.require_disk_room(needed, written, self.output.path, self.announce)
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
