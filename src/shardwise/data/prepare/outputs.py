"""The place of prepared data, with its manifest, and data that are there already."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.base.errors import ConfigError, DataError, listing
from shardwise.base.files import sync_folder, to_disk, user_path
from shardwise.data.prepare.tokenizing import PREFIX, WrittenCounts
from shardwise.data.prepare.work_folder import Estimate, WorkFolder
from shardwise.data.reading import manifest
from shardwise.data.reading.megatron_files import count_sequences, written_dtype
from shardwise.data.tokens.tokenizer import Tokenizer

FormatName = Literal["megatron", "arrow", "hdf5"]
VERSION = 2
"""Belongs to the identity of prepared data: raise it when the same text and options become other bytes."""
ANY_VOCABULARY = 1 << 31
"""More tokens than a vocabulary may have: a tokenizer that is opened with it may be of any size."""

# Files in folders of all formats.
_WRITTEN = re.compile(
    rf"{re.escape(manifest.NAME)}|(state|dataset_info)\.json|data-\d+-of-\d+\.arrow|.*_training_\d+\.hdf5"
)

Advance = Callable[[int], None]
"""Called with the amount of work that was done."""


@dataclass(frozen=True)
class FormatJob:
    """All tokens of a text, a Megatron data set in the work folder, that become data of a format in its output folder.

    Attributes:
        prefix: prefix of the data set.
        counts: contents of the data set.
        digest: digest of the text.
        tokenizer: tokenizer that made the tokens.
        work: work folder.
        name: name of the output.
        options: options of the format, by their names.
        bar: makes a progress bar of a description and a total.
    """

    prefix: Path
    counts: WrittenCounts
    digest: str
    tokenizer: Tokenizer
    work: WorkFolder
    name: str
    options: Mapping[str, Any]
    bar: Callable[[str, int | None], AbstractContextManager[Advance]]


@dataclass(frozen=True)
class OutputFormat:
    """A format in which data are prepared.

    Attributes:
        name: value of --format.
        is_folder: True if the output is a new folder, False if it is the prefix of files.
        has_pairs: True if samples are sentence pairs, which need sentences and BERT's special tokens.
        longest_document: number of tokens at which a document is ended, and its rest becomes another; None: never.
        option_problems: function that returns the problems of the options; it raises DataError if a library is missing.
        disk_bytes: function that returns the bytes of the data beyond those of the tokens themselves.
        write: function that makes the data and returns the manifest's facts about them.
    """

    name: FormatName
    is_folder: bool
    write: Callable[[FormatJob], dict[str, Any]]
    has_pairs: bool = False
    longest_document: int | None = None
    option_problems: Callable[[Mapping[str, Any]], list[str]] = lambda _options: []
    disk_bytes: Callable[[Estimate, Mapping[str, Any]], int] = lambda _estimate, _options: 0


def _facts_of_tokens(job: FormatJob) -> dict[str, Any]:
    """The facts about a Megatron data set, which is complete already."""
    dtype = written_dtype(job.tokenizer.vocab_size).name
    return {"dtype": dtype, "sequences": job.counts.sequences, "tokens": job.counts.tokens}


MEGATRON = OutputFormat(name="megatron", is_folder=False, write=_facts_of_tokens)


@dataclass(frozen=True)
class PreparationOutcome:
    """The result of a preparation.

    Attributes:
        manifest: manifest of the data at the output.
        was_there: True if the data were there before.
    """

    manifest: Mapping[str, Any]
    was_there: bool


def check_name(output: Path) -> None:
    """Raises ConfigError for an output whose path does not end in a name."""
    if output.name in ("", ".."):
        raise ConfigError(f"OUTPUT ({output}) must end in a name: add one, such as {output / 'data'}")


class Output:
    """The place where data are written: a prefix of files, or a new folder.

    Args:
        named: tokenizer that makes or made the ids, as the user names it; None if it is unknown.
        tokenizer: the same tokenizer, opened.
        options: options of the format, by their names.

    Attributes:
        identity: everything that decides the data except the text; data of another identity are other data.
        work: folder in which the data lie until they are complete.
    """

    def __init__(
        self,
        path: Path,
        format: OutputFormat,
        named: str | None,
        tokenizer: Tokenizer | None,
        options: Mapping[str, Any],
    ) -> None:
        self.path = path
        self.format = format
        self._named = named
        self._tokenizer = tokenizer
        self.identity: dict[str, Any] = {
            "version": VERSION,
            "format": format.name,
            "tokenizer": None if tokenizer is None else tokenizer.digest,
            "options": dict(options),
        }
        self.manifest = manifest.of_folder(path) if format.is_folder else manifest.of_prefix(path)
        self.work = WorkFolder(path)

    def produce(
        self,
        content: Callable[[], str],
        make: Callable[[Mapping[str, Any] | None], Mapping[str, Any]],
        *,
        force: bool,
    ) -> PreparationOutcome:
        """Publishes the data that `make` makes, unless the same are there already.

        Args:
            content: function that returns the digest of the text; it is called only if nothing else differs.
            make: function that fills the work folder, ends with `complete` and returns its manifest. Its argument is
                the state of an unfinished preparation of the same identity, or None.
            force: True to replace data that were prepared from another text or in another way.

        Raises:
            DataError: other data are there.
        """
        with self.work.locked():
            state = self.work.state()
            if state is not None and state.get("identity") != self.identity:
                state = None
            if state is not None and state["complete"]:
                # An earlier process was killed while it moved the files.
                facts: Mapping[str, Any] = state["facts"]
            else:
                existing = self._existing(content, force=force)
                if existing is not None:
                    return PreparationOutcome(existing, was_there=True)
                facts = make(state)
            if self.format.is_folder:
                moves = [(self.work.output, self.path)]
            else:  # readers accept nothing without the .idx, so it comes last
                moves = [
                    (self.work.folder / f"{PREFIX}.bin", Path(f"{self.path}.bin")),
                    (self.work.folder / manifest.NAME, self.manifest),
                    (self.work.folder / f"{PREFIX}.idx", Path(f"{self.path}.idx")),
                ]
            with self.work.writing():
                self.work.publish(moves)
        return PreparationOutcome(facts, was_there=False)

    def complete(self, source: Mapping[str, Any], vocab_size: int, *, closes: bool, **counts: Any) -> dict[str, Any]:
        """Writes the manifest next to the complete data in the work folder, and then the state that says so.

        Args:
            source: facts of the manifest about the text, with the number of its documents.
            closes: True if the tokenizer's end of document closes the documents.
            counts: other facts of the manifest.
        """
        # A path is made absolute, as readers start in other folders; a hub id is left as it is.
        name = self._named
        if name is not None and (path := user_path(name)).exists():
            name = str(path.absolute())
        end = None
        if self._tokenizer is not None and closes:
            end = self._tokenizer.end_of_document
        facts = {
            "format": self.format.name,
            "tokenizer": {
                "name": name,
                "sha256": self.identity["tokenizer"],
                "vocab_size": vocab_size,
                "end_of_document": end,
            },
            "source": source,
            "documents": source["documents"],
            **counts,
            "options": self.identity["options"],
            "identity": self.identity,
        }
        folder = self.work.output if self.format.is_folder else self.work.folder
        manifest.write_manifest(folder / manifest.NAME, facts)
        with (folder / manifest.NAME).open("ab") as file:
            to_disk(file)
        sync_folder(folder)
        # Last: from here on the same command only moves the files.
        self.work.save({"identity": self.identity, "complete": True, "facts": facts})
        return facts

    def _existing(self, content: Callable[[], str], *, force: bool) -> Mapping[str, Any] | None:
        """The manifest of the same data if they are there; None if nothing is, or data that may be replaced."""
        paths = [self.path]
        if not self.format.is_folder:
            paths = [Path(f"{self.path}{suffix}") for suffix in (".idx", ".bin", ".json")]
        elif self.path.is_dir() and not any(self.path.iterdir()):  # an empty folder does not count
            return None
        paths = [path for path in paths if path.exists()]
        if not paths:
            return None
        made = manifest.read_manifest(self.manifest)
        if (made is None or force) and (own := self._own_file(made, paths)) is not None:
            raise DataError(f"{own} is there, and was not prepared here: remove it, or name another OUTPUT")
        if force:
            return None
        if made is None:
            raise DataError(f"{paths[0]} is there: name another OUTPUT, or replace it by --force")
        different = self._differences(made, content)
        if not different:
            return made
        tokenizer = made["tokenizer"].get("name") or "no tokenizer"
        verb = "is" if len(different) == 1 else "are"
        raise DataError(
            f"{paths[0]} was prepared from {made['source'].get('name')} with {tokenizer}, and now "
            f"{listing(different)} {verb} another: name another OUTPUT, or replace it by --force"
        )

    def _own_file(self, made: Mapping[str, Any] | None, paths: Sequence[Path]) -> Path | None:
        """A file of the user in the place of the data, which is never replaced; a Megatron data set is, by --force."""
        if made is not None:
            files = self.path.rglob("*") if self.format.is_folder else ()
            return next((file for file in files if not _WRITTEN.fullmatch(file.name)), None)
        if not self.format.is_folder and self.manifest not in paths:
            with contextlib.suppress(DataError):
                count_sequences(self.path)
                return None
        return paths[0]

    def _differences(self, made: Mapping[str, Any], content: Callable[[], str]) -> list[str]:
        """The differences between these data and those of a manifest, of the first kind that there is.

        Reading the text takes longest, so it is compared last.
        """
        made_identity = made.get("identity")
        if not isinstance(made_identity, dict) or made_identity.get("version") != self.identity["version"]:
            return ["the version of shardwise"]
        differences = [f"the {key}" for key in ("format", "tokenizer") if made_identity.get(key) != self.identity[key]]
        if differences:
            return differences
        for name, value in self.identity["options"].items():
            if value != made["options"].get(name, False):
                differences.append(f"--{name.replace('_', '-')}")
        if not differences and made["source"].get("sha256") != content():
            differences.append("the text")
        return differences
