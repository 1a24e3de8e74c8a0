"""Where each format's files are written, and what is there already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.data.reading import manifest
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.errors import DataError, listing
from shardwise.files import sync_folder, to_disk
from shardwise.prepare.tokens import PREFIX
from shardwise.prepare.work import Work

Format = Literal["megatron", "arrow", "hdf5"]
VERSION = 1
"""Belongs to what is prepared: raise it when the same text and options become other bytes."""
ANY_VOCABULARY = 1 << 31
"""More tokens than a vocabulary may have: a tokenizer that is opened with it may be of any size."""


@dataclass(frozen=True)
class Outcome:
    """The manifest of what is there now, and whether it was there before."""

    manifest: Mapping[str, Any]
    was_there: bool


@dataclass(frozen=True)
class Output:
    """Where data are written: a prefix (Megatron), or a new folder.

    Attributes:
        identity: all that decides the data except the text; data of another identity are other data.
    """

    path: Path
    format: Format
    identity: Mapping[str, Any]

    @property
    def manifest(self) -> Path:
        return manifest.of_prefix(self.path) if self.format == "megatron" else manifest.of_folder(self.path)

    def find(self, content: Callable[[], str], *, force: bool) -> Mapping[str, Any] | None:
        """The manifest of what is there; None where nothing is, or what may be replaced.

        content: the digest of the text, which is asked for only if all else is the same. force: what was prepared
        from something else may be replaced.

        Raises:
            DataError: something else is there.
        """
        held = self._held()
        if not held:
            return None
        found = manifest.read_manifest(self.manifest)
        if found is None and (self.manifest in held or self.format != "megatron"):
            raise DataError(f"{held[0]} is there, and was not prepared here: remove it, or name another OUTPUT")
        if force:
            return None
        if found is None:
            raise DataError(f"{held[0]} is there: name another OUTPUT, or replace it by --force")
        different = self._differences(found, content)
        if not different:
            return found
        made_with = found["tokenizer"].get("name") or "no tokenizer"
        raise DataError(
            f"{held[0]} was prepared from {found['source'].get('name')} with {made_with}, and now "
            f"{listing(different)} {'is' if len(different) == 1 else 'are'} another: name another OUTPUT, or replace "
            "it by --force"
        )

    def produce(
        self,
        work: Work,
        content: Callable[[], str],
        make: Callable[[Mapping[str, Any] | None], Mapping[str, Any]],
        *,
        force: bool,
    ) -> Outcome:
        """Publishes what `make` makes, unless the same is there already.

        Args:
            content: as for `find`.
            make: fills the work folder, ends with `complete` and returns the manifest. It is called with the state of
                an unfinished preparation of the same, or None.
            force: as for `find`.
        """
        with work.held():
            state = work.state()
            if state is not None and state.get("identity") != self.identity:
                state = None
            if state is not None and state["complete"]:
                facts: Mapping[str, Any] = state["facts"]  # it was cut off while the files got their last names
            else:
                there = self.find(content, force=force)
                if there is not None:
                    return Outcome(there, was_there=True)
                facts = make(state)
            with work.writing():
                self._publish(work)
        return Outcome(facts, was_there=False)

    def complete(self, work: Work, facts: Mapping[str, Any]) -> None:
        """Writes the manifest beside what is complete in the work folder, and then the state that says so."""
        folder = work.folder if self.format == "megatron" else work.output
        path = folder / manifest.NAME
        manifest.write_manifest(path, facts)
        with path.open("ab") as file:
            to_disk(file)
        sync_folder(folder)
        work.save({"identity": self.identity, "complete": True, "facts": facts})

    def _publish(self, work: Work) -> None:
        """Moves what is complete out of the work folder; it may be cut off and repeated."""
        if self.format != "megatron":
            work.publish([(work.output, self.path)])
            return
        tokens, index = (work.folder / f"{PREFIX}{suffix}" for suffix in (".bin", ".idx"))
        work.publish(
            [
                (tokens, Path(f"{self.path}.bin")),
                (work.folder / manifest.NAME, self.manifest),
                (index, Path(f"{self.path}.idx")),
            ]
        )

    def _held(self) -> list[Path]:
        """The paths that are there; an empty folder does not count."""
        if self.format == "megatron":
            names = (Path(f"{self.path}{suffix}") for suffix in (".idx", ".bin", ".json"))
            return [path for path in names if path.exists()]
        is_empty = self.path.is_dir() and not any(self.path.iterdir())
        return [self.path] if self.path.exists() and not is_empty else []

    def _differences(self, found: Mapping[str, Any], content: Callable[[], str]) -> list[str]:
        own, made = self.identity, found.get("identity")
        if not isinstance(made, dict) or made.get("version") != own["version"]:
            return ["the version of shardwise"]
        different = [f"the {key}" for key in ("format", "tokenizer") if made.get(key) != own[key]]
        if not different:
            options = own["options"]
            different = [
                f"--{name.replace('_', '-')}" for name in options if options[name] != found["options"].get(name)
            ]
        if not different and found["source"].get("sha256") != content():
            different = ["the text"]
        return different


def tokenizer_facts(named: str | None, tokenizer: Tokenizer | None, vocab_size: int, *, closes: bool) -> dict[str, Any]:
    """What a manifest says of the tokenizer.

    Args:
        named: as the user names it.
        closes: whether its end of document closes the documents.
    """
    path = None if named is None else Path(named).expanduser()
    return {
        "name": str(path.absolute()) if path is not None and path.exists() else named,
        "sha256": None if tokenizer is None else tokenizer.digest,
        "vocab_size": vocab_size,
        "end_of_document": tokenizer.end_of_document if tokenizer is not None and closes else None,
    }
