"""The safetensors format: 8 bytes with the header's length, a JSON header, then the tensors, contiguous and in order.

https://github.com/huggingface/safetensors#format. The header is written first, so that the tensors can be
streamed into the file; of a file that exists only the header is read here.

`cast_values` gives values in another floating-point format, as numpy has their bits.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import DamageError, StoreError, see
from shardwise.base.files import SAFETENSORS_METADATA, is_printable_name
from shardwise.base.units import size as size_text
from shardwise.checkpoint.storage.root import Root

MAX_HEADER_BYTES = 100_000_000
"""The longest header that the safetensors library accepts."""
_LENGTH = struct.Struct("<Q")
MAX_DIMS = 64
"""Dimensions of a tensor at most: numpy has no more."""
_COUNT_LIMIT = 2**63  # counts are kept in signed 64-bit integers
_LFS_POINTER = b"version https://git-lfs"
FLOATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Names of torch → of safetensors."""
FLOATING = {**{name: dtype for dtype, name in FLOATS.items()}, "F64": "float64"}
"""Names of safetensors → of torch."""
_NAN = np.uint16(0x7FC0)  # the NaN of bfloat16 that torch's cast makes
CODED = ("C64", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0")
"""Formats whose bits are read, and whose values are not computed here."""
DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "|b1", "U8": "|u1", "I8": "|i1", **dict.fromkeys(CODED, "|u1"),
        "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2",
        "U32": "<u4", "I32": "<i4", "F32": "<f4",
        "U64": "<u8", "I64": "<i8", "F64": "<f8", "C64": "<u8",
    }.items()
}  # fmt: skip
"""Name of a format → numpy's dtype whose bits are these; formats that numpy lacks are unsigned integers there.

safetensors has further ones of less than a byte.
"""
_DTYPE = re.compile("[A-Z0-9_]{1,16}")  # the names of safetensors' formats, also of later releases


Values: TypeAlias = npt.NDArray[Any]
"""Values of a tensor, as `DTYPES` has their bits."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: bytes `start` to `stop`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    first: tuple[int, ...] | None = None  # where it begins in a tensor of which the file has a part; None: it is whole


def safetensors_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[int], int]:
    """The header of a safetensors file that holds these tensors, one after the other.

    Args:
        tensors: (name, dtype as in `DTYPES`, shape).
        metadata: texts for other programs.

    Returns:
        the file's first bytes (a multiple of 8), each tensor's offset in the file, and the file's length.
    """
    fields: dict[str, object] = {}
    if metadata:
        fields[SAFETENSORS_METADATA] = dict(metadata)
    offsets: list[int] = []
    end = 0
    for name, dtype, shape in tensors:
        assert name not in fields, f"two tensors of the name {name}"
        offsets.append(end)
        end += math.prod(shape) * DTYPES[dtype].itemsize
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offsets[-1], end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    # The tensors begin at a multiple of 8 bytes, so that a reader can map values of any dtype.
    text += b" " * (-len(text) % 8)
    first = _LENGTH.size + len(text)
    return _LENGTH.pack(len(text)) + text, [first + offset for offset in offsets], first + end


def read_header(file: Root) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises:
        DamageError: the header cannot be parsed, or does not fit the file, which the tensors must fill exactly.
        StoreError: the file cannot be read, or is a Git LFS pointer.
    """
    total = file.size()
    length_field = file.read(0, _LENGTH.size)
    if len(length_field) < _LENGTH.size:
        raise DamageError(f"{file} is damaged: a safetensors file ({total} bytes) must have at least 8 bytes")
    # The first bytes of a text, read as a length, are far beyond any file.
    (length,) = _LENGTH.unpack(length_field)
    limit = min(total - _LENGTH.size, MAX_HEADER_BYTES)
    if length > limit and file.read(0, len(_LFS_POINTER)) == _LFS_POINTER:
        raise StoreError(
            f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its repository"
            f"{see('checkpoints#git-lfs-pointer')}"
        )
    if length > limit:
        raise DamageError(f"{file} is damaged: the length of its header ({length:,} bytes) must be at most {limit:,}")
    first = _LENGTH.size + length
    try:
        fields = json.loads(file.read(_LENGTH.size, first), object_pairs_hook=_without_duplicates)
        if not isinstance(fields, dict):
            raise ValueError("it is no JSON object")
        parts = _parts(fields.pop(SAFETENSORS_METADATA, None))
        tensors = {name: _tensor(name, entry, first) for name, entry in fields.items()}
        # An empty tensor begins where the next one does, and comes before it.
        tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)))
        _require_contiguous(tensors, first, total)
        for name, saved in parts.items():
            tensors[name] = replace(tensors[name], first=_first(name, saved, tensors[name].shape))
    except (ValueError, KeyError, RecursionError) as error:
        raise DamageError(f"{file} is damaged: its header cannot be used: {error}") from None
    return tensors


