"""The place of prepared data: Megatron's .bin and .idx with a manifest, and data that are there already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, DataError, listing
from shardwise.base.files import sync_folder, to_disk, user_path
from shardwise.data.prepare.work_folder import PREFIX, WorkFolder
from shardwise.data.reading import manifest
from shardwise.data.reading.megatron_files import count_sequences
from shardwise.data.tokens.tokenizer import Tokenizer

MEGATRON = "megatron"
"""The format of the data, as the manifest and the identity name it."""
VERSION = 2
"""Belongs to the identity of prepared data: raise it when the same text and options become other bytes."""
ANY_VOCABULARY = 1 << 31
"""More tokens than a vocabulary may have: a tokenizer that is opened with it may be of any size."""


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
    """The prefix at which data are written.

    Args:
        named: tokenizer that makes or made the ids, as the user names it; None if it is unknown.
        tokenizer: the same tokenizer, opened.
        options: options of the preparation, by their names.

    Attributes:
        identity: everything that decides the data except the text; data of another identity are other data.
        work: folder in which the data lie until they are complete.
    """

    def __init__(self, path: Path, named: str | None, tokenizer: Tokenizer | None, options: Mapping[str, Any]) -> None:
        self.path = path
        self._named = named
        self._tokenizer = tokenizer
        self.identity: dict[str, Any] = {
            "version": VERSION,
            "format": MEGATRON,
            "tokenizer": None if tokenizer is None else tokenizer.digest,
            "options": dict(options),
        }
        self.manifest = manifest.of_prefix(path)
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
            with self.work.writing():
                # Readers accept nothing without the .idx, so it comes last.
                self.work.publish(
                    [
                        (f"{PREFIX}.bin", Path(f"{self.path}.bin")),
                        (manifest.NAME, self.manifest),
                        (f"{PREFIX}.idx", Path(f"{self.path}.idx")),
                    ]
                )
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
            "format": MEGATRON,
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
        folder = self.work.folder
        manifest.write_manifest(folder / manifest.NAME, facts)
        with (folder / manifest.NAME).open("ab") as file:
            to_disk(file)
        sync_folder(folder)
        # Last: from here on the same command only moves the files.
        self.work.save({"identity": self.identity, "complete": True, "facts": facts})
        return facts

    def _existing(self, content: Callable[[], str], *, force: bool) -> Mapping[str, Any] | None:
        """The manifest of the same data if they are there; None if nothing is, or data that may be replaced."""
        paths = [path for suffix in (".idx", ".bin", ".json") if (path := Path(f"{self.path}{suffix}")).exists()]
        if not paths:
            return None
        made = manifest.read_manifest(self.manifest)
        if made is None and not self._is_data_set(paths):
            raise DataError(f"{paths[0]} is there, and was not prepared here: remove it, or name another OUTPUT")
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

    def _is_data_set(self, paths: list[Path]) -> bool:
        """True if files without a manifest are a Megatron data set of another program."""
        if self.manifest not in paths:
            with contextlib.suppress(DataError):
                count_sequences(self.path)
                return True
        return False

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
