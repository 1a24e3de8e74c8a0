"""The folder in which data are prepared, until they are complete and take their place, and the disk that they need.

    .NAME.preparing/state.json    what is durably written; replaced as a whole
    .NAME.preparing/…             files that grow; what lies beyond the state is cut off
    .NAME.preparing/output/       a folder that becomes OUTPUT, or files that are moved beside it

One process at a time works in it: the one that holds the lock or, if the file system has no locks, that created
owner.json. A process that is killed leaves the folder behind, and the next one continues from the state.

The disk that data will take is estimated before the work starts, so that it does not fail after hours.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.base.errors import ConfigError, DataError
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
from shardwise.base.parsing import json_value
from shardwise.base.units import size
from shardwise.config import DataConfig
from shardwise.data.reading.text_sources import PIECE_CHARACTERS, ColumnSource, FileSource, Source
from shardwise.data.tokens.encoding import ContentDigest, cut_sentences, group_by_size
from shardwise.data.tokens.tokenizer import Tokenizer

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STATE = "state.json"
_LOCK = "lock"
_OWNER = "owner.json"


class WorkFolder:
    """The work folder of one output."""

    def __init__(self, output: Path) -> None:
        self.target = output
        self.folder = output.parent / f".{output.name}.preparing"
        self.output = self.folder / "output"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder and keeps other processes out of it; a folder without a state is removed at the end.

        Raises:
            DataError: it cannot be written.
            ConfigError: another process prepares the same output.
        """
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock_file = open_lock(self.folder / _LOCK)
        with lock_file:
            refusal = f"{self.target} is being prepared by another process"
            try:
                taken = lock(lock_file, wait=False)
            except NoLocksError:
                self._claim(refusal)
                taken = True
            # The lock of a folder that was removed while this process waited to open it keeps nobody out.
            if not taken or not _is_there(lock_file):
                raise ConfigError(f"{refusal}: wait for its end")
            try:
                yield
            finally:
                # Once this process is done, the next one may have made a folder of the same name.
                if _is_there(lock_file):
                    (self.folder / _OWNER).unlink(missing_ok=True)
                    if not (self.folder / _STATE).exists():
                        self.remove()

    def _claim(self, refusal: str) -> None:
        """Claims the folder for this process if the file system has no locks: only one process can create owner.json.

        The file of a process of this machine that has ended is replaced.

        Raises:
            ConfigError: another process has the folder, or may have it on another machine.
        """
        path = self.folder / _OWNER
        aside = self.folder / f".{_OWNER}.{platform.node()}.{os.getpid()}"
        this_process = {"host": platform.node(), "pid": os.getpid()}
        for may_replace in (True, False):
            with self.writing(), contextlib.suppress(FileExistsError), path.open("xb") as file:
                file.write(json.dumps(this_process).encode())
                return
            owner = _read(path)
            if not (may_replace and owner is not None and _has_ended(owner)):
                break
            with self.writing(), contextlib.suppress(FileNotFoundError):
                # Only one process can rename the file. If another one replaced it since it was read, that one has the
                # folder now, and gets its file back.
                path.rename(aside)
                if _read(aside) != owner:
                    aside.rename(path)
                    break
                aside.unlink()
        who = "" if owner is None else f" ({owner.get('pid')} on {owner.get('host')})"
        raise ConfigError(f"{refusal}{who}: wait for its end, or remove {path} if it has ended")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns a failure to write into a sentence for the user."""
        try:
            yield
        except OSError as error:
            reason = f"{self.target} cannot be written: {reason_of(error)}"
            if (self.folder / _STATE).exists():
                reason += f"; what is finished stays in {self.folder}, and the same command continues from there"
            advice = "make room" if error.errno in _NO_ROOM else "name a place that can be"
            raise DataError(f"{reason}: {advice}") from error

    def state(self) -> dict[str, Any] | None:
        """The saved state; None if there is none."""
        return _read(self.folder / _STATE)

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the state; the files that it describes must be on the disk already."""
        write_atomic(self.folder / _STATE, json.dumps(state, indent=1))

    def clear(self) -> None:
        """Removes everything except the lock and the owner, the state first."""
        (self.folder / _STATE).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in (_LOCK, _OWNER):
                path.unlink()

    def remove_output(self) -> None:
        if self.output.exists():
            shutil.rmtree(self.output)

    def remove(self) -> None:
        """Removes the folder, the state first: files without a state are never continued."""
        (self.folder / _STATE).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def publish(self, moves: Sequence[tuple[Path, Path]]) -> None:
        """Moves complete data to their places, in the order of `moves`; it may be killed and called again.

        Data at the places are removed, those of the last move first: readers accept nothing without it.
        """
        last, target = moves[-1]
        if last.exists():
            if target.is_dir():
                aside = self.folder / "replaced"
                if aside.exists():
                    shutil.rmtree(aside)
                target.rename(aside)
            target.unlink(missing_ok=True)
            sync_folder(target.parent)
        for source, place in moves:
            if source.exists():
                source.replace(place)
                sync_folder(place.parent)
        self.remove()


