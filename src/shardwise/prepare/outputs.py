"""What is made where: the names of each format's files, and whether something is there already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.data.reading import manifest
from shardwise.data.reading.megatron import sync_folder, to_disk
from shardwise.errors import DataError, listing
from shardwise.prepare.tokens import PREFIX
from shardwise.prepare.work import Work

Format = Literal["megatron", "arrow", "hdf5"]


@dataclass(frozen=True)
class Output:
    """A prefix (Megatron), or a folder that is made anew.

    Attributes:
        identity: of a preparation, without its text: data of another identity are other data.
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

    def complete(self, work: Work, facts: Mapping[str, Any]) -> None:
        """Writes the manifest beside what is complete in the work folder."""
        folder = work.folder if self.format == "megatron" else work.output
        path = folder / manifest.NAME
        manifest.write_manifest(path, facts)
        with path.open("ab") as file:
            to_disk(file)
        sync_folder(folder)

    def publish(self, work: Work) -> None:
        """Moves what is complete out of the work folder; may be cut off, and done again."""
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
        """What is there; an empty folder is nothing."""
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
