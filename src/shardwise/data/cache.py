"""The cache of tokenized data: entries that appear whole or not at all, and are checked when opened.

    ROOT/sources/STAMP.json     the digest of a text that has not changed since
    ROOT/sources/tokens-KEY.json  the key of the entry with these tokens, where another key names the same ones
    ROOT/tokens/KEY/            tokenizer/ (of text), {train,eval,test}.bin, manifest.json; for sentence pairs also
                                {train,eval,test}.{sentences,documents}.bin, for conversations .{conversations,answers}
    ROOT/tokenizers/KEY/        tokenizer/, manifest.json: a user's own, of data that are tokens already
    ROOT/packs/KEY/             {train,eval,test}.{pieces,samples}.bin, manifest.json: documents packed into samples
    ROOT/shards/KEY/            HDF5 arrays that lay in chunks (`reading.hdf5`)
    ROOT/locks/KEY.lock         one process builds an entry, the others wait

Tokens lie back to back as little-endian uint16 or int32, the bounds of sentences and documents (`Sentences`), those of
conversations and answers (`Conversations`) and packed samples (`PackedSamples`) as int64.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardwise.base import files
from shardwise.base.errors import DataError, see
from shardwise.base.progress import progress
from shardwise.base.yaml_and_json import json_value
from shardwise.data.rows import PARTS, IntArray, Integers, Part, Sentences, TokenArray, json_digest

# Belongs to every key: raise it when anything that decides the content of an entry changes.
FORMAT = 2
BOUNDS = ("sentences", "documents")
BOUNDS_DTYPE = np.dtype("<i8")
# A start reads at most 256 blocks of 64 KiB of each file, 16 MiB: a fraction of a second on a network file system.
_BLOCK = 1 << 16
_CHECKED_BLOCKS = 256


@contextlib.contextmanager
def write_errors(root: Path) -> Iterator[None]:
    """Turns a failure to write into the data cache `root` into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the data cache {root} cannot be written: {files.reason_of(error)}; set SHARDWISE_CACHE to a folder with "
            f"room{see('data#cache-not-writable')}"
        ) from error


@contextlib.contextmanager
def lock_entry(root: Path, key: str) -> Iterator[bool]:
    """Waits for the lock on an entry of the data cache; False without locks on disk: then several may build at once."""
    with write_errors(root):
        path = root / "locks" / f"{key}.lock"
        files.make_folder(path.parent)
        file = files.open_lock(path)
    with file:
        exclusive = False
        with contextlib.suppress(files.NoLocksError):
            exclusive = files.lock(file, wait=True)
        yield exclusive


@dataclass
class ArrayWriter:
    """Appends integers to a file of the data cache and counts them."""

    file: BinaryIO
    dtype: np.dtype[Any]
    length: int = 0
    _digest: Any = field(default_factory=hashlib.sha256)

    def write(self, values: Sequence[int] | Integers) -> None:
        content = np.asarray(values, dtype=self.dtype).tobytes()
        self.file.write(content)
        self._digest.update(content)
        self.length += len(values)

    def facts(self) -> dict[str, Any]:
        """The manifest's record of the file, once closed."""
        return {
            "length": self.length,
            "sha256": self._digest.hexdigest(),
            "checked": spread_digest(Path(self.file.name)),
        }


@dataclass
class TokenWriter(ArrayWriter):
    """Appends tokens to a file of the data cache and counts documents too."""

    documents: int = 0

    def facts(self) -> dict[str, Any]:
        facts = super().facts()
        return {"tokens": facts.pop("length"), "documents": self.documents, **facts}


@dataclass(frozen=True)
class CacheEntry:
    """An entry of the data cache: a folder of tokens, bounds or a tokenizer, with its manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer"

    def tokens(self, part: Part) -> TokenArray:
        """The part's tokens, mapped from the file."""
        dtype = np.dtype(self.manifest["dtype"])
        if self.manifest[part]["tokens"] == 0:
            return np.empty(0, dtype=dtype)
        return np.memmap(self.path / f"{part}.bin", dtype=dtype, mode="r")

    def bounds(self, part: Part, name: str) -> IntArray:
        """Bounds that the part has by this name, mapped from the file."""
        if self.manifest[part]["bounds"][name]["length"] == 0:
            return np.empty(0, dtype=BOUNDS_DTYPE)
        return np.memmap(self.path / f"{part}.{name}.bin", dtype=BOUNDS_DTYPE, mode="r")

    def sentences(self, part: Part) -> Sentences:
        """The part's sentences; the entry must have been built for sentence pairs."""
        return Sentences(*(self.bounds(part, name) for name in BOUNDS))


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype of cached tokens: uint16 if every id of the vocabulary fits it, else int32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<i4")


def open_entry(root: Path, kind: str, key: str, is_sound: Callable[[CacheEntry], bool]) -> CacheEntry | None:
    """The entry of the data cache; None if it is absent or unsound. DataError: another user may have put it there."""
    path = root / kind / key
    with write_errors(root):
        files.require_trusted(path)
    try:
        entry = CacheEntry(path, json_value((path / "manifest.json").read_text(encoding="utf-8")))
        if entry.manifest["format"] == FORMAT and is_sound(entry):
            return entry
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # a damaged manifest may hold anything
    return None


def open_tokens(root: Path, key: str) -> CacheEntry | None:
    """The cached tokens of a data set, or None if they are absent, truncated or altered."""
    return open_entry(root, "tokens", key, _are_sound_tokens)