def _is_there(lock_file: BinaryIO) -> bool:
    """True if the file still has its name: it was not removed, nor was the folder, since it was opened."""
    return os.fstat(lock_file.fileno()).st_nlink > 0


def _read(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is none."""
    try:
        content = json_value(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    return content


def _has_ended(owner: Mapping[str, Any]) -> bool:
    """True if a process has surely ended: it was one of this machine, and no process has its number now."""
    pid = owner.get("pid")
    if owner.get("host") != platform.node() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)  # signal 0 only asks whether the process exists
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False


# Bytes of text for each byte of a compressed file: more than most files have.
_PACKED = 6.0
# An estimate from the beginning of a text is not exact; a quarter more rarely refuses what would fit.
_MARGIN = 1.25
# Room for the state; a smaller shortage is not reported.
_LEAST = 1 << 16


@dataclass(frozen=True)
class Estimate:
    """Estimated sizes of a source, a little more rather than less.

    Attributes:
        bytes: size of the text.
        exact: True if `bytes` is the size of the text itself, and not of files that pack or wrap it.
        packed: True if files compress the text, at a ratio that is known only after they were read.
    """

    bytes: int
    exact: bool
    packed: bool
    tokens: int
    sentences: int
    documents: int


def estimate(data: DataConfig, source: Source, tokenizer: Tokenizer, *, sentences: bool) -> Estimate | None:
    """An estimate from the sizes of the files and the beginning of the text; None if there are no files."""
    if isinstance(source, ColumnSource):
        if data.path is None:
            return None
        files: Sequence[Path] = [path for path in user_path(data.path).rglob("*") if path.is_file()]
        wrapped = True
    else:
        if not source.files:
            return None
        files = source.files
        wrapped = False
    packed = set()
    if isinstance(source, FileSource):
        for path, reading in zip(files, source.readings, strict=True):
            wrapped = wrapped or reading.kind != "text"
            if reading.packing or reading.kind == "parquet":
                packed.add(path)
    total = sum(round(path.stat().st_size * (_PACKED if path in packed else 1.0)) for path in files)
    digest = ContentDigest()
    pieces = next(group_by_size(digest.watch(source.pieces()), lambda piece: piece.characters, PIECE_CHARACTERS), [])
    texts = []
    for piece in pieces:
        texts += cut_sentences(piece.text) if sentences else [piece.text]
    tokens = len(tokenizer.encode_rows(texts, literally=sentences)[0])
    ended = sum(piece.ends_document for piece in pieces)
    # All of the text has as many tokens for each byte as its beginning.
    scale = 0.0
    if digest.bytes:
        scale = _MARGIN * total / digest.bytes
    documents = max(len(files), round(ended * scale))
    return Estimate(
        bytes=total,
        exact=not (wrapped or packed),
        packed=bool(packed),
        tokens=round(tokens * scale) + documents,
        sentences=round(len(texts) * scale) + documents,
        documents=documents,
    )


def check_room(needed: int, written: int, output: Path, announce: Callable[[str], None], *, packed: bool) -> None:
    """Announces how much disk `output` needs.

    Args:
        written: bytes of `needed` that are on the disk already.
        packed: True if the text is compressed, so that the estimate is too rough for a refusal.

    Raises:
        DataError: the disk has less.
    """
    free = free_bytes(output)
    missing = max(needed - written, 0)
    if missing <= max(free, _LEAST):
        announce(f"preparing {output}: takes about {size(missing)} of the {size(free)} that are free")
    elif packed:
        announce(
            f"preparing {output}: may take {size(missing)}, as its text is packed, and {size(free)} are free: if the "
            "disk becomes full, make room, and the same command continues"
        )
    else:
        raise DataError(
            f"the disk under {output} ({size(free)} free) must have about {size(missing)} free: make room, or name "
            "another place"
        )


def bytes_below(folder: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
