"""HDF5 arrays that are stored in chunks, copied row after row into the cache.

Rows are read in random order. Of an array in chunks, which all compressed ones are, each row unpacks every chunk that
it lies in: thousands of rows for one. Unpacked once, a row is where its number says.

    ROOT/shards/KEY/            NAME.npy of each array, manifest.json
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data import cache
from shardwise.errors import DataError
from shardwise.files import free_bytes
from shardwise.units import size

_KIND = "shards"
_BLOCK_BYTES = 1 << 24
# Of each array: a folder may hold thousands of shards.
_CHECKED_BLOCKS = 2


@dataclass(frozen=True)
class Chunked:
    """A file whose arrays are stored in chunks.

    Attributes:
        nbytes: the size of the unpacked arrays.
    """

    path: Path
    nbytes: int

    @property
    def key(self) -> str:
        """The key of its entry in the cache: another file at the same path has another key."""
        status = self.path.stat()
        facts = [str(self.path.absolute()), status.st_size, status.st_mtime_ns, cache.FORMAT]
        return hashlib.sha256(f"{facts} {cache.spread_digest(self.path, _CHECKED_BLOCKS)}".encode()).hexdigest()[:32]


def lies_in_chunks(file: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    """Whether an opened HDF5 file stores an array of two dimensions or more in chunks."""
    return any(len(dimensions) > 1 and file[name].chunks is not None for name, dimensions in names.items())


def unpack(
    root: Path,
    files: list[Chunked],
    names: list[str],
    opened: Callable[[Path], Any],
    announce: Callable[[str], None] | None,
) -> dict[Path, Path]:
    """The folder in the cache `root` of each of these files, which `opened` opens, with the arrays of these `names`.

    Any number of processes may call it at once: each file is unpacked by one of them.

    Raises:
        DataError: a file cannot be read, or the cache cannot be written or has no room.
    """
    folders = {file.path: cache.entry_path(root, file.key, _KIND) for file in files}
    missing = [file for file in files if not _is_sound(folders[file.path], names)]
    if missing:
        with cache.writing(root):
            root.mkdir(parents=True, exist_ok=True)
            needed, free = sum(file.nbytes for file in missing), free_bytes(root)
        shards = f"{len(missing):,} shard{'' if len(missing) == 1 else 's'}"
        if needed > free:
            raise DataError(
                f"the data cache {root} ({size(free)} free) must have room for {shards} that {size(needed)} take "
                "unpacked: set SHARDWISE_CACHE to a folder with room, or write the shards without compression"
            )
        if announce is not None:
            announce(f"unpacking {shards}, {size(needed)}: once, then cached in {root}")
    for file in missing:
        _unpack(root, folders[file.path], file.path, names, opened)
    return folders


def _unpack(root: Path, entry: Path, path: Path, names: list[str], opened: Callable[[Path], Any]) -> None:
    """Fills the entry of one file, unless another process has."""

    def build(folder: Path) -> None:
        with opened(path) as source:
            arrays = {name: _copy(path, source[name], folder / f"{name}.npy") for name in names}
        cache.write_manifest(folder, {"source": str(path), "arrays": arrays})

    cache.open_or_build(root, entry.name, lambda: _is_sound(entry, names) or None, build, kind=_KIND)


def _copy(path: Path, array: Any, target: Path) -> str:
    """Copies one array in blocks of rows; returns the digest that it is checked by."""
    rows = max(1, _BLOCK_BYTES // max(1, array.dtype.itemsize * int(np.prod(array.shape[1:]))))
    described = {
        "descr": np.lib.format.dtype_to_descr(array.dtype),
        "fortran_order": False,
        "shape": array.shape,
    }
    # Not mapped: on a full disk, writing to mapped memory ends the process without a message.
    with target.open("wb") as copy:
        np.lib.format.write_array_header_1_0(copy, described)
        for start in range(0, len(array), rows):
            try:
                block = array[start : start + rows]
            except (OSError, RuntimeError) as error:
                raise DataError(
                    f"{path}: rows {start} to {min(start + rows, len(array)) - 1} cannot be read ({error}): the file "
                    "is damaged, copy it again"
                ) from None
            copy.write(np.ascontiguousarray(block).data)
    return cache.spread_digest(target, _CHECKED_BLOCKS)


def _is_sound(folder: Path, names: list[str]) -> bool:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        arrays = manifest["arrays"].items()
        return (manifest["format"], set(names)) == (cache.FORMAT, set(manifest["arrays"])) and all(
            cache.spread_digest(folder / f"{name}.npy", _CHECKED_BLOCKS) == checked for name, checked in arrays
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