def _are_sound_tokens(entry: CacheEntry) -> bool:
    rows = entry.manifest
    has_tokens = all(spread_digest(entry.path / f"{part}.bin") == rows[part]["checked"] for part in PARTS)
    return has_tokens and has_sound_bounds(entry) and (rows["tokenizer"] is None or has_sound_tokenizer(entry))


def has_sound_bounds(entry: CacheEntry) -> bool:
    return all(
        spread_digest(entry.path / f"{part}.{name}.bin") == row["checked"]
        for part in PARTS
        for name, row in entry.manifest.get(part, {}).get("bounds", {}).items()
    )


def has_sound_tokenizer(entry: CacheEntry) -> bool:
    """True if the tokenizer in an entry of the data cache is the one that was written."""
    return bool(entry.manifest["tokenizer"] == tokenizer_digest(entry.tokenizer_path))


def open_or_build(
    root: Path, kind: str, key: str, is_sound: Callable[[CacheEntry], bool], build: Callable[[Path], Mapping[str, Any]]
) -> CacheEntry:
    """The entry of the data cache; if there is none, `build` fills a folder, and returns the facts of its manifest.

    Any number of processes may call it at once: one builds, and the others wait. DataError: the cache cannot be
    written, or returns other bytes than were written.
    """
    if (entry := open_entry(root, kind, key, is_sound)) is not None:
        return entry
    with lock_entry(root, key) as exclusive:
        # Another process may have built it during the wait.
        if (entry := open_entry(root, kind, key, is_sound)) is not None:
            return entry
        with write_errors(root):
            _build(root / kind / key, build, exclusive)
        if (entry := open_entry(root, kind, key, is_sound)) is not None:
            return entry
    raise DataError(
        f"the data cache {root} returns other bytes than were written: set SHARDWISE_CACHE elsewhere"
        f"{see('data#cache-returns-other-bytes')}"
    )


def _build(target: Path, build: Callable[[Path], Mapping[str, Any]], exclusive: bool) -> None:
    """Fills a folder beside the entry, which becomes the entry, in place of a damaged one, or vanishes."""
    files.make_folder(target.parent)
    if exclusive:  # nobody else fills a folder for this entry: what is there was left by a process that was killed
        for leftover in target.parent.glob(f".building-{target.name}-*"):
            shutil.rmtree(leftover, ignore_errors=True)
    folder = target.with_name(f".building-{target.name}-{secrets.token_hex(8)}")
    folder.mkdir()
    try:
        manifest = json.dumps({"format": FORMAT, **build(folder)}, indent=2) + "\n"
        (folder / "manifest.json").write_text(manifest, encoding="utf-8")
        if target.exists():  # not removed where it is: files that a run has mapped may stay in a folder of NFS
            damaged = folder.with_name(f"{folder.name}-damaged")
            target.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_or_build_tokens(
    root: Path, key: str, build: Callable[[Path], Mapping[str, Any]], name: str, announce: Callable[[str], None] | None
) -> CacheEntry:
    """The cached tokens of the data `name`, built if there are none; `announce` is called before they are built."""

    def announced(folder: Path) -> Mapping[str, Any]:
        if announce is not None:
            announce(f"preparing the data {name}, then cached in {root}")
        return build(folder)

    if announce is not None and open_tokens(root, key) is None:
        with progress("waiting for another process"), lock_entry(root, key):
            pass  # it is done, or has ended
    return open_or_build(root, "tokens", key, _are_sound_tokens, announced)


def cache_key(described: dict[str, Any]) -> str:
    """The key of the entry of the data cache whose content these facts decide."""
    return json_digest({"format": FORMAT, **described})[:32]


def data_fingerprint(digests: Sequence[str]) -> str:
    """The fingerprint of prepared data, made of the digests of its parts."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """A digest of all files of a tokenizer's folder."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        digest.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def known_text_digest(root: Path, stamp: str | None) -> str | None:
    """The digest of a text that the data cache knows by the stamp of its files; None if it knows none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with os.fdopen(files.open_own(root / "sources" / f"{stamp}.json", os.O_RDONLY), "rb") as file:
            content = json_value(file.read())["content"]
        if isinstance(content, str):
            return content
    return None


def remember_text_digest(root: Path, stamp: str | None, content: str) -> None:
    """Keeps the digest of a text in the data cache for its next use, if that can be written: it only saves time."""
    if stamp is not None:
        with contextlib.suppress(OSError):
            path = root / "sources" / f"{stamp}.json"
            files.make_folder(path.parent)
            files.write_atomic(path, json.dumps({"content": content}) + "\n")


def token_entry_key(root: Path, key: str) -> str:
    """The key of the cached tokens that `key` names: that of `remember_same_tokens`, else `key` itself."""
    return known_text_digest(root, f"tokens-{key}") or key


def remember_same_tokens(root: Path, key: str, other_key: str) -> None:
    """Lets `other_key` name the cached tokens of `key` too, unless it has some, or the cache cannot be written."""
    if token_entry_key(root, other_key) == other_key != key:
        remember_text_digest(root, f"tokens-{other_key}", key)


def spread_digest(path: Path, blocks: int = _CHECKED_BLOCKS) -> str:
    """A digest, for the cache, of a whole data file of up to `blocks` × 64 KiB, else of as many blocks spread over it.

    The first and the last block are among them, so `blocks` is at least 2. A start must not read 100 GB, and this finds
    truncation and most lost pages.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _BLOCK * blocks:
            digest.update(file.read())
        else:
            for number in range(blocks):
                file.seek((size - _BLOCK) * number // (blocks - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
