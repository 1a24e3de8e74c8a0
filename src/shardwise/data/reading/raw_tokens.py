"""Token ids in a flat file, alone or behind a header that is known: a shard of llm.c, or an array that numpy saved.

A shard of llm.c, which modded-nanogpt has too: 256 int32, of which the first three are a magic, a version and the
number of ids; then the ids (`_SHARDS`). The token that separates documents comes before each of them.

A file of datatrove, NAME.ds: ids alone, of 2 or 4 bytes. NAME.ds.index has the end of each document, counted in ids,
as uint64; NAME.ds.metadata has the lines TOKENIZER|BYTES, the number of ids, and that number for people.

OLMo-core's and dolma's .npy are ids alone, of the narrowest unsigned dtype that holds the tokenizer's vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.base.errors import DataError, listing
from shardwise.data.reading.content import FOREIGN, HEAD, read_errors
from shardwise.data.rows import IntArray, Integers

DTYPES = ("uint16", "uint32", "int64")
SUFFIXES = (".bin", ".npy", ".ds")
"""Names of files of ids: of nanoGPT and llm.c, of numpy and OLMo (which has no header), of datatrove."""
_SHARDS = {20240520: (1, "uint16", 50256), 20240801: (7, "uint32", 128000)}
"""The magic of a shard of llm.c → its version, the dtype of its ids, and the separator of GPT-2 or Llama 3."""
_QUESTIONS = 20240522  # of llm.c's evaluations, such as hellaswag_val.bin
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
    """A file of raw token ids, mapped into memory."""

    path: Path
    tokens: Integers
    end: int | None = None  # the token that separates documents, where the format has one
    reading: str | None = None  # how the file is read, for the user; None if the user chose it
    ends: IntArray | None = None  # the end of each document, counted in ids; None if no file beside it tells them

    @classmethod
    def open(
        cls, path: Path, dtype: str | None, vocab_size: int | None = None, option: str = "--token-dtype"
    ) -> RawTokens:
        """The ids of a file.

        Args:
            dtype: dtype of the ids; None: the header, the vocabulary or the bytes decide.
            vocab_size: vocabulary of the tokenizer that made the ids; None if it is unknown.
            option: the option or key that gives the dtype, for messages.

        Raises:
            DataError: the file holds something else, or its bytes are ids of several dtypes.
        """
        with path.open("rb") as file:
            head = file.read(HEAD)
        magic = int.from_bytes(head[:4], "little")
        if magic == _QUESTIONS:
            raise DataError(f"{path} holds the questions of an evaluation of llm.c, no text to train on: leave it out")
        if magic in _SHARDS:
            version, found, end = _SHARDS[magic]
            if (written := int.from_bytes(head[4:8], "little")) != version:
                raise DataError(f"{path} is a shard of llm.c of version {written}, and only {version} can be read")
            tokens = _flat(path, found, _SHARD_HEADER, (int.from_bytes(head[8:12], "little"), "the header of llm.c"))
            raw = cls(path, tokens, end, f"a shard of llm.c, of {found}")
        elif head.startswith(_NUMPY):
            tokens = _array(path)
            raw = cls(path, tokens, None, f"an array of numpy, of {tokens.dtype.name}")
        elif path.suffix == ".ds" and (metadata := read_datatrove_metadata(datatrove_metadata_file(path))) is not None:
            _, found, number = metadata
            tokens = _flat(path, found, told=(number, f"{path.name}.metadata"))
            raw = cls(path, tokens, None, f"a file of datatrove, of {found}", _ends(path, len(tokens)))
        else:
            found, why = (dtype, None) if dtype is not None else _looks_like(path, head, option, vocab_size)
            tokens = _flat(path, found)
            reading = why and f"{found}, as {why}; {option} says otherwise"
            return cls(path, tokens, None, reading, _ends(path, len(tokens)))
        if dtype not in (None, raw.tokens.dtype.name):
            raise DataError(f"{option} ({dtype}) must be {raw.tokens.dtype.name}, which {path} is by its header")
        return raw


def is_raw_tokens(path: Path) -> bool:
    """True if `path` is named as raw token ids are: a .bin has no .idx of a Megatron data set then."""
    return path.suffix in SUFFIXES and path.is_file() and not path.with_suffix(".idx").exists()


def raw_tokens_hint(path: Path) -> str:
    """The end of a message about a file of tokens that a run was given: what makes data of it that runs read."""
    return f"`shardwise data prepare {path} PREFIX` makes PREFIX.bin and PREFIX.idx of raw tokens"


def read_datatrove_metadata(path: Path) -> tuple[str, str, int] | None:
    """The tokenizer, the dtype and the number of ids that datatrove's NAME.ds.metadata tells; None if there is none."""
    if not path.is_file():
        return None
    with read_errors(path):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    # Without a tokenizer, datatrove writes the size twice.
    name, _, width = lines[0].rpartition("|") if lines else ("", "", "")
    if len(lines) < 2 or width not in ("2", "4") or not lines[1].isdecimal():
        raise DataError(f"{path} must have the lines TOKENIZER|BYTES, of 2 or 4 bytes, and the number of ids")
    return name, f"uint{8 * int(width)}", int(lines[1])


