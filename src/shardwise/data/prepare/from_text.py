"""Text becomes data that a run reads as they are: once, in parallel, and continued where it was cut off.

1. text → tokens       every format begins with a Megatron data set in the work folder (`tokens.py`)
2. tokens → format     that data set itself; blocks of arrow; shards of masked sentence pairs
3. publication         what is complete takes its name, with a manifest beside it
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, DataError
from shardwise.base.files import cache_root, sync_folder
from shardwise.config import DataConfig
from shardwise.data import cache, hub
from shardwise.data.formats.common import announce_note
from shardwise.data.prepare import to_arrow, to_hdf5, work_folder
from shardwise.data.prepare.outputs import ANY_VOCABULARY, Format, Outcome, Output, check_name
from shardwise.data.prepare.tokenizing import (
    PREFIX,
    ChangedError,
    SequenceOptions,
    TokenizingProgress,
    Workers,
    write_tokens,
)
from shardwise.data.reading.dataset_tables import fetch_dataset
from shardwise.data.reading.hdf5_files import library as hdf5_library
from shardwise.data.reading.megatron_files import IndexedFile, written_dtype
from shardwise.data.reading.text_sources import FileSource, open_source
from shardwise.data.samples.sentence_pairs import SentencePairBatches, chunk_room
from shardwise.data.tokens.encoding import ContentDigest, DocumentMarks
from shardwise.data.tokens.tokenizer import open_user_tokenizer

# Below that, processes take longer to start than they save.
_SMALL_BYTES = 8 << 20
_LONGEST_DOCUMENT = 1 << 26

Bar = Callable[[str, int | None], contextlib.AbstractContextManager[Callable[[int], None] | None]]
"""Makes a progress bar of a description and a total, None where it is unknown; the bar is called with what was done."""


@dataclass(frozen=True)
class TextJob:
    """Which text is to be converted, and into what.

    Attributes:
        data: the section that names the text.
        output: a prefix, or a folder for arrow and HDF5.
        options: the options of the format, by their names.
    """

    data: DataConfig
    output: Path
    format: Format
    tokenizer: str
    options: Mapping[str, Any]


def convert_text(job: TextJob, *, force: bool, announce: Callable[[str], None], bar: Bar) -> Outcome:
    """Makes what `job` says, unless it is there already.

    Args:
        force: replace what was prepared from another text or in another way.

    Raises:
        DataError: the text or the tokenizer cannot be read, something else is at the output, or the disk is too small.
    """
    conversion = _Conversion(job, announce, bar)
    return conversion.output.produce(conversion.content, conversion.make, force=force)


class _Conversion:
    def __init__(self, job: TextJob, announce: Callable[[str], None], bar: Bar) -> None:
        self.job, self.announce, self.bar = job, announce, bar
        _check_options(job)
        _check_place(job)
        pairs = job.format == "hdf5"
        self.path = hub.resolve_tokenizer(job.tokenizer, announce=announce)
        self.tokenizer = open_user_tokenizer(job.tokenizer, ANY_VOCABULARY, pairs=pairs)
        announce_note(self.tokenizer, announce)
        fetch_dataset(job.data, announce)
        self.source = open_source(job.data)
        if isinstance(self.source, FileSource) and job.data.path is not None:
            announce(f"preparing {job.output}: {self.source.name} is {self.source.described()}")
        stamp = self.source.stamp()
        # The prefix keeps it apart from the digest of a run, which depends on how the run divides the text into parts.
        self.stamp = None if stamp is None else f"prepared-{stamp}"
        self.sentences = pairs or bool(job.options.get("split_sentences"))
        append, prepend = job.options.get("append_eod", not pairs), job.options.get("prepend_bos")
        self.marks = DocumentMarks.of(self.tokenizer, append_eod=append, prepend_bos=prepend)
        self.continuations = self.tokenizer.continuations() if job.options.get("whole_word") else None
        if job.options.get("whole_word") and self.continuations is None:
            raise ConfigError(
                f"--whole-word needs a WordPiece tokenizer, whose tokens show whether they continue a word, and "
                f"{job.tokenizer} is none: leave it out, or name BERT's vocab.txt"
            )
        self.output = Output(job.output, job.format, job.tokenizer, self.tokenizer, job.options)
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
            begin = TokenizingProgress()
            with self.work.writing():
                self.work.clear()
        else:
            begin = TokenizingProgress.from_state(state["progress"])
        expected = self._check_room()
        small = expected is not None and expected.bytes < _SMALL_BYTES
        with Workers.for_tokenizing(str(self.path), self.tokenizer, small=small) as workers:
            progress = self._tokenize(workers, begin, expected)
        read = progress.read
        with self.work.writing():
            try:
                counts = self._write_format(progress)
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
        expected = work_folder.expect(job.data, self.source, self.tokenizer, sentences=self.sentences)
        if expected is None:
            self.announce(f"preparing {job.output}: the size of {self.source.name} is known only after it was read")
            return None
        itemsize = written_dtype(self.tokenizer.vocab_size).itemsize
        needed = expected.tokens * itemsize + 32 * (expected.sentences + expected.documents)
        if job.format == "arrow":
            length = job.options["sequence_length"]
            needed += expected.tokens // length * to_arrow.row_bytes(length)
        if job.format == "hdf5":
            length, predictions = job.options["sequence_length"], job.options["max_predictions"]
            rows = expected.tokens // chunk_room(length) + expected.documents
            needed += rows * job.options["dupe_factor"] * to_hdf5.row_bytes(length, predictions)
        written = work_folder.bytes_below(self.work.folder)
        work_folder.check_room(needed, written, job.output, self.announce, packed=expected.packed)
        return expected

    def _tokenize(
        self, workers: Workers, begin: TokenizingProgress, expected: work_folder.Estimate | None
    ) -> TokenizingProgress:
        """Step 1."""
        total = expected.bytes if expected is not None and expected.exact else None
        longest = _LONGEST_DOCUMENT if self.job.format == "hdf5" else None
        sequences = SequenceOptions(self.sentences, self.marks, longest)
        with self._bar(f"tokenizing {self.source.name}", total) as advance:
            write = functools.partial(
                write_tokens,
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
                    after = f"{begin.read.documents:,} documents, {begin.written.tokens:,} tokens"
                    self.announce(f"continuing after {after}")
                done = write(begin)
            except ChangedError as error:
                self.announce(f"{error}: it starts again from the beginning")
                with self.work.writing():
                    self.work.clear()
                done = write(TokenizingProgress())
        if done != begin:
            self.work.remove_output()  # it was made of less text
        if not done.written.tokens:
            self.work.clear()
            raise DataError(f"{self.source.name} holds no text that becomes tokens: name another source")
        return done

    def _save(self, progress: TokenizingProgress) -> None:
        self.work.save({"identity": self.output.identity, "complete": False, "progress": asdict(progress)})

    def _write_format(self, progress: TokenizingProgress) -> dict[str, Any]:
        """Step 2; returns what the manifest says about it."""
        prefix, written, options = self.work.folder / PREFIX, progress.written, self.job.options
        if self.job.format == "megatron":
            dtype = written_dtype(self.tokenizer.vocab_size).name
            return {"dtype": dtype, "sequences": written.sequences, "tokens": written.tokens}
        if self.job.format == "arrow":
            self.work.remove_output()
            tokens, length = IndexedFile.open(prefix), options["sequence_length"]
            with self._bar("writing blocks", tokens.tokens.nbytes) as advance:
                blocks = to_arrow.write_blocks(tokens, length, self.work.output, progress.read.digest[:16], advance)
            return {"dtype": "int32", "sequences": blocks, "tokens": blocks * length}
        shards, rows = self._write_shards(prefix)
        return {"dtype": "int32", "sequences": rows, "tokens": written.tokens, "shards": shards}

    def _write_shards(self, prefix: Path) -> tuple[int, int]:
        """Writes the HDF5 shards; returns their number, and that of their rows."""
        options, folder, vocab_size = self.job.options, self.work.output, self.tokenizer.vocab_size
        pairs = functools.partial(
            SentencePairBatches,
            sequence_length=options["sequence_length"],
            special=self.tokenizer.pair_tokens(),
            vocab_size=vocab_size,
            masked_fraction=options["masked_fraction"],
            max_predictions=options["max_predictions"],
            continuations=self.continuations,
        )
        folder.mkdir(exist_ok=True)
        shards = to_hdf5.plan_shards(prefix, folder, self.job.output.name, options["dupe_factor"], options["seed"])
        write = functools.partial(to_hdf5.write_shard, vocab_size=vocab_size, pairs=pairs)
        total, rows = sum(shard.bytes for shard in shards), 0
        small = total < _SMALL_BYTES
        with self._bar("masking", total) as advance, Workers.for_masking(len(shards), small=small) as workers:
            for shard, written in workers.each(write, shards):
                rows += written
                advance(shard.bytes)
        sync_folder(folder)
        return len(shards), rows

    @contextlib.contextmanager
    def _bar(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        with self.bar(what, total) as advance:
            yield advance or (lambda _amount: None)


def _check_options(job: TextJob) -> None:
    options = job.options
    problems = []
    if options.get("prepend_bos") and options.get("split_sentences"):
        problems.append("--prepend-bos must be left out with --split-sentences, whose pairs have [CLS] and [SEP]")
    if job.format == "arrow":
        to_arrow.library()
        if options["sequence_length"] < 1:
            problems.append(f"--sequence-length ({options['sequence_length']}) must be at least 1")
    if job.format == "hdf5":
        hdf5_library()
        length, predictions = options["sequence_length"], options["max_predictions"]
        try:
            chunk_room(length)
        except ConfigError as error:
            problems += [text.replace("train.sequence_length", "--sequence-length") for text in error.problems]
        if not 1 <= predictions <= max(length, 1):
            problems.append(f"--max-predictions ({predictions}) must be in 1 … --sequence-length ({length})")
        if not 0 < options["masked_fraction"] <= 1:
            problems.append(f"--masked-fraction ({options['masked_fraction']}) must be above 0 and at most 1")
        if options["dupe_factor"] < 1:
            problems.append(f"--dupe-factor ({options['dupe_factor']}) must be at least 1")
    if problems:
        raise ConfigError(problems)


def _check_place(job: TextJob) -> None:
    check_name(job.output)
    text = None if job.data.path is None else Path(job.data.path).expanduser()
    # Resolved, as a link may lead into the text too.
    if text is not None and text.is_dir() and job.output.resolve().parent.is_relative_to(text.resolve()):
        raise ConfigError(f"OUTPUT ({job.output}) must lie outside INPUT ({text}), or it would be read as text")
