"""Token ids in a flat file, alone or behind a header that is known: a shard of llm.c, or an array that numpy saved.

A shard of llm.c, which modded-nanogpt has too: 256 int32, of which the first three are a magic, a version and the
number of ids; then the ids (`_SHARDS`). The token that separates documents comes before each of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import DataError, listing
from shardwise.data.reading.content import FOREIGN, HEAD

DTYPES = ("uint16", "uint32", "int64")
SUFFIXES = (".bin", ".npy", ".ds")
"""Names of files of ids: of nanoGPT and llm.c, of numpy and OLMo (which has no header), of datatrove."""
_SHARDS = {20240520: ("uint16", 50256), 20240801: ("uint32", 128000)}
"""The magic of a shard of llm.c → the dtype of its ids, and the separator of the tokenizer of GPT-2 or Llama 3."""
_SHARD_HEADER = 1024
_NUMPY = b"\x93NUMPY"
# Bytes from which a dtype is derived.
_LOOKED_AT = 1 << 22
# No vocabulary has 16 · 2^16 tokens.
_HIGH_HALVES = 16
# A dtype is believed if so many ids have a low half of 16 or more: among narrower ids about half were high ones.
_EVIDENCE = 32


@dataclass(frozen=True)
class RawTokens:
    """An opened file, mapped into memory.

    Attributes:
        end: the token that separates documents, where the format has one.
        reading: how the file is read, for the user; None if the user chose it.
    """

    path: Path
    tokens: npt.NDArray[np.integer[Any]]
    end: int | None = None
    reading: str | None = None

    @classmethod
    def open(cls, path: Path, dtype: str | None) -> RawTokens:
        """The ids of a file.

        Args:
            dtype: dtype of the ids (--token-dtype); None: the header or the bytes decide.

        Raises:
            DataError: the file holds something else, or its bytes are ids of several dtypes.
        """
        with path.open("rb") as file:
            head = file.read(HEAD)
        magic = int.from_bytes(head[:4], "little")
        if magic in _SHARDS:
            found, end = _SHARDS[magic]
            tokens = _flat(path, found, _SHARD_HEADER)
            if len(tokens) != (number := int.from_bytes(head[8:12], "little")):
                raise DataError(
                    f"{path} ({len(tokens)} ids of {found}) must have {number}, as the header of llm.c says: copy it "
                    "again"
                )
            raw = cls(path, tokens, end, f"a shard of llm.c, of {found}")
        elif head.startswith(_NUMPY):
            tokens = _array(path)
            raw = cls(path, tokens, None, f"an array of numpy, of {tokens.dtype.name}")
        elif dtype is not None:
            return cls(path, _flat(path, dtype))
        else:
            found = _looks_like(path, head)
            return cls(path, _flat(path, found), None, f"{found}, as its bytes look; --token-dtype says otherwise")
        if dtype not in (None, raw.tokens.dtype.name):
            raise DataError(f"--token-dtype ({dtype}) must be {raw.tokens.dtype.name}, which {path} is by its header")
        return raw


def is_raw_tokens(path: Path) -> bool:
    """True if `path` is named as raw token ids are: a .bin has no .idx of a Megatron data set then."""
    return path.suffix in SUFFIXES and path.is_file() and not path.with_suffix(".idx").exists()


def way_to_read(path: Path) -> str:
    """The end of a message about a file of tokens that a run was given: what makes data of it that runs read."""
    return f"`shardwise data prepare {path} PREFIX` makes PREFIX.bin and PREFIX.idx of raw tokens"


def _looks_like(path: Path, head: bytes) -> str:
    """The dtype that the ids seem to have: the high half of an id of 64 bits is 0, and of 32 bits below 16."""
    if (kind := next((kind for magic, kind in FOREIGN if re.match(magic, head, re.DOTALL)), None)) is not None:
        raise DataError(f"{path} is {kind}, not raw tokens: leave it out, or say by --token-dtype that it holds ids")
    size = path.stat().st_size
    with path.open("rb") as file:
        words = np.frombuffer(file.read(min(_LOOKED_AT, size // 4 * 4)), "<u2")
    unclear = []
    for dtype, width, limit in (("int64", 4, 1), ("uint32", 2, _HIGH_HALVES)):
        if size % (2 * width) or not size:
            continue
        low, high = np.split(words[: len(words) // width * width].reshape(-1, width), 2, axis=1)
        if high.size and int(high.max()) < limit:
            if np.count_nonzero(low.max(axis=1) >= _HIGH_HALVES) >= _EVIDENCE:
                return dtype
            unclear.append(dtype)
    if not unclear:
        return DTYPES[0]
    dtypes = listing([DTYPES[0], *reversed(unclear)], "or")
    raise DataError(f"the bytes of {path} may be ids of {dtypes}: say which by --token-dtype")


def _flat(path: Path, dtype: str, offset: int = 0) -> npt.NDArray[np.integer[Any]]:
    read = np.dtype(dtype).newbyteorder("<")
    size = path.stat().st_size
    if size <= offset or (size - offset) % read.itemsize:
        raise DataError(
            f"the size of {path} ({size} bytes) must be above {offset} and a multiple of {read.itemsize}, for ids of "
            f"{dtype}: the file is cut off, or holds something else"
        )
    tokens: npt.NDArray[np.integer[Any]] = np.asarray(np.memmap(path, dtype=read, mode="r", offset=offset))
    return tokens


def _array(path: Path) -> npt.NDArray[np.integer[Any]]:
    """The array in a file of numpy.save."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is an array of numpy that cannot be read ({error}): save it again") from None
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.size:
        raise DataError(
            f"{path} must be a row of integers, and it is an array of numpy of {array.dtype} and shape {array.shape}: "
            "save its ids alone, in one row"
        )
    return np.asarray(array)
