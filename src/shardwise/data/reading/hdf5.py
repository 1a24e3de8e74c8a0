"""One shard of BERT's samples: a file whose arrays are there, fit one another and lie in it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.data.reading.unpacking import lies_in_chunks
from shardwise.errors import DataError, listing

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
ANEW = "write the shard anew"


@dataclass(frozen=True)
class Shard:
    """A file whose arrays are there and fit one another; nothing of them has been read.

    Attributes:
        rows: N. length: S. predictions: P. nbytes: of the arrays. chunked: whether they lie in chunks.
        unpacked: where they lie row after row in the cache.
    """

    path: Path
    rows: int
    length: int
    predictions: int
    nbytes: int
    chunked: bool
    unpacked: Path | None = None

    @classmethod
    def open(cls, path: Path, sequence_length: int | None = None) -> Shard:
        """Looks at the shapes; S must be `sequence_length`, or may be any where that is None.

        Raises:
            DataError: it is no HDF5 file, or an array is missing, empty, ragged, of another shape or length.
        """
        sizes: dict[str, tuple[str, int]] = {}
        with opened(path) as file, _reading(path):
            for key, dimensions in KEYS.items():
                for dimension, length in zip(dimensions, _shape(path, file, key), strict=True):
                    first, expected = sizes.setdefault(dimension, (key, length))
                    if length != expected:
                        words = _WORDS[dimension]
                        raise DataError(
                            f"{path}: {key} ({length} {words}) must have as many {words} as {first} ({expected}): "
                            f"{ANEW}"
                        )
            nbytes, chunked = sum(file[key].nbytes for key in KEYS), lies_in_chunks(file, KEYS)
        for dimension, (key, length) in sizes.items():
            if length == 0:
                raise DataError(
                    f"{path}: {key} (0 {_WORDS[dimension]}) must have 1 or more: remove the file, or {ANEW}"
                )
        rows, length, predictions = (sizes[dimension][1] for dimension in "NSP")
        if sequence_length not in (None, length):
            raise DataError(
                f"{path}: the sequences ({length} tokens) must have those of train.sequence_length "
                f"({sequence_length}): set train.sequence_length={length}, or name other shards"
            )
        return cls(path, rows, length, predictions, nbytes, chunked)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """By key, mapped into memory from the file or from the cache."""
        if self.unpacked is not None:
            return {key: np.load(self.unpacked / f"{key}.npy", mmap_mode="r") for key in KEYS}
        with opened(self.path) as file, _reading(self.path):
            return {key: _mapped(self.path, file[key]) for key in KEYS}


def library() -> Any:
    """h5py, which is imported where shards are read and nowhere else."""
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        raise DataError(f"HDF5 shards need h5py ({error}): pip install 'shardwise[hdf5]'") from None


def opened(path: Path) -> Any:
    h5py = library()
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise unreadable(path, error) from None
    if not h5py.is_hdf5(path):
        raise DataError(f"{path} must be an HDF5 file, and it is none: leave it out, or copy it again")
    try:
        return h5py.File(path, "r", locking="best-effort")
    except OSError as error:
        raise DataError(f"{path} cannot be opened ({error}): it is damaged, copy it again") from None


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what the library says of an opened file whose inside is damaged, in any of its types, into a sentence."""
    try:
        yield
    except DataError:
        raise
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path} cannot be read ({reason}): it is damaged, copy it again") from None


def _mapped(path: Path, array: Any) -> npt.NDArray[Any]:
    """An array of an opened file; read as a whole where it is so small that it does not lie by itself."""
    offset = array.id.get_offset()
    if offset is None:
        return np.asarray(array[...])
    return np.memmap(path, dtype=array.dtype, mode="r", offset=offset, shape=array.shape)


def _shape(path: Path, file: Any, key: str) -> tuple[int, ...]:
    """The shape of one array of integers."""
    array, dimensions = file.get(key), KEYS[key]
    if array is None or not hasattr(array, "dtype"):
        held = listing(sorted(file)) or "none"
        raise DataError(
            f"{path} must have the array {key}, and its keys are {held}: a shard has {listing(KEYS)}; {ANEW}"
        )
    if array.file.filename != file.filename or array.external or (array.is_virtual and _elsewhere(array)):
        raise DataError(f"{path}: {key} must lie in the file itself, and it leads to another one: {ANEW}")
    if array.dtype.kind == "O":
        raise DataError(f"{path}: the rows of {key} must have one length, and they are ragged: pad them, and {ANEW}")
    if array.dtype.kind not in "iub":
        raise DataError(f"{path}: {key} ({array.dtype}) must hold integers: {ANEW}")
    shape = tuple(array.shape or ())
    if len(shape) != len(dimensions):
        names = ", ".join(_WORDS[dimension] for dimension in dimensions)
        raise DataError(f"{path}: {key} (of shape {list(shape)}) must have the shape [{names}]: {ANEW}")
    return shape


def _elsewhere(array: Any) -> bool:
    """Whether a virtual array is of another file."""
    return any(source.file_name != "." for source in array.virtual_sources())


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}")
