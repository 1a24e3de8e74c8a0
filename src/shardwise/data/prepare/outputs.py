"""Where each format's files are written, and what is there already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.base.errors import ConfigError, DataError, listing
from shardwise.base.files import sync_folder, to_disk
from shardwise.data.prepare.tokenizing import PREFIX
from shardwise.data.prepare.work_folder import WorkFolder
from shardwise.data.reading import manifest
from shardwise.data.tokens.tokenizer import Tokenizer

Format = Literal["megatron", "arrow", "hdf5"]
VERSION = 2
"""Belongs to what is prepared: raise it when the same text and options become other bytes."""
ANY_VOCABULARY = 1 << 31
"""More tokens than a vocabulary may have: a tokenizer that is opened with it may be of any size."""


@dataclass(frozen=True)
class Outcome:
    """The manifest of what is there now, and whether it was there before."""

    manifest: Mapping[str, Any]
    was_there: bool


def check_name(output: Path) -> None:
    """Raises ConfigError for an output whose path does not end in a name."""
    if output.name in ("", ".."):
        raise ConfigError(f"OUTPUT ({output}) must end in a name: add one, such as {output / 'data'}")


class Output:
    """Where data are written: a prefix (Megatron), or a new folder.

    Args:
        named: the tokenizer that makes or made the ids, as the user names it; None where it is unknown.
        tokenizer: the same tokenizer, opened.
        options: those of the format, by their names.

    Attributes:
        identity: all that decides the data except the text; data of another identity are other data.
        work: the folder where they lie until they are complete.
    """

    def __init__(
        self, path: Path, format_: Format, named: str | None, tokenizer: Tokenizer | None, options: Mapping[str, Any]
    ) -> None:
        self.path, self.format, self._named, self._tokenizer = path, format_, named, tokenizer
        self.identity: dict[str, Any] = {
            "version": VERSION,
            "format": format_,
            "tokenizer": None if tokenizer is None else tokenizer.digest,
            "options": dict(options),
        }
        self.manifest = manifest.of_prefix(path) if format_ == "megatron" else manifest.of_folder(path)
        self.work = WorkFolder(path)

    def produce(
        self,
        content: Callable[[], str],
        make: Callable[[Mapping[str, Any] | None], Mapping[str, Any]],
        *,
        force: bool,
    ) -> Outcome:
        """Publishes what `make` makes, unless the same is there already.

        Args:
            content: returns the digest of the text; it is called only if all else is the same.
            make: fills the work folder, ends with `complete` and returns its manifest. Its argument is the state of an
                unfinished preparation of the same identity, or None.
            force: what was prepared from something else is replaced.

        Raises:
            DataError: something else is there.
        """
        with self.work.held():
            state = self.work.state()
            if state is not None and state.get("identity") != self.identity:
                state = None
            if state is not None and state["complete"]:
                facts: Mapping[str, Any] = state["facts"]  # an earlier process was killed while it moved the files
            else:
                existing = self._existing(content, force=force)
                if existing is not None:
                    return Outcome(existing, was_there=True)
                facts = make(state)
            moves = [(self.work.output, self.path)]
            if self.format == "megatron":
                moves = [
                    (self.work.folder / f"{PREFIX}.bin", Path(f"{self.path}.bin")),
                    (self.work.folder / manifest.NAME, self.manifest),
                    (self.work.folder / f"{PREFIX}.idx", Path(f"{self.path}.idx")),
                ]
            with self.work.writing():
                self.work.publish(moves)
        return Outcome(facts, was_there=False)

    def complete(self, source: Mapping[str, Any], vocab_size: int, *, closes: bool, **counts: Any) -> dict[str, Any]:
        """Writes the manifest beside what is complete in the work folder, and then the state that says so.

        Args:
            source: what the manifest says about the text, with the number of its documents.
            closes: whether the tokenizer's end of document closes the documents.
            counts: what else the manifest says.
        """
        path = None if self._named is None else Path(self._named).expanduser()
        end = self._tokenizer.end_of_document if self._tokenizer is not None and closes else None
        facts = {
            "format": self.format,
            "tokenizer": {
                "name": str(path.absolute()) if path is not None and path.exists() else self._named,
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
        folder = self.work.folder if self.format == "megatron" else self.work.output
        manifest.write_manifest(folder / manifest.NAME, facts)
        with (folder / manifest.NAME).open("ab") as file:
            to_disk(file)
        sync_folder(folder)
        self.work.save({"identity": self.identity, "complete": True, "facts": facts})
        return facts

    def _existing(self, content: Callable[[], str], *, force: bool) -> Mapping[str, Any] | None:
        """The manifest of the same data that are there; None where nothing is, or what may be replaced."""
        if self.format == "megatron":
            paths = [Path(f"{self.path}{suffix}") for suffix in (".idx", ".bin", ".json")]
        else:  # an empty folder does not count
            paths = [] if self.path.is_dir() and not any(self.path.iterdir()) else [self.path]
        paths = [path for path in paths if path.exists()]
        if not paths:
            return None
        made = manifest.read_manifest(self.manifest)
        if made is None and (self.manifest in paths or self.format != "megatron"):
            raise DataError(f"{paths[0]} is there, and was not prepared here: remove it, or name another OUTPUT")
        if force:
            return None
        if made is None:
            raise DataError(f"{paths[0]} is there: name another OUTPUT, or replace it by --force")
        different = self._differences(made, content)
        if not different:
            return made
        tokenizer = made["tokenizer"].get("name") or "no tokenizer"
        raise DataError(
            f"{paths[0]} was prepared from {made['source'].get('name')} with {tokenizer}, and now "
            f"{listing(different)} {'is' if len(different) == 1 else 'are'} another: name another OUTPUT, or replace "
            "it by --force"
        )

    def _differences(self, made: Mapping[str, Any], content: Callable[[], str]) -> list[str]:
        """How these data differ from those of a manifest: the first kind of difference that there is."""
        own, other = self.identity, made.get("identity")
        if not isinstance(other, dict) or other.get("version") != own["version"]:
            return ["the version of shardwise"]
        options = own["options"]
        return (
            [f"the {key}" for key in ("format", "tokenizer") if other.get(key) != own[key]]
            or [f"--{name.replace('_', '-')}" for name in options if options[name] != made["options"].get(name, False)]
            or ([] if made["source"].get("sha256") == content() else ["the text"])
        )
