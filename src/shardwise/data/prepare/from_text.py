"""Text becomes data that a run reads as they are: once, in parallel, and continued after an interruption.

1. text → tokens       every format begins with a Megatron data set in the work folder (`tokenizing.py`)
2. tokens → format     that data set itself; blocks of arrow; shards of masked sentence pairs (`FORMATS`)
3. publication         complete data take their name, with a manifest next to them (`outputs.py`)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, DataError
from shardwise.base.files import cache_root, user_path
from shardwise.config import DataConfig
from shardwise.data import cache, hub
from shardwise.data.prepare import outputs, tokenizing, work_folder
from shardwise.data.prepare.to_arrow import ARROW
from shardwise.data.prepare.to_hdf5 import HDF5
from shardwise.data.reading.dataset_tables import fetch_dataset
from shardwise.data.reading.megatron_files import written_dtype
from shardwise.data.reading.text_sources import FileSource, announce_empty, open_source
from shardwise.data.tokens.encoding import ContentDigest, DocumentMarks
from shardwise.data.tokens.tokenizer import announce_note, open_user_tokenizer

# Bytes of the files in the work folder for each sequence and document: a size (4) and a bound (8), then in the .idx a
# size (4), a pointer (8) and a bound (8).
_INDEX_BYTES = 32

Bar = Callable[[str, int | None], contextlib.AbstractContextManager[outputs.Advance | None]]
"""Makes a progress bar of a description and a total, None if it is unknown; the bar is called with the work done."""


FORMATS: Mapping[outputs.FormatName, outputs.OutputFormat] = {
    format.name: format for format in (outputs.MEGATRON, ARROW, HDF5)
}


@dataclass(frozen=True)
class TextJob:
    """A text that is to be converted, and the data that it becomes.

    Attributes:
        data: section that names the text.
        output: prefix, or a folder for arrow and HDF5.
        tokenizer: tokenizer as `data.tokenizer` names it.
        options: options of the format, by their names.
    """

    data: DataConfig
    output: Path
    format: outputs.FormatName
    tokenizer: str
    options: Mapping[str, Any]


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
        self.format = FORMATS[job.format]
        options = job.options
        problems = self.format.option_problems(options)
        if options.get("prepend_bos") and options.get("split_sentences"):
            problems.append("--prepend-bos must be left out with --split-sentences, whose pairs have [CLS] and [SEP]")
        if problems:
            raise ConfigError(problems)
        _check_place(job)
        pairs = self.format.has_pairs
        self.path = hub.resolve_tokenizer(job.tokenizer, announce=announce)
        self.tokenizer = open_user_tokenizer(job.tokenizer, outputs.ANY_VOCABULARY, pairs=pairs)
        announce_note(self.tokenizer, announce)
        fetch_dataset(job.data, announce)
        self.source = open_source(job.data)
        if isinstance(self.source, FileSource) and job.data.path is not None:
            announce(f"preparing {job.output}: {self.source.name} is {self.source.described()}")
        stamp = self.source.stamp()
        # The prefix keeps it apart from the digest of a run, which depends on how the run divides the text into parts.
        self.stamp = None if stamp is None else f"prepared-{stamp}"
        self.sentences = pairs or bool(options.get("split_sentences"))
        self.marks = DocumentMarks.of(
            self.tokenizer, append_eod=options.get("append_eod", not pairs), prepend_bos=options.get("prepend_bos")
        )
        if options.get("whole_word") and self.tokenizer.continuations() is None:
            raise ConfigError(
                f"--whole-word needs a WordPiece tokenizer, whose tokens show whether they continue a word, and "
                f"{job.tokenizer} is none: leave it out, or name BERT's vocab.txt"
            )
        self.output = outputs.Output(job.output, self.format, job.tokenizer, self.tokenizer, options)
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
        """Steps 1 and 2, continued from the state of an unfinished conversion; returns the manifest."""
        if state is None:
            begin = tokenizing.TokenizingProgress()
            with self.work.writing():
                self.work.clear()
        else:
            begin = tokenizing.TokenizingProgress.from_state(state["progress"])
        estimate = self._check_room()
        small = estimate is not None and estimate.bytes < tokenizing.SMALL_BYTES
        with tokenizing.Workers.for_tokenizing(str(self.path), self.tokenizer, small=small) as workers:
            progress = self._tokenize(workers, begin, estimate)
        announce_empty(self.source, self.announce)
        read = progress.read
        job = outputs.FormatJob(
            prefix=self.work.folder / tokenizing.PREFIX,
            counts=progress.written,
            digest=read.digest,
            tokenizer=self.tokenizer,
            work=self.work,
            name=self.job.output.name,
            options=self.job.options,
            bar=self._bar,
        )
        with self.work.writing():
            try:
                counts = self.format.write(job)
            except ConfigError:
                self.work.clear()  # there is too little text for one sample
                raise
            source = {
                "name": self.source.name,
                "sha256": read.digest,
                "documents": read.documents,
                "characters": read.characters,
                "bytes": read.bytes,
            }
            facts = self.output.complete(source, self.tokenizer.vocab_size, closes=self.marks.end is not None, **counts)
        cache.remember_content(cache_root(), self.stamp, read.digest)
        return facts

    def _check_room(self) -> work_folder.Estimate | None:
        job = self.job
        estimate = work_folder.estimate(job.data, self.source, self.tokenizer, sentences=self.sentences)
        if estimate is None:
            self.announce(f"preparing {job.output}: the size of {self.source.name} is known only after it was read")
            return None
        needed = estimate.tokens * written_dtype(self.tokenizer.vocab_size).itemsize
        needed += _INDEX_BYTES * (estimate.sentences + estimate.documents)
        needed += self.format.disk_bytes(estimate, job.options)
        written = work_folder.bytes_below(self.work.folder)
        work_folder.check_room(needed, written, job.output, self.announce, packed=estimate.packed)
        return estimate

    def _tokenize(
        self, workers: tokenizing.Workers, begin: tokenizing.TokenizingProgress, estimate: work_folder.Estimate | None
    ) -> tokenizing.TokenizingProgress:
        """Step 1."""
        total = None
        if estimate is not None and estimate.exact:
            total = estimate.bytes
        sequences = tokenizing.SequenceOptions(self.sentences, self.marks, self.format.longest_document)
        with self._bar(f"tokenizing {self.source.name}", total) as advance:
            write = functools.partial(
                tokenizing.write_tokens,
                self.source,
                workers,
                self.work,
                sequences,
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
        if progress != begin:
            self.work.remove_output()  # it was made of less text
        if not progress.written.tokens:
            self.work.clear()
            raise DataError(f"{self.source.name} holds no text that becomes tokens: name another source")
        return progress

    def _save(self, progress: tokenizing.TokenizingProgress) -> None:
        self.work.save({"identity": self.output.identity, "complete": False, "progress": asdict(progress)})

    @contextlib.contextmanager
    def _bar(self, description: str, total: int | None) -> Iterator[outputs.Advance]:
        with self.bar(description, total) as advance:
            yield advance or (lambda _amount: None)


def _check_place(job: TextJob) -> None:
    outputs.check_name(job.output)
    if job.data.path is None:
        return
    text = user_path(job.data.path)
    # Resolved, as a link may lead into the text too.
    if text.is_dir() and job.output.resolve().parent.is_relative_to(text.resolve()):
        raise ConfigError(f"OUTPUT ({job.output}) must lie outside INPUT ({text}), or it would be read as text")
