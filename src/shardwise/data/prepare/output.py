"""The place of prepared data: Megatron's PREFIX.bin and PREFIX.idx with PREFIX.json, their manifest.

They are made in a folder beside it. A process that is killed leaves the folder behind, and the next one continues:

    .NAME.preparing/state.json    what is durably written; replaced as a whole
    .NAME.preparing/tokens.*      files that grow; what lies beyond the state is cut off
    .NAME.preparing/lock          its holder alone works in the folder
    .NAME.preparing/owner.json    in place of the lock where the file system has none
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shardwise.base.errors import ConfigError, DataError, listing
from shardwise.base.files import (
    NoLocksError,
    free_bytes,
    lock,
    open_lock,
    reason_of,
    sync_folder,
    user_path,
    write_atomic,
)
from shardwise.base.units import size
from shardwise.base.yaml_and_json import json_value
from shardwise.data.reading import data_manifest
from shardwise.data.reading.megatron_files import count_sequences, publish_megatron_files
from shardwise.data.tokens.tokenizer import Tokenizer

VERSION = 2
"""Belongs to the identity of prepared data: raise it when the same text and options become other bytes."""
ANY_VOCABULARY = 1 << 31
"""More tokens than a vocabulary may have: a tokenizer that is opened with it may be of any size."""
_FORMAT = "megatron"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LEAST = 1 << 16  # bytes of a shortage that is not reported: room for the state
_STATE = "state.json"
_LOCK = "lock"
_OWNER = "owner.json"


class PreparationOutcome(NamedTuple):
    """The result of `data prepare`: the manifest of the data, and whether they were there before."""

    manifest: Mapping[str, Any]
    was_there: bool


class PreparedOutput:
    """The prefix at which `data prepare` writes data.

    Args:
        named: tokenizer that makes or made the ids, as the user names it; None if it is unknown.

    Attributes:
        identity: everything that decides the data except the text; data of another identity are other data.
        folder: folder in which the data lie until they are complete.
        made: prefix of the data in the folder.
    """

    def __init__(self, path: Path, named: str | None, tokenizer: Tokenizer | None, options: Mapping[str, Any]) -> None:
        self.path = path
        self.folder = path.parent / f".{path.name}.preparing"
        self.made = self.folder / "tokens"
        self._named = named
        self._tokenizer = tokenizer
        self.identity: dict[str, Any] = {
            "version": VERSION,
            "format": _FORMAT,
            "tokenizer": None if tokenizer is None else tokenizer.digest,
            "options": dict(options),
        }

    def produce(
        self, content: Callable[[], str], make: Callable[[Any], Mapping[str, Any]], *, force: bool
    ) -> PreparationOutcome:
        """Publishes the data that `make` makes, unless the same are there already; `force` replaces others.

        `content` returns the digest of the text, if nothing else differs. `make` fills the work folder from the
        progress that was saved last, or None, ends with `complete` and returns the manifest. DataError: other data are
        there, or the place cannot be written. ConfigError: another process prepares the same output.
        """
        with self._locked():
            state = self._state()
            facts: Mapping[str, Any] | None = state.get("facts")
            if facts is None:  # else an earlier process was killed while it moved the files
                existing = self._existing(content, force=force)
                if existing is not None:
                    return PreparationOutcome(existing, was_there=True)
                progress = state.get("reached")
                if progress is None:
                    self.clear()
                facts = make(progress)
            with self.writing():
                if Path(f"{self.made}.idx").exists():
                    data_manifest.write_manifest(data_manifest.manifest_of_prefix(self.path), facts)
                publish_megatron_files(self.made, self.path)
                (self.folder / _STATE).unlink()
                shutil.rmtree(self.folder, ignore_errors=True)
        return PreparationOutcome(facts, was_there=False)

    def save(self, progress: Mapping[str, Any]) -> None:
        """Replaces the state; the files that it describes must be on the disk already."""
        self._save({"reached": progress})

    def complete(self, source: Mapping[str, Any], vocab_size: int, *, closes: bool, **counts: Any) -> dict[str, Any]:
        """Saves that the data of `source` are complete; returns their manifest. `closes`: an end closes documents."""
        # A path is made absolute, as readers start in other folders; a hub id is left as it is.
        name = self._named
        if name is not None and (path := user_path(name)).exists():
            name = str(path.absolute())
        end = self._tokenizer.end_of_document if self._tokenizer is not None and closes else None
        digest = self.identity["tokenizer"]
        facts = {
            "format": _FORMAT,
            "tokenizer": {"name": name, "sha256": digest, "vocab_size": vocab_size, "end_of_document": end},
            "source": source,
            "documents": source["documents"],
            **counts,
            "options": self.identity["options"],
            "identity": self.identity,
        }
        sync_folder(self.folder)
        # From here on the same command only moves the files.
        self._save({"facts": facts})
        return facts

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns a failure to write into a sentence for the user."""
        try:
            yield
        except OSError as error:
            reason = f"{self.path} cannot be written: {reason_of(error)}"
            if (self.folder / _STATE).exists():
                reason += f"; what is finished stays in {self.folder}, and the same command continues from there"
            advice = "make room" if error.errno in _NO_ROOM else "name a place that can be"
            raise DataError(f"{reason}: {advice}") from error

    def clear(self) -> None:
        """Removes all but the lock from the work folder, the state first: files without it are never continued."""
        with self.writing():
            (self.folder / _STATE).unlink(missing_ok=True)
            for path in self.folder.iterdir():
                if path.name not in (_LOCK, _OWNER):
                    path.unlink()

    def require_room(self, needed: int | None, announce: Callable[[str], None]) -> None:
        """Announces the bytes that the data need, if known; DataError: the disk has less, beside what is written."""
        if needed is None:
            announce(f"preparing {self.path}: its size is known only after the text was read")
            return
        free = free_bytes(self.path)
        missing = max(needed - sum(path.stat().st_size for path in self.folder.iterdir()), 0)
        if missing > max(free, _LEAST):
            raise DataError(
                f"the disk under {self.path} ({size(free)} free) must have about {size(missing)} free: make room, or "
                "name another place"
            )
        announce(f"preparing {self.path}: takes about {size(missing)} of the {size(free)} that are free")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Makes the work folder and keeps other processes out of it; a folder without a state is removed at the end."""
        if self.path.name in ("", ".."):
            raise ConfigError(f"OUTPUT ({self.path}) must end in a name: add one, such as {self.path / 'data'}")
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock_file = open_lock(self.folder / _LOCK)
        with lock_file:
            advice = "wait for its end"
            owner = self.folder / _OWNER
            try:
                taken = lock(lock_file, wait=False)
            except NoLocksError:
                advice += f", or remove {owner} if it has ended"
                taken = False
                with self.writing(), contextlib.suppress(FileExistsError):
                    owner.touch(exist_ok=False)
                    taken = True
            # The lock of a folder that was removed while this process waited to open it keeps nobody out.
            if not taken or not _has_name(lock_file):
                raise ConfigError(f"{self.path} is being prepared by another process: {advice}")
            try:
                yield
            finally:
                # Once the data are published, the next process may have made a folder of the same name.
                if _has_name(lock_file):
                    owner.unlink(missing_ok=True)
                    if not (self.folder / _STATE).exists():
                        shutil.rmtree(self.folder, ignore_errors=True)

    def _state(self) -> Mapping[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            state = json_value((self.folder / _STATE).read_bytes())
            if isinstance(state, dict) and state.get("identity") == self.identity:
                return state
        return {}

    def _save(self, state: Mapping[str, Any]) -> None:
        write_atomic(self.folder / _STATE, json.dumps({"identity": self.identity, **state}, indent=1))

    def _existing(self, content: Callable[[], str], *, force: bool) -> Mapping[str, Any] | None:
        """The manifest of the same data if they are there; None if nothing is, or data that may be replaced."""
        record = data_manifest.manifest_of_prefix(self.path)
        paths = [path for path in (Path(f"{self.path}.idx"), Path(f"{self.path}.bin"), record) if path.exists()]
        if not paths:
            return None
        made = data_manifest.read_manifest(record)
        if made is None:
            try:
                count_sequences(self.path)  # a data set of another program has no manifest
            except DataError:
                is_data_set = False
            else:
                is_data_set = record not in paths
            if not is_data_set:
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

    def _differences(self, made: Mapping[str, Any], content: Callable[[], str]) -> list[str]:
        """The differences between these data and those of a manifest; reading the text takes longest, so it is last."""
        identity = made.get("identity")
        if not isinstance(identity, dict) or identity.get("version") != VERSION:
            return ["the version of shardwise"]
        differences = [f"the {key}" for key in ("format", "tokenizer") if identity.get(key) != self.identity[key]]
        for name, value in self.identity["options"].items():
            if value != made["options"].get(name, False):
                differences.append(f"--{name.replace('_', '-')}")
        if not differences and made["source"].get("sha256") != content():
            differences.append("the text")
        return differences


def _has_name(file: BinaryIO) -> bool:
    """True if an open file was not removed."""
    return os.fstat(file.fileno()).st_nlink > 0
