"""HDF5 shards of BERT's samples: sentence pairs whose tokens were masked when the shards were made.

    input_ids, input_mask, segment_ids   [N, S]  tokens; 1 for a token and 0 for padding; 0 in the first segment, else 1
    masked_lm_positions, masked_lm_ids   [N, P]  filled up with zeros: the first position 0 ends a row's list
    next_sentence_labels                 [N]     0 where the second segment follows the first, else 1

N and P may be others in each shard; the integers may have any width. A sample is a row of a shard.

Rows are read in random order. In an array that is stored in chunks, as all compressed ones are, reading one row means
decompressing every chunk that it crosses, which hold thousands of rows. `unpack_hdf5_shards` copies such arrays into
the cache, row after row: ROOT/shards/KEY/ has NAME.npy of each array, and manifest.json.

Shapes: N = rows of a shard, B = samples, S = sequence length, P = predictions of a sample, at most.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.base.errors import DataError, first_line, listing, see
from shardwise.base.files import free_bytes, make_folder, user_path
from shardwise.base.registered import optional_library
from shardwise.base.units import counted, size
from shardwise.config import DataConfig
from shardwise.data import cache
from shardwise.data.reading.content import read_errors
from shardwise.data.rows import AnyArray, Flags, IntArray

KEYS = {
    "input_ids": "NS",
    "input_mask": "NS",
    "segment_ids": "NS",
    "masked_lm_positions": "NP",
    "masked_lm_ids": "NP",
    "next_sentence_labels": "N",
}
"""The arrays of a shard and their dimensions."""
_WORDS = {"N": "rows", "S": "tokens a row", "P": "predictions a row"}
AGAIN = "write the shard again"
PATTERN = "*_training_*.hdf5"
"""The files of a folder that are shards."""
_SUFFIXES = (".hdf5", ".h5")
# Far below the usual limit of 65,530 maps of a process, of which a shard takes one for each array.
_SHARDS_KEPT = 1024
_ENTRIES = "shards"
_BLOCK_BYTES = 1 << 24
# Blocks of each array that are checked, the first and the last one: a folder may hold thousands of shards.
_CHECKED_BLOCKS = 2


@dataclass(frozen=True)
class HDF5Shard:
    """An HDF5 shard whose arrays are there and fit one another; nothing of them has been read."""

    path: Path
    rows: int  # number of samples N
    length: int  # sequence length S
    predictions: int  # most predictions of a sample P
    nbytes: int
    chunked: bool
    # Folder in the cache that holds the arrays row after row; None if the file's own are read.
    unpacked: Path | None = None

    @classmethod
    def open(cls, path: Path, sequence_length: int | None = None) -> HDF5Shard:
        """The shapes of a file; DataError: it is no HDF5 file, or an array is missing, empty or of another shape."""
        sizes: dict[str, int] = {}
        with _open_hdf5(path) as file, _reading(path):
            for key, dimensions in KEYS.items():
                for dimension, length in zip(dimensions, _shape(path, file, key), strict=True):
                    expected = sizes.setdefault(dimension, max(length, 1))
                    if length != expected:
                        words = _WORDS[dimension]
                        raise DataError(
                            f"{path}: {key} ({length} {words}) must have as many as the other arrays ({expected}), "
                            f"and at least 1: remove the file, or {AGAIN}"
                        )
            # An array of one dimension is read at once in any case, so its chunks do not matter.
            nbytes = sum(file[key].nbytes for key in KEYS)
            chunked = any(file[key].ndim > 1 and file[key].chunks is not None for key in KEYS)
        rows, length, predictions = (sizes[dimension] for dimension in "NSP")
        if sequence_length not in (None, length):
            raise DataError(
                f"{path}: the sequences ({length} tokens) must have those of train.sequence_length "
                f"({sequence_length}): set train.sequence_length={length}, or name other shards"
                f"{see('data#length-of-shards')}"
            )
        return cls(path, rows, length, predictions, nbytes, chunked)

    def arrays(self) -> dict[str, AnyArray]:
        """By key, mapped into memory from the file or from the cache."""
        if self.unpacked is not None:
            return {key: np.load(self.unpacked / f"{key}.npy", mmap_mode="r") for key in KEYS}
        with _open_hdf5(self.path) as file, _reading(self.path):
            return {key: _mapped(self.path, file[key]) for key in KEYS}


def h5py_library() -> Any:
    """The module h5py, which is imported only where shards are read."""
    return optional_library("h5py", "HDF5 shards need", "hdf5")


def _open_hdf5(path: Path) -> Any:
    """An HDF5 file, opened by h5py; DataError if it is missing or no HDF5 file."""
    h5py = h5py_library()
    with read_errors(path), path.open("rb"):  # the library's own message would lack the reason
        pass
    try:
        return h5py.File(path, "r", locking="best-effort")
    except OSError as error:
        raise DataError(f"{path} must be an HDF5 file, and it is none or damaged ({error}): copy it again") from None


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        if getattr(error, "errno", None):  # of the system, and not about the file
            raise
        raise DataError(f"{path} cannot be read ({first_line(error)}): it is damaged, copy it again") from None


def _mapped(path: Path, array: Any) -> AnyArray:
    """An array of an opened file, mapped; one so small that HDF5 stores it in the header is read."""
    offset = array.id.get_offset()
    if offset is None:
        return np.asarray(array[...])
    return np.memmap(path, dtype=array.dtype, mode="r", offset=offset, shape=array.shape)


def _shape(path: Path, file: Any, key: str) -> tuple[int, ...]:
    array = file.get(key)
    if array is None or not hasattr(array, "dtype"):
        raise DataError(f"{path} must have the array {key}, and has {listing(sorted(file)) or 'none'}: {AGAIN}")
    # A shard of somebody else could make the process read any file of this machine.
    is_elsewhere = array.is_virtual and any(source.file_name != "." for source in array.virtual_sources())
    if array.file.filename != file.filename or array.external or is_elsewhere:
        raise DataError(f"{path}: {key} must lie in the file itself, and it refers to another file: {AGAIN}")
    shape = tuple(array.shape or ())
    if array.dtype.kind not in "iub" or len(shape) != len(KEYS[key]):
        names = ", ".join(_WORDS[dimension] for dimension in KEYS[key])
        raise DataError(
            f"{path}: {key} ({array.dtype} of shape {list(shape)}) must hold integers of shape [{names}]: {AGAIN}"
        )
    return shape


def names_hdf5_shards(path: Path) -> bool:
    """True if HDF5 shards lie at `path`: a folder that holds some, a file, or a glob of files."""
    if path.is_dir():
        return any(path.glob(PATTERN))
    return path.suffix in _SUFFIXES or any(match.suffix in _SUFFIXES for match in _matches(path))


def hdf5_shard_paths(data: DataConfig) -> list[Path]:
    """The HDF5 files that `data.path` names, sorted: one file, the shards of a folder, or the matches of a glob."""
    assert data.path is not None
    path = user_path(data.path)
    with read_errors(path):
        if path.is_file():
            return [path]
        paths = sorted(path.glob(PATTERN)) if path.is_dir() else _matches(path)
    if not paths:
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise DataError(
            f"data.path ({data.path}) names no shards that exist{where}: name an HDF5 file, a folder of {PATTERN} or "
            "a glob such as 'FOLDER/*.hdf5'"
        )
    return paths


def _matches(path: Path) -> list[Path]:
    """The files that a glob matches, by name; a link to nowhere stays, and fails by its name."""
    matches = glob.glob(str(path), recursive=True)  # noqa: PTH207  that of pathlib raises ValueError on some
    return sorted(match for match in map(Path, matches) if not match.is_dir())


def unpack_hdf5_shards(
    root: Path, shards: Sequence[HDF5Shard], announce: Callable[[str], None] | None
) -> list[HDF5Shard]:
    """The HDF5 shards, with the arrays of those that are stored in chunks in the data cache `root`.

    Any number of processes may call it at once: each file is unpacked by one of them.

    Raises:
        DataError: a file cannot be read, or the cache cannot be written or has no room.
    """
    keys = {shard: _key(shard) for shard in shards if shard.chunked}
    missing = [shard for shard, key in keys.items() if cache.open_entry(root, _ENTRIES, key, _is_sound) is None]
    if missing:
        with cache.write_errors(root):
            make_folder(root)
            needed = sum(shard.nbytes for shard in missing)
            free = free_bytes(root)
        number = counted(len(missing), "shard")
        if needed > free:
            raise DataError(
                f"the data cache {root} ({size(free)} free) must have room for {number} that {size(needed)} take "
                "unpacked: set SHARDWISE_CACHE to a folder with room, or write the shards without compression"
            )
        if announce is not None:
            announce(f"unpacking {number}, {size(needed)}: once, then cached in {root}")
    for shard in missing:
        cache.open_or_build(root, _ENTRIES, keys[shard], _is_sound, partial(_build, shard))
    return [replace(shard, unpacked=root / _ENTRIES / keys[shard]) if shard.chunked else shard for shard in shards]


def _key(shard: HDF5Shard) -> str:
    with read_errors(shard.path):
        status = shard.path.stat()
        facts = [str(shard.path.absolute()), status.st_size, status.st_mtime_ns, cache.FORMAT]
        digest = hashlib.sha256(f"{facts} {cache.spread_digest(shard.path, _CHECKED_BLOCKS)}".encode())
    return digest.hexdigest()[:32]


def _build(shard: HDF5Shard, folder: Path) -> dict[str, Any]:
    with _open_hdf5(shard.path) as file, _reading(shard.path):
        arrays = {name: _copy(file[name], folder / f"{name}.npy") for name in KEYS}
    return {"source": str(shard.path), "arrays": arrays}


def _copy(array: Any, target: Path) -> str:
    rows = max(1, _BLOCK_BYTES // max(1, array.dtype.itemsize * int(np.prod(array.shape[1:]))))
    header = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
    # Not mapped: on a full disk, writing to mapped memory ends the process without a message.
    with target.open("wb") as copy:
        np.lib.format.write_array_header_1_0(copy, header)
        for start in range(0, len(array), rows):
            copy.write(np.ascontiguousarray(array[start : start + rows]).data)
    return cache.spread_digest(target, _CHECKED_BLOCKS)


def _is_sound(entry: cache.CacheEntry) -> bool:
    digests = {name: cache.spread_digest(entry.path / f"{name}.npy", _CHECKED_BLOCKS) for name in KEYS}
    return bool(entry.manifest["arrays"] == digests)


class HDF5ShardRows:
    """The rows of all HDF5 shards, one after another, for a model of `vocab_size` tokens and `types` segments.

    A shard is opened when one of its rows is read. Of a shard no more is read at once than the rows asked for.
    """

    def __init__(self, shards: Sequence[HDF5Shard], vocab_size: int, types: int) -> None:
        self.shards = shards
        self.length = shards[0].length
        self.predictions = max(shard.predictions for shard in shards)
        self._begins = np.cumsum([0, *(shard.rows for shard in shards)])
        # A map of each array stays open, for the shards that were used last.
        self._arrays = lru_cache(maxsize=_SHARDS_KEPT)(lambda number: shards[number].arrays())
        token = (vocab_size - 1, "set model.vocab_size to that of the tokenizer that made the data")
        self._limits = {
            "input_ids": token,
            "input_mask": (1, AGAIN),
            "segment_ids": (types - 1, f"set model.type_vocab_size to what the data have, or {AGAIN}"),
            "masked_lm_positions": (self.length - 1, f"it lies beyond the sequence; {AGAIN}"),
            "masked_lm_ids": token,
            "next_sentence_labels": (1, AGAIN),
        }

    def __len__(self) -> int:
        """The number of rows."""
        return int(self._begins[-1])

    def take(self, rows_B: IntArray) -> dict[str, IntArray]:
        """These rows by key, int64: [B, S], [B, P] or [B], with the largest P of all shards.

        DataError names file and row of a value beyond its range.
        """
        sizes = {"N": len(rows_B), "S": self.length, "P": self.predictions}
        result = {key: np.zeros([sizes[name] for name in dimensions], np.int64) for key, dimensions in KEYS.items()}
        shards_B = np.searchsorted(self._begins, rows_B, side="right") - 1
        for number in np.unique(shards_B).tolist():
            chosen = np.flatnonzero(shards_B == number)
            # A shard is read in ascending order, each row once.
            rows, places = np.unique(rows_B[chosen] - self._begins[number], return_inverse=True)
            arrays = {key: array[rows].astype(np.int64) for key, array in self._arrays(number).items()}
            self._check(self.shards[number].path, rows, arrays)
            for key, array in arrays.items():
                place: tuple[Any, ...] = (chosen, *map(slice, array.shape[1:]))
                result[key][place] = array[places]
        return result

    def _check(self, path: Path, rows: IntArray, arrays: dict[str, IntArray]) -> None:
        listed = listed_positions(arrays["masked_lm_positions"])
        for key, (largest, what_to_do) in self._limits.items():
            wrong = (arrays[key] < 0) | (arrays[key] > largest)
            if KEYS[key] == "NP":
                wrong &= listed
            for row, *column in np.argwhere(wrong)[:1].tolist():
                place = "".join(f"[{number}]" for number in column)
                raise DataError(
                    f"{path}: row {rows[row]}: {key}{place} ({arrays[key][row, *column]}) must be in 0 … {largest}: "
                    f"{what_to_do}"
                )
        for row in np.flatnonzero(~arrays["input_mask"].any(axis=1))[:1]:
            raise DataError(f"{path}: row {rows[row]}: input_mask must be 1 for a token or more: {AGAIN}")
        # Positions in no list become -1, -2, …, so that only positions of a list can be equal.
        places = np.where(listed, arrays["masked_lm_positions"], -1 - np.arange(listed.shape[1]))
        ordered = np.sort(places, axis=1)
        for row, column in np.argwhere(ordered[:, 1:] == ordered[:, :-1])[:1].tolist():
            raise DataError(
                f"{path}: row {rows[row]}: masked_lm_positions must name each position once, and "
                f"{ordered[row, column]} occurs twice: {AGAIN}"
            )


def listed_positions(positions_BP: IntArray) -> Flags:
    """True for the masked positions of HDF5 rows before the first 0, which ends the list, [B, P]."""
    listed: Flags = np.logical_and.accumulate(positions_BP != 0, axis=1)
    return listed
