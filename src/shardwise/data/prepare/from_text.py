"""Text becomes a Megatron data set: once, in parallel, and continued after an interruption.

1. text → tokens       a data set in the work folder (`tokenizing.py`)
2. publication         complete data take their name, with a manifest next to them (`outputs.py`)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, DataError
from shardwise.base.files import cache_root, user_path
from shardwise.config import DataConfig
from shardwise.data import cache, hub
from shardwise.data.prepare import disk_room, outputs, tokenizing
from shardwise.data.reading.dataset_tables import fetch_dataset
from shardwise.data.reading.megatron_files import written_dtype
from shardwise.data.reading.text_sources import FileSource, announce_empty, open_source
from shardwise.data.tokens.encoding import ContentDigest, DocumentMarks
from shardwise.data.tokens.tokenizer import announce_note, open_user_tokenizer

Bar = Callable[[str, int | None], contextlib.AbstractContextManager[Callable[[int], None] | None]]
"""Makes a progress bar of a description and a total, None if it is unknown; the bar is called with the work done."""


@dataclass(frozen=True)
class TextJob:
    """A text that is to be converted, and the data that it becomes.

    Attributes:
        data: section that names the text.
        output: prefix of the data set.
        tokenizer: tokenizer as `data.tokenizer` names it.
        options: `append_eod`, `prepend_bos` and `split_sentences`.
    """

    data: DataConfig
    output: Path
    tokenizer: str
    options: Mapping[str, bool]


def convert_text(job: TextJob, *, force: bool, announce: Callable[[str], None], bar: Bar) -> outputs.PreparationOutcome:
    """Makes the data of `job`, unless they are there already.

    Args:
        force: True to replace data that were prepared from another text or in another way.

    Raises:
        DataError: the text or the tokenizer cannot be read, other data are at the output, or the disk is too small.
    """
    conversion = _TextConversion(job, announce, bar)
    return conversion.output.produce(conversion.content, conversion.make, force=force)


class _TextConversion:
    def __init__(self, job: TextJob, announce: Callable[[str], None], bar: Bar) -> None:
        self.job = job
        self.announce = announce
        self.bar = bar
        options = job.options
        if options.get("prepend_bos") and options["split_sentences"]:
            raise ConfigError("--prepend-bos must be left out with --split-sentences, whose pairs have [CLS] and [SEP]")
        _check_place(job)
        self.path = hub.resolve_tokenizer(job.tokenizer, announce=announce)
        self.tokenizer = open_user_tokenizer(job.tokenizer, outputs.ANY_VOCABULARY)
        announce_note(self.tokenizer, announce)
        fetch_dataset(job.data, announce)
        self.source = open_source(job.data)
        if isinstance(self.source, FileSource) and job.data.path is not None:
            announce(f"preparing {job.output}: {self.source.name} is {self.source.described()}")
        stamp = self.source.stamp()
        # The prefix keeps it apart from the digest of a run, which depends on how the run divides the text into parts.
        self.stamp = None if stamp is None else f"prepared-{stamp}"
        marks = DocumentMarks.of(
            self.tokenizer, append_eod=options["append_eod"], prepend_bos=options.get("prepend_bos")
        )
        self.sequences = tokenizing.SequenceOptions(options["split_sentences"], marks)
        self.output = outputs.Output(job.output, job.tokenizer, self.tokenizer, options)
        self.work = self.output.work

    def content(self) -> str:
        """The digest of the source's text, which is read unless the cache has the digest."""
        known = cache.known_content(cache_root(), self.stamp)
        if known is not None:
            return known
        digest = ContentDigest()
        for _ in digest.watch(self.source.pieces()):
            pass
        return digest.hexdigest()

    def make(self, state: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The data set, continued from the state of an unfinished conversion; returns the manifest."""
        if state is None:
            begin = tokenizing.TokenizingProgress()
            with self.work.writing():
                self.work.clear()
        else:
            begin = tokenizing.TokenizingProgress.from_state(state["progress"])
        estimate = self._check_room()
        small = estimate is not None and estimate.bytes < tokenizing.SMALL_BYTES
        total = estimate.bytes if estimate is not None and estimate.exact else None
        with (
            tokenizing.Workers.for_tokenizing(str(self.path), self.tokenizer, small=small) as workers,
            self.bar(f"tokenizing {self.source.name}", total) as advance,
        ):
            progress = self._tokenize(workers, begin, advance or (lambda _amount: None))
        announce_empty(self.source, self.announce)
        read = progress.read
        source = {
            "name": self.source.name,
            "sha256": read.digest,
            "documents": read.documents,
            "characters": read.characters,
            "bytes": read.bytes,
        }
        vocab_size = self.tokenizer.vocab_size
        counts = {
            "dtype": written_dtype(vocab_size).name,
            "sequences": progress.written.sequences,
            "tokens": progress.written.tokens,
        }
        with self.work.writing():
            facts = self.output.complete(source, vocab_size, closes=self.sequences.marks.end is not None, **counts)
        cache.remember_content(cache_root(), self.stamp, read.digest)
        return facts

    def _check_room(self) -> disk_room.Estimate | None:
        job = self.job
        estimate = disk_room.estimate(job.data, self.source, self.tokenizer, sentences=self.sequences.sentences)
        if estimate is None:
            self.announce(f"preparing {job.output}: the size of {self.source.name} is known only after it was read")
        else:
            written = self.work.size()
            disk_room.check_room(estimate.output_bytes, written, job.output, self.announce, packed=estimate.packed)
        return estimate

    def _tokenize(
        self, workers: tokenizing.Workers, begin: tokenizing.TokenizingProgress, advance: Callable[[int], None]
    ) -> tokenizing.TokenizingProgress:
        write = functools.partial(
            tokenizing.write_tokens,
            self.source,
            workers,
            self.work,
            self.sequences,
            self.tokenizer,
            save=self._save,
            advance=advance,
        )
        try:
            if begin.read.batches:
                done = f"{begin.read.documents:,} documents, {begin.written.tokens:,} tokens"
                self.announce(f"continuing after {done}")
            progress = write(begin)
        except tokenizing.ChangedError as error:
            self.announce(f"{error}: it starts again from the beginning")
            with self.work.writing():
                self.work.clear()
            progress = write(tokenizing.TokenizingProgress())
        if not progress.written.tokens:
            self.work.clear()
            raise DataError(f"{self.source.name} holds no text that becomes tokens: name another source")
        return progress

    def _save(self, progress: tokenizing.TokenizingProgress) -> None:
        self.work.save({"identity": self.output.identity, "complete": False, "progress": asdict(progress)})


def _check_place(job: TextJob) -> None:
    outputs.check_name(job.output)
    if job.data.path is None:
        return
    text = user_path(job.data.path)
    # Resolved, as a link may lead into the text too.
    if text.is_dir() and job.output.resolve().parent.is_relative_to(text.resolve()):
        raise ConfigError(f"OUTPUT ({job.output}) must lie outside INPUT ({text}), or it would be read as text")
