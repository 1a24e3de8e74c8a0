"""HDF5 arrays that are stored in chunks, copied row after row into the cache.

Rows are read in random order. In an array that is stored in chunks, as all compressed ones are, reading one row means
decompressing every chunk that it crosses, which hold thousands of rows. In the copy, a row lies where its number says.

    ROOT/shards/KEY/            NAME.npy of each array, manifest.json
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data import cache
from shardwise.data.reading.hdf5 import KEYS, Shard, opened
from shardwise.data.reading.text import readable
from shardwise.errors import DataError
from shardwise.files import free_bytes
from shardwise.units import counted, size

_KIND = "shards"
_BLOCK_BYTES = 1 << 24
# Of each array: a folder may hold thousands of shards.
_CHECKED_BLOCKS = 2


def unpack(root: Path, shards: Sequence[Shard], announce: Callable[[str], None] | None) -> list[Shard]:
    """The shards; those that are stored in chunks read their arrays from the cache `root`.

    Any number of processes may call it at once: each file is unpacked by one of them.

    Raises:
        DataError: a file cannot be read, or the cache cannot be written or has no room.
    """
    shards = [replace(shard, unpacked=_entry_path(root, shard)) if shard.chunked else shard for shard in shards]
    missing = [shard for shard in shards if shard.unpacked is not None and not _is_sound(shard.unpacked)]
    if missing:
        with cache.writing(root):
            root.mkdir(parents=True, exist_ok=True)
            needed, free = sum(shard.nbytes for shard in missing), free_bytes(root)
        number = counted(len(missing), "shard")
        if needed > free:
            raise DataError(
                f"the data cache {root} ({size(free)} free) must have room for {number} that {size(needed)} take "
                "unpacked: set SHARDWISE_CACHE to a folder with room, or write the shards without compression"
            )
        if announce is not None:
            announce(f"unpacking {number}, {size(needed)}: once, then cached in {root}")
    for shard in missing:
        _unpack(root, shard)
    return shards


def _entry_path(root: Path, shard: Shard) -> Path:
    """The shard's entry in the cache; another file at the same path has another entry."""
    with readable(shard.path):
        status = shard.path.stat()
        facts = [str(shard.path.absolute()), status.st_size, status.st_mtime_ns, cache.FORMAT]
        digest = hashlib.sha256(f"{facts} {cache.spread_digest(shard.path, _CHECKED_BLOCKS)}".encode())
    return cache.entry_path(root, digest.hexdigest()[:32], _KIND)


def _unpack(root: Path, shard: Shard) -> None:
    """Fills the entry of one shard, unless another process does."""
    entry = shard.unpacked
    assert entry is not None

    def build(folder: Path) -> None:
        with opened(shard.path) as file:
            arrays = {name: _copy(shard.path, file[name], folder / f"{name}.npy") for name in KEYS}
        cache.write_manifest(folder, {"source": str(shard.path), "arrays": arrays})

    cache.open_or_build(root, entry.name, lambda: _is_sound(entry) or None, build, kind=_KIND)


def _copy(path: Path, array: Any, target: Path) -> str:
    """Copies one array in blocks of rows; returns the digest that it is checked by."""
    rows = max(1, _BLOCK_BYTES // max(1, array.dtype.itemsize * int(np.prod(array.shape[1:]))))
    header = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
    # Not mapped: on a full disk, writing to mapped memory ends the process without a message.
    with target.open("wb") as copy:
        np.lib.format.write_array_header_1_0(copy, header)
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


def _is_sound(folder: Path) -> bool:
    def check(manifest: dict[str, Any]) -> bool:
        digests = {name: cache.spread_digest(folder / f"{name}.npy", _CHECKED_BLOCKS) for name in KEYS}
        return bool(manifest["arrays"] == digests)

    return cache.sound_manifest(folder, check) is not None