def _parts(metadata: object) -> dict[str, object]:
    """Name → where the tensor begins in a larger one, as torch's Hugging Face writer has it."""
    text = metadata.get("DCP_SHARDING_INFO") if isinstance(metadata, dict) else None
    parts = json.loads(text) if isinstance(text, str) else {}
    if not isinstance(parts, dict):
        raise ValueError("its DCP_SHARDING_INFO is no JSON object")
    return parts


def _first(name: str, saved: object, shape: tuple[int, ...]) -> tuple[int, ...]:
    offsets = saved.get("saved_offsets") if isinstance(saved, dict) else None
    if not is_counts(offsets) or len(offsets) != len(shape):
        raise ValueError(f"the saved_offsets of {name} must be {len(shape)} whole numbers")
    return tuple(offsets)


def _require_contiguous(tensors: Mapping[str, StoredTensor], first: int, total: int) -> None:
    """Raise ValueError where tensors, in the order of their bytes, leave a gap from `first` to `total`, or overlap."""
    # The safetensors library refuses gaps too: the bytes of a gap could hold anything, and no reader would see them.
    end = first
    for name, tensor in tensors.items():
        if tensor.start != end:
            raise ValueError(f"{name} begins at byte {tensor.start:,} and must begin at byte {end:,}")
        end = tensor.stop
    if end != total:
        raise ValueError(f"its tensors end at byte {end:,}, the file ({size_text(total)}) at byte {total:,}")


def _tensor(name: str, entry: object, first: int) -> StoredTensor:
    fields, dtype, shape = tensor_fields(name, entry)
    offsets = fields.get("data_offsets")
    if not is_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"the offsets of {name} must be 2 whole numbers")
    needed = math.prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES else max(0, offsets[1] - offsets[0])
    if offsets[1] - offsets[0] != needed:
        raise ValueError(f"{name} has {offsets[1] - offsets[0]:,} bytes, and its shape needs {needed:,}")
    return StoredTensor(dtype, shape, first + offsets[0], first + offsets[1])


def tensor_fields(name: str, entry: object) -> tuple[dict[str, object], str, tuple[int, ...]]:
    """The fields, dtype and shape of a tensor in a safetensors header; ValueError where it describes no tensor."""
    if not is_printable_name(name):
        raise ValueError(f"the name of a tensor ({name!r}) must be printable")
    if not isinstance(entry, dict):
        raise ValueError(f"{name} must be a JSON object")
    shape = entry.get("shape")
    dtype = entry.get("dtype")
    if not is_counts(shape) or len(shape) > MAX_DIMS:
        raise ValueError(f"the shape of {name} must be at most {MAX_DIMS} whole numbers")
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ValueError(f"the dtype of {name} ({dtype!r}) must be a name such as F32, of capital letters and digits")
    return entry, dtype, tuple(shape)


def is_counts(value: object) -> TypeGuard[list[int]]:
    """True if `value` of a safetensors header is a list of whole numbers that a tensor or a file can have."""
    return isinstance(value, list) and all(type(number) is int and 0 <= number < _COUNT_LIMIT for number in value)


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # Of two tensors of one name, one parser takes the first and another the last.
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name is there twice")
    return fields


def cast_values(values: Values, source: str, target: str) -> Values:
    """Values of a tensor's dtype `source` in the dtype `target`; each is a name of safetensors in `FLOATING`.

    Rounded to the nearest, ties to even; by way of float32, as torch casts.
    """
    if source == target:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        return _narrow(_widen(values, source), target)


def cast_overflows(values: Values, source: str, target: str) -> bool:
    """True if a finite weight becomes infinite by a cast: float16 ends at 65,504."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = _widen(values, source)
        return bool((np.isfinite(wide) & ~np.isfinite(_widen(_narrow(wide, target), target))).any())


def _widen(values: Values, source: str) -> npt.NDArray[np.float32]:
    # A bfloat16 is the upper half of a float32.
    if source == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def _narrow(wide: npt.NDArray[np.float32], target: str) -> Values:
    if target == "F16":
        return wide.astype(np.float16)
    if target == "BF16":
        bits = np.ascontiguousarray(wide).view(np.uint32)
        # The lower half decides: below 0x8000 the sum does not carry, above it does, and at 0x8000 (a tie) it carries
        # where the last bit that stays is 1, which makes that bit 0. A NaN could carry into infinity: it is set apart.
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(wide), _NAN, rounded)
    return wide
