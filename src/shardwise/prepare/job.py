"""Text becomes data that a run reads as they are: once, in parallel, and resumed where it was cut off.

1. text → tokens       every format begins with a Megatron data set in the work folder (`tokens.py`)
2. tokens → format     that data set itself; blocks of arrow; shards of masked sentence pairs
3. publication         what is complete takes its name, with a manifest beside it
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise import hub
from shardwise.config import DataConfig
from shardwise.data import cache
from shardwise.data.reading.datasets import fetch_dataset
from shardwise.data.reading.hdf5 import library as hdf5_library
from shardwise.data.reading.megatron import IndexedFile, written_dtype
from shardwise.data.reading.sources import Source, open_source
from shardwise.data.samples.pairs import chunk_room
from shardwise.data.tokens.encoding import ContentDigest
from shardwise.data.tokens.tokenizer import open_user_tokenizer
from shardwise.errors import ConfigError, DataError
from shardwise.files import sync_folder
from shardwise.prepare import arrow, hdf5, space
from shardwise.prepare.batches import Position
from shardwise.prepare.outputs import ANY_VOCABULARY, VERSION, Format, Outcome, Output, tokenizer_facts
from shardwise.prepare.tokens import (
    PREFIX,
    ChangedError,
    Cut,
    Progress,
    Written,
    as_state,
    from_state,
    write_tokens,
)
from shardwise.prepare.work import Work
from shardwise.prepare.workers import Workers

# Below that, processes take longer to start than they save.
_SMALL_BYTES = 8 << 20
_LONGEST_DOCUMENT = 1 << 26

Bar = Callable[[str, int | None], contextlib.AbstractContextManager[Callable[[int], None] | None]]
"""Makes a progress bar of a description and a total, None where it is unknown; the bar is called with what was done."""


@dataclass(frozen=True)
class Job:
    """What is to be prepared.

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


def prepare(job: Job, *, force: bool, announce: Callable[[str], None], bar: Bar) -> Outcome:
    """Makes what `job` says, unless it is there already.

    force: what was prepared from another text or in another way is replaced.

    Raises:
        DataError: the text or the tokenizer cannot be read, something else is at the output, or the disk is too small.
    """
    preparation = _Preparation(job, announce, bar)
    return preparation.output.produce(preparation.work, preparation.content, preparation.make, force=force)