def datatrove_metadata_file(path: Path) -> Path:
    """The file of datatrove that says which tokenizer made the ids of `path`."""
    return path.with_name(f"{path.name}.metadata")


def _ends(path: Path, number: int) -> IntArray | None:
    """The ends of documents in datatrove's index, if there is one; DataError if it is not that of `number` ids."""
    index = path.with_name(f"{path.name}.index")
    if path.suffix != ".ds" or not index.is_file():
        return None
    size = index.stat().st_size
    ends = np.fromfile(index, "<u8").astype(np.int64) if size and size % 8 == 0 else np.empty(0, np.int64)
    if not ends.size or ends[-1] != number or (np.diff(ends, prepend=0) < 0).any():
        last = f"of which the last is {ends[-1]}" if ends.size else f"and it has {size} bytes"
        raise DataError(
            f"{index} must have the end of each document as 8 bytes, ascending to {number}, the ids of {path.name}, "
            f"{last}: copy both files again, or remove the index"
        )
    return ends


def _looks_like(path: Path, head: bytes, option: str, vocab_size: int | None) -> tuple[str, str]:
    """The dtype that the ids seem to have, and why: the high half of an id of 64 bits is 0, and of 32 bits below 16.

    The vocabulary decides where the bytes may be ids of several dtypes; DataError if the bytes contradict it.
    """
    if (kind := next((kind for magic, kind in FOREIGN if re.match(magic, head, re.DOTALL)), None)) is not None:
        raise DataError(f"{path} is {kind}, not raw tokens: leave it out, or say by {option} that it holds ids")
    expected = None
    if vocab_size is not None:  # OLMo-core takes the narrowest dtype, the others two bytes or four
        kinds = ("uint8", "uint16", "uint32", "uint64")[path.suffix != ".npy" :]
        expected = next(kind for kind in kinds if vocab_size - 1 <= np.iinfo(kind).max)

    def contradicts(dtype: str) -> DataError:
        return DataError(
            f"the bytes of {path} look like ids of {dtype}, and a vocabulary of {vocab_size} would be {expected}: say "
            f"which by {option}, or name the tokenizer that made them by data.tokenizer"
        )

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
                if expected is not None and np.dtype(expected).itemsize < np.dtype(dtype).itemsize:
                    raise contradicts(dtype)
                return dtype, "its bytes look"
            unclear.append(dtype)
    if expected == "uint8" and size % 2 == 0 and words.size >= _EVIDENCE and int(words.max()) <= np.iinfo(expected).max:
        raise contradicts("uint16")  # as ids of uint8, every second one would be 0
    if expected is not None:
        return expected, f"a vocabulary of {vocab_size} is"
    if not unclear:
        return DTYPES[0], "its bytes look"
    dtypes = listing([DTYPES[0], *reversed(unclear)], "or")
    raise DataError(f"the bytes of {path} may be ids of {dtypes}: say which by {option}")


def _flat(path: Path, dtype: str, offset: int = 0, told: tuple[int, str] | None = None) -> Integers:
    """The ids of a file; `told`: the number that there must be, and what says so."""
    read = np.dtype(dtype).newbyteorder("<")
    size = path.stat().st_size
    if size <= offset or (size - offset) % read.itemsize:
        raise DataError(
            f"the size of {path} ({size} bytes) must be above {offset} and a multiple of {read.itemsize}, for ids of "
            f"{dtype}: the file is cut off, or holds something else"
        )
    tokens: Integers = np.asarray(np.memmap(path, dtype=read, mode="r", offset=offset))
    if told is not None and len(tokens) != told[0]:
        raise DataError(f"{path} ({len(tokens)} ids of {dtype}) must have {told[0]}, as {told[1]} says: copy it again")
    return tokens


def _array(path: Path) -> Integers:
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