class _Preparation:
    def __init__(self, job: Job, announce: Callable[[str], None], bar: Bar) -> None:
        self.job, self.announce, self.bar = job, announce, bar
        pairs = job.format == "hdf5"
        self._check_options()
        self._check_place()
        self.path = hub.resolve_tokenizer(job.tokenizer, announce=announce)
        self.tokenizer = open_user_tokenizer(job.tokenizer, ANY_VOCABULARY, pairs=pairs)
        fetch_dataset(job.data, announce)
        self.source: Source = open_source(job.data)
        stamp = self.source.stamp()
        # Where a run cuts a text into its own parts, its digest is another one.
        self.stamp = None if stamp is None else f"prepared-{stamp}"
        self.sentences = pairs or bool(job.options.get("split_sentences"))
        self.end = self.tokenizer.end_of_document_id if job.options.get("append_eod", not pairs) else None
        self.continuations = self.tokenizer.continuations() if job.options.get("whole_word") else None
        if job.options.get("whole_word") and self.continuations is None:
            raise ConfigError(
                f"--whole-word needs a WordPiece tokenizer, whose tokens tell whether they go on with a word, and "
                f"{job.tokenizer} is none: leave it out, or name BERT's vocab.txt"
            )
        self.work = Work(job.output)
        self.identity = {
            "version": VERSION,
            "format": job.format,
            "tokenizer": self.tokenizer.digest,
            "options": dict(job.options),
        }
        self.output = Output(job.output, job.format, self.identity)

    def make(self, state: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Steps 1 and 2, from the state of an unfinished preparation on; returns the manifest."""
        begin = self._begin(state)
        expected = self._check_room()
        small = expected is not None and expected.bytes < _SMALL_BYTES
        with Workers.for_tokenizing(str(self.path), self.tokenizer, small=small) as workers:
            progress = self._tokenize(workers, begin, expected)
        with self.work.writing():
            try:
                facts = self._facts(progress, self._finish(progress))
            except ConfigError:
                self.work.clear()  # there is too little text for one sample
                raise
            self.output.complete(self.work, facts)
        cache.remember_content(cache.cache_root(), self.stamp, progress.read.digest)
        return facts

    def _check_options(self) -> None:
        options = self.job.options
        problems = []
        if self.job.format == "arrow":
            arrow.library()
            if options["sequence_length"] < 1:
                problems.append(f"--sequence-length ({options['sequence_length']}) must be at least 1")
        if self.job.format == "hdf5":
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

    def _check_place(self) -> None:
        if self.job.output.name in ("", ".."):
            named = self.job.output / "data"
            raise ConfigError(f"OUTPUT ({self.job.output}) must end in a name: add one, such as {named}")
        text = None if self.job.data.path is None else Path(self.job.data.path).expanduser()
        # Links lead into the text too.
        if text is not None and text.is_dir() and self.job.output.resolve().parent.is_relative_to(text.resolve()):
            raise ConfigError(f"OUTPUT ({self.job.output}) must lie outside INPUT ({text}), of which it would be read")

    def _begin(self, state: Mapping[str, Any] | None) -> Progress:
        """The progress to continue from."""
        if state is not None:
            return from_state(state["progress"])
        with self.work.writing():
            self.work.clear()
        return Progress(Position(), Written())

    def content(self) -> str:
        """The digest of the source's text, which is read unless the cache knows it."""
        known = cache.known_content(cache.cache_root(), self.stamp)
        if known is not None:
            return known
        digest = ContentDigest()
        for _ in digest.watch(self.source.pieces()):
            pass
        return digest.hexdigest()

    def _check_room(self) -> space.Expected | None:
        job = self.job
        expected = space.expect(job.data, self.source, self.tokenizer, sentences=self.sentences)
        if expected is None:
            self.announce(f"preparing {job.output}: how large {self.source.name} is shows only while it is read")
            return None
        itemsize = written_dtype(self.tokenizer.vocab_size).itemsize
        needed = expected.tokens * itemsize + 32 * (expected.sentences + expected.documents)
        if job.format == "arrow":
            length = job.options["sequence_length"]
            needed += expected.tokens // length * arrow.row_bytes(length)
        if job.format == "hdf5":
            length, predictions = job.options["sequence_length"], job.options["max_predictions"]
            rows = expected.tokens // chunk_room(length) + expected.documents
            needed += rows * job.options["dupe_factor"] * hdf5.row_bytes(length, predictions)
        held = space.held_by(self.work.folder)
        space.check_room(needed, held, job.output, self.announce, packed=expected.packed)
        return expected

    def _tokenize(self, workers: Workers, begin: Progress, expected: space.Expected | None) -> Progress:
        total = expected.bytes if expected is not None and expected.exact else None
        longest = _LONGEST_DOCUMENT if self.job.format == "hdf5" else None
        cut, size = Cut(self.sentences, self.end, longest), self.tokenizer.vocab_size
        with self._bar(f"tokenizing {self.source.name}", total) as advance:
            arguments = (self.source, workers, self.work, cut, size)
            try:
                if begin.read.batches:
                    self.announce(f"going on after {begin.read.documents:,} documents, {begin.written.tokens:,} tokens")
                done = write_tokens(*arguments, begin, self._save, advance)
            except ChangedError as error:
                self.announce(f"{error}: it begins anew")
                with self.work.writing():
                    self.work.clear()
                done = write_tokens(*arguments, Progress(Position(), Written()), self._save, advance)
        if done != begin:
            self.work.remove_output()  # it was made of less text
        if not done.written.tokens:
            self.work.clear()
            raise DataError(f"{self.source.name} holds no text that becomes tokens: name another source")
        return done

    def _save(self, progress: Progress) -> None:
        self.work.save({"identity": self.identity, "complete": False, "progress": as_state(progress)})

    def _finish(self, progress: Progress) -> dict[str, Any]:
        """Step 2; returns what the manifest says of it."""
        job, prefix = self.job, self.work.folder / PREFIX
        if job.format == "megatron":
            dtype = written_dtype(self.tokenizer.vocab_size).name
            return {"dtype": dtype, "sequences": progress.written.sequences, "tokens": progress.written.tokens}
        output = self.work.output
        if job.format == "arrow":
            self.work.remove_output()
            tokens, length = IndexedFile.open(prefix), job.options["sequence_length"]
            with self._bar("writing blocks", tokens.tokens.nbytes) as advance:
                blocks = arrow.write_blocks(tokens, length, output, progress.read.digest[:16], advance)
            return {"dtype": "int32", "sequences": blocks, "tokens": blocks * length}
        output.mkdir(exist_ok=True)
        shards = list(hdf5.shards(prefix, output, job.output.name, job.options["dupe_factor"], self._pair_options()))
        rows = 0
        total = sum(shard.bytes for shard in shards)
        small = total < _SMALL_BYTES
        with self._bar("masking", total) as advance, Workers.for_masking(len(shards), small=small) as workers:
            for shard, found in workers.each(hdf5.write_shard, shards):
                rows += found
                advance(shard.bytes)
        sync_folder(output)
        return {"dtype": "int32", "sequences": rows, "tokens": progress.written.tokens, "shards": len(shards)}

    def _pair_options(self) -> hdf5.PairOptions:
        options = self.job.options
        return hdf5.PairOptions(
            options["sequence_length"],
            options["max_predictions"],
            options["masked_fraction"],
            options["seed"],
            self.tokenizer.pair_tokens(),
            self.tokenizer.vocab_size,
            self.continuations,
        )

    def _facts(self, progress: Progress, counts: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest."""
        read = progress.read
        return {
            "format": self.job.format,
            "tokenizer": tokenizer_facts(
                self.job.tokenizer, self.tokenizer, self.tokenizer.vocab_size, closes=self.end is not None
            ),
            "source": {
                "name": self.source.name,
                "sha256": read.digest,
                "documents": read.documents,
                "characters": read.characters,
                "bytes": read.bytes,
            },
            "documents": read.documents,
            **counts,
            "options": dict(self.job.options),
            "identity": self.identity,
        }

    @contextlib.contextmanager
    def _bar(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        with self.bar(what, total) as advance:
            yield advance or (lambda _amount: None)
