"""Megatron's data sets: tokens in PREFIX.bin, and the bounds of their sequences and documents in PREFIX.idx.

All integers are little-endian. PREFIX.bin holds the tokens back to back. PREFIX.idx:

    offset  0   9 bytes, `MMIDIDX` and two of zero
    offset  9   u64     version, 1
    offset 17   u8      dtype code of the tokens (`DTYPES`)
    offset 18   u64     n, the number of sequences
    offset 26   u64     d + 1, the number of document bounds
    offset 34   i32[n]      tokens of each sequence
    then        i64[n]      byte of PREFIX.bin at which each sequence begins
    then        i64[d + 1]  each document's first sequence, then n
    then, of multimodal data, which are refused, i8[n]: the medium of each sequence (`IndexedDatasetBuilder` of
                            Megatron Core 0.16.1 with multimodal=True)

A document has one sequence, or one for each of its sentences.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import SEEK_END
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import numpy as np

from shardwise.base.errors import DataError, listing, see
from shardwise.base.files import reason_of, sync_folder, to_disk, user_path
from shardwise.data.cache import spread_digest
from shardwise.data.reading.content import read_errors
from shardwise.data.reading.raw_tokens import raw_tokens_hint
from shardwise.data.rows import Int32Array, IntArray, Integers, Sentences

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Dtype codes of integers; 6 and 7 are floating point."""
# Dtypes of the sizes of sequences, and of the pointers and the document bounds.
_SIZE = np.dtype("<i4")
_WIDE = np.dtype("<i8")
_HEADER = struct.Struct("<9sQBQQ")
# Megatron-LM's own limit, a little below 2^16.
_SMALL_VOCABULARY = 65500
# A program that counts bytes with 32 bits is off by multiples of this.
_OVERFLOW = 1 << 32
# Elements that are checked at once, as a copy of a large array would not fit into memory.
_BLOCK = 1 << 20
# Documents that are measured at once: their arrays fit in a core's cache.
_MEASURED_DOCUMENTS = 1 << 16


def megatron_prefix(path: str | Path) -> Path:
    """The prefix of a Megatron data set, which the prefix itself, its .bin or its .idx names."""
    named = user_path(path)
    if named.suffix in (".bin", ".idx"):
        return named.with_suffix("")
    return named


def is_megatron_file(path: str | Path) -> bool:
    """True if `path` names a Megatron data set: a .bin, a .idx, or a prefix of either that is no file or folder."""
    named = user_path(path)
    if named.suffix in (".bin", ".idx"):
        return not named.is_dir()
    return not named.exists() and any(file.is_file() for file in _files(named))


def _files(prefix: Path) -> tuple[Path, Path]:
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


@dataclass(frozen=True, eq=False)
class IndexedFile:
    """A Megatron data set, mapped into memory. Opening reads all of the .idx and nothing of the .bin."""

    prefix: Path
    tokens: Integers  # all tokens of the .bin
    sizes: Int32Array  # number of tokens of each sequence, [n]
    # First byte of each sequence, [n]. A program that counts with 32 bits writes wrong ones beyond 2 GiB; the pointers
    # are then computed from the sizes.
    pointers: IntArray
    documents: IntArray  # document bounds, [d + 1]

    @classmethod
    def open(cls, path: str | Path) -> IndexedFile:
        """The data set of a prefix, .bin or .idx; DataError with file and place where one is not in the format."""
        prefix = megatron_prefix(path)
        bin_path, idx_path = _existing_files(prefix)
        with read_errors(prefix):
            dtype, sequences = _read_header(idx_path)
            raw = np.memmap(idx_path, dtype=np.uint8, mode="r")
            # The three arrays lie one after another behind the header, and may not be aligned to their dtypes.
            cuts = np.cumsum([_HEADER.size, sequences * _SIZE.itemsize, sequences * _WIDE.itemsize]).tolist()
            sizes = raw[cuts[0] : cuts[1]].view(_SIZE)
            pointers = raw[cuts[1] : cuts[2]].view(_WIDE)
            documents = raw[cuts[2] :].view(_WIDE)
            total, overflow = _check_sequences(idx_path, sizes, pointers, dtype.itemsize)
            _check_documents(idx_path, documents, sequences)
            _check_bin(bin_path, idx_path, total, overflow)
            if overflow is not None:
                ends = np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
                pointers = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
            tokens = np.memmap(bin_path, dtype=dtype, mode="r")
        return cls(prefix, *map(np.asarray, (tokens, sizes, pointers, documents)))

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def starts(self, documents: Integers) -> IntArray:
        """The first token of each of these documents; of the number after the last one, the number of tokens."""
        return self.sequence_starts(self.documents[documents])

    def sequence_starts(self, sequences: IntArray) -> IntArray:
        """The first token of each of these sequences; of the number after the last one, the number of tokens."""
        starts: IntArray = self.pointers[np.minimum(sequences, len(self.pointers) - 1)] // self.tokens.itemsize
        return np.where(sequences < len(self.pointers), starts, len(self.tokens))

    @cached_property
    def digest(self) -> str:
        """A digest of the whole .idx and of blocks spread over the .bin: reading all of 100 GB would take minutes."""
        bin_path, idx_path = _files(self.prefix)
        with read_errors(self.prefix), idx_path.open("rb") as file:
            idx = hashlib.file_digest(file, "sha256").hexdigest()
            return hashlib.sha256(f"{idx} {spread_digest(bin_path)}".encode()).hexdigest()


class MegatronDocuments:
    """Consecutive documents, number `first` to `stop` - 1, of a data set that a model of `vocab_size` reads.

    The tokens of consecutive documents are consecutive too: they are tokens `start` to `end` - 1 of the data set.
    """

    def __init__(self, file: IndexedFile, first: int, stop: int, vocab_size: int) -> None:
        self.file = file
        self.first = first
        self.stop = stop
        self.start, self.end = map(int, file.starts(np.array([first, stop])))
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        """The number of tokens."""
        return self.end - self.start

    @property
    def count(self) -> int:
        """The number of documents."""
        return self.stop - self.first

    def take(self, places: IntArray) -> IntArray:
        """The tokens at `places`, counted from `start`; DataError names document and place of one that is too large."""
        tokens: IntArray = self.file.tokens[places + self.start].astype(np.int64)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            wrong = int(np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))[0])
            place = int(places.flat[wrong]) + self.start
            numbers = range(self.first, self.stop)
            document = numbers[bisect_right(numbers, place, key=lambda n: int(self.file.starts(np.array([n]))[0])) - 1]
            raise DataError(
                f"{self.file.prefix}.bin: token {place} ({tokens.flat[wrong]}), in document {document}, must be in 0 … "
                f"{self._vocab_size - 1}: set model.vocab_size to that of the tokenizer that made the data"
                f"{see('data#token-beyond-vocabulary')}"
            )
        return tokens

    def beginning(self, tokens: int) -> list[int]:
        """The first tokens; fewer if there are no more."""
        return [int(token) for token in self.take(np.arange(min(tokens, len(self))))]

    def starts(self, documents: Integers) -> IntArray:
        """The first token of each of these documents, 0 … count, counted from `start`."""
        return np.asarray(self.file.starts(np.add(documents, self.first, dtype=np.int64)) - self.start)

    def lengths(self) -> IntArray:
        """Tokens of each document, [count]."""
        lengths = np.empty(self.count, dtype=np.int64)
        for start in range(0, self.count, _MEASURED_DOCUMENTS):
            stop = min(start + _MEASURED_DOCUMENTS, self.count)
            lengths[start:stop] = np.diff(self.starts(np.arange(start, stop + 1)))
        return lengths

    def bounds(self) -> IntArray:
        """The first token of each document, counted from `start`, then the number of tokens, [count + 1]."""
        bounds = np.zeros(self.count + 1, dtype=np.int64)
        np.cumsum(self.lengths(), out=bounds[1:])
        return bounds

    @cached_property
    def sentences(self) -> Sentences:
        """The bounds of sentences (one a sequence) and documents; those without tokens are left out."""
        bounds = self.file.documents[self.first : self.stop + 1]
        sequences = self.file.sequence_starts(np.arange(bounds[0], bounds[-1] + 1)) - self.start
        # A sequence with tokens begins a sentence; the end of the last one is kept as the last bound.
        begins = np.append(np.diff(sequences) > 0, True)
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(begins)])
        return Sentences(sequences[begins], np.unique(before[bounds - bounds[0]]))


def count_sequences(path: str | Path) -> int:
    """The number of sequences in a Megatron data set, by the header of its .idx; DataError as of `IndexedFile.open`."""
    _, idx_path = _existing_files(megatron_prefix(path))
    with read_errors(idx_path):
        return _read_header(idx_path)[1]


def count_tokens(path: str | Path) -> int:
    """The number of tokens of a Megatron data set, from the size of its .bin; DataError as from `IndexedFile.open`."""
    bin_path, idx_path = _existing_files(megatron_prefix(path))
    with read_errors(idx_path):
        return bin_path.stat().st_size // _read_header(idx_path)[0].itemsize


def _existing_files(prefix: Path) -> tuple[Path, Path]:
    bin_path, idx_path = _files(prefix)
    problems = [
        f"{file} does not exist: data.format=megatron reads {bin_path.name} and {idx_path.name} together"
        for file in (bin_path, idx_path)
        if not file.is_file()
    ]
    if problems:
        if bin_path.is_file():
            problems[0] += f"; {raw_tokens_hint(bin_path)}"
        raise DataError(problems)
    return bin_path, idx_path


def _read_header(path: Path) -> tuple[np.dtype[Any], int]:
    """The tokens' dtype and the number of sequences, of a file whose size fits its header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size:
        raise _damaged(path, f"its size ({size} bytes) must be at least {_HEADER.size}")
    magic, version, code, sequences, bounds = _HEADER.unpack(head)
    header: tuple[tuple[int, str, object, Collection[object]], ...] = (
        (0, "magic", magic, [MAGIC]),
        (9, "version", version, [VERSION]),
        (17, "dtype code", code, DTYPES),
    )
    for byte, field, found, allowed in header:
        if found not in allowed:
            raise DataError(
                f"{path}: byte {byte}, the {field} ({found!r}), must be {listing(allowed, 'or')}: it is no .idx of "
                "Megatron's for integers; name another one, or prepare the data again"
            )
    if sequences < 1 or bounds < 2:
        raise DataError(
            f"{path}: byte 18, the sequences and documents ({sequences} and {max(bounds - 1, 0)}), must be 1 or more "
            "each: it holds no documents; prepare the data again"
        )
    expected = _HEADER.size + sequences * (_SIZE.itemsize + _WIDE.itemsize) + bounds * _WIDE.itemsize
    if size == expected + sequences:
        raise DataError(
            f"{path}: its size ({size} bytes) must be {expected}, and behind it is a byte for each of its {sequences} "
            "sequences, as data of several media have (multimodal): text alone is read; prepare the data without it"
        )
    if size != expected:
        problem = f"its size ({size} bytes) must be {expected}, for {sequences} sequences and {bounds - 1} documents"
        raise _damaged(path, problem)
    return np.dtype(DTYPES[code]), sequences


def _damaged(path: Path, problem: str) -> DataError:
    return DataError(f"{path}: {problem}: the file is cut off or damaged, copy it again")


def _check_bin(bin_path: Path, idx_path: Path, expected: int, overflow: int | None) -> None:
    """The .bin must have the size that the .idx says; `overflow`: as `_check_sequences` gives it."""
    size = bin_path.stat().st_size
    if size == expected == 0:
        raise DataError(f"{bin_path} must hold tokens, and it is empty: prepare the data again")
    if size != expected:
        advice = "copy both again"
        if overflow is not None:
            advice += f", or prepare the data again: from sequence {overflow} on, the pointers have overflowed 32 bits"
        raise DataError(
            f"{bin_path} ({size} bytes) must have {expected} bytes, as {idx_path.name} says: it was cut off, or the "
            f"two belong to different data; {advice}{see('data#bin-and-idx-differ')}"
        )


def _check_sequences(path: Path, sizes: Int32Array, pointers: IntArray, itemsize: int) -> tuple[int, int | None]:
    """Each sequence must have a size and begin at the end of the one before. Returns the byte at which the last one
    ends, and the first sequence whose pointer overflowed 32 bits; None if none.
    """
    end = 0
    overflow: int | None = None
    for start in range(0, len(sizes), _BLOCK):
        size = sizes[start : start + _BLOCK].astype(np.int64)
        for at in np.flatnonzero(size < 0)[:1]:
            raise _damaged(path, f"sequence {start + at} ({size[at]} tokens) must have 0 tokens or more")
        begins = end + np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(size * itemsize)])
        distances = pointers[start : start + _BLOCK] - begins[:-1]
        if overflow is None and distances.any():
            overflow = start + int(np.flatnonzero(distances)[0])
        for at in np.flatnonzero(distances % _OVERFLOW)[:1]:
            found = pointers[start + at]
            raise _damaged(path, f"the pointer of sequence {start + at} ({found}) must be {begins[at]}, its first byte")
        end = int(begins[-1])
    return end, overflow


def _check_documents(path: Path, documents: IntArray, sequences: int) -> None:
    """The documents must cover all sequences, in order; an empty text is a document without sequences."""
    for start in range(0, len(documents), _BLOCK):
        block = documents[start : start + _BLOCK + 1]  # with the first bound of the next block
        for at in np.flatnonzero(np.diff(block) < 0)[:1]:
            raise _damaged(path, f"document bound {start + at + 1} ({block[at + 1]}) must be at least {block[at]}")
    ends = (int(documents[0]), int(documents[-1]))
    if ends != (0, sequences):
        raise _damaged(path, f"the first and the last document bound {ends} must be 0 and {sequences}")


def megatron_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype in which Megatron writes tokens of a vocabulary of this size."""
    return np.dtype("<u2" if vocab_size < _SMALL_VOCABULARY else "<i4")


class ChangedFilesError(DataError):
    """The text or the Megatron files of a preparation have changed since it began."""


class UnfinishedIndex:
    """A Megatron data set to which documents are appended, until its .idx can be made. An OSError passes through.

    PREFIX.bin has the tokens, PREFIX.sizes the sizes of sequences (i32), PREFIX.documents the document bounds (i64).

    Args:
        tokens, sequences, documents: numbers that the files keep, of those that they hold already.

    Raises:
        ChangedError: a file holds less than is kept.
    """

    def __init__(self, prefix: Path, vocab_size: int, tokens: int = 0, sequences: int = 0, documents: int = 0) -> None:
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.dtype = megatron_dtype(vocab_size)
        self.sequences = sequences
        self.documents = documents
        kept = {
            "bin": tokens * self.dtype.itemsize,
            "sizes": sequences * _SIZE.itemsize,
            "documents": (documents + 1) * _WIDE.itemsize if documents else 0,
        }
        with ExitStack() as opened:
            self._files = [_open_to_append(opened, Path(f"{prefix}.{name}"), size) for name, size in kept.items()]
            self._opened = opened.pop_all()
        if not documents:
            self._files[-1].write(np.zeros(1, dtype=_WIDE).tobytes())

    def __enter__(self) -> UnfinishedIndex:
        return self

    def __exit__(self, *_error: object) -> None:
        self._opened.close()

    def extend(self, tokens: Integers, sizes: Integers, ends: IntArray) -> None:
        """Appends documents: their tokens, the sizes of their sequences, and the ends of documents.

        Sequences after the last end belong to a document that the next call continues. Tokens beyond the sizes are the
        beginning of a sequence, whose size a later call gives.

        Args:
            ends: number of sequences before the end of each document, counted from the first of `sizes`.

        Raises:
            DataError: a token is not of the vocabulary.
        """
        for place in np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))[:1]:
            bounds = np.cumsum([0, *sizes])[[0, *ends]]  # the first token of each document
            number = int(np.searchsorted(bounds[1:], place, side="right"))
            raise DataError(
                f"document {self.documents + number}: token {place - bounds[number]} ({tokens[place]}) must be in 0 … "
                f"{self.vocab_size - 1}, the vocabulary: name the tokenizer that made it"
            )
        if sizes.size and int(sizes.max()) > np.iinfo(_SIZE).max:
            raise DataError(
                f"a sequence after document {self.documents} ({sizes.max()} tokens) must have fewer than 2^31, which "
                "the format can hold: cut the document"
            )
        tokens_file, sizes_file, bounds_file = self._files
        tokens_file.write(tokens.astype(self.dtype).tobytes())
        sizes_file.write(sizes.astype(_SIZE).tobytes())
        bounds_file.write((self.sequences + ends).astype(_WIDE).tobytes())
        self.sequences += len(sizes)
        self.documents += len(ends)

    def to_disk(self) -> None:
        """Waits until all that was appended is durable."""
        for file in self._files:
            to_disk(file)

    def finish(self) -> None:
        """Writes the .idx of all documents; then .bin and .idx are complete, and durable."""
        # The sizes are copied, and read a second time as their cumulative sums, the pointers.
        code = next(code for code, name in DTYPES.items() if np.dtype(name) == self.dtype)
        tokens, sizes, bounds = self._files
        with Path(f"{self.prefix}.idx").open("wb") as idx:
            idx.write(_HEADER.pack(MAGIC, VERSION, code, self.sequences, self.documents + 1))
            sizes.seek(0)
            shutil.copyfileobj(sizes, idx)
            sizes.seek(0)
            begin = 0
            while block := sizes.read(_BLOCK * _SIZE.itemsize):
                ends = begin + np.cumsum(np.frombuffer(block, dtype=_SIZE).astype(np.int64) * self.dtype.itemsize)
                idx.write(np.concatenate([[begin], ends[:-1]]).astype(_WIDE).tobytes())
                begin = int(ends[-1])
            bounds.seek(0)
            shutil.copyfileobj(bounds, idx)
            to_disk(idx)
        to_disk(tokens)


def _open_to_append(files: ExitStack, path: Path, size: int) -> BinaryIO:
    path.touch()
    if path.stat().st_size < size:
        raise ChangedFilesError(f"{path} is shorter than it was")
    file = files.enter_context(path.open("r+b"))
    file.truncate(size)
    file.seek(0, SEEK_END)
    return file


def publish_megatron_files(made: Path, prefix: Path) -> None:
    """Moves the complete .bin and .idx of the prefix `made` to `prefix`; after a crash it may be called again.

    The new .bin and the old .idx are never there together, and readers accept nothing without the .idx.
    """
    if _files(made)[1].exists():
        _files(prefix)[1].unlink(missing_ok=True)
        sync_folder(prefix.parent)
    for new, place in zip(_files(made), _files(prefix), strict=True):
        if new.exists():
            new.replace(place)
            sync_folder(prefix.parent)


class IndexedWriter:
    """Writes a Megatron data set, byte for byte as Megatron-LM does; memory does not grow with it.

    The files appear once the block ends without an error. Data of that name are replaced.

    Raises:
        DataError: a token is not of the vocabulary, lengths are not those of the tokens, or a file cannot be written.
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        self.prefix = megatron_prefix(prefix)
        self.vocab_size = vocab_size

    def __enter__(self) -> IndexedWriter:
        parent = self.prefix.parent
        with self._writing(), ExitStack() as opened:
            parent.mkdir(parents=True, exist_ok=True)
            folder = opened.enter_context(TemporaryDirectory(dir=parent, prefix=f".{self.prefix.name}-"))
            self._index = opened.enter_context(UnfinishedIndex(Path(folder, "tokens"), self.vocab_size))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        with self._writing(), self._opened:
            if kind is None:
                self._index.finish()
                publish_megatron_files(self._index.prefix, self.prefix)

    def add(self, tokens: Sequence[int] | Integers, sizes: Sequence[int] | None = None) -> None:
        """Appends a document; `sizes`: tokens of each of its sequences; None: one sequence of all its tokens."""
        row = np.asarray(tokens, dtype=np.int64)
        if sizes is None:
            sizes = [len(row)] if len(row) else []
        lengths = np.asarray(sizes, dtype=np.int64)
        self.extend(row, lengths, np.array([len(lengths)]))

    def extend(self, tokens: Integers, sizes: Integers, ends: IntArray) -> None:
        """Appends many documents at once, see `UnfinishedIndex.extend`."""
        if int(sizes.sum()) != len(tokens):
            raise DataError(
                f"document {self._index.documents}: the sizes of its sequences ({sizes.sum()} tokens) must add "
                f"up to its tokens ({len(tokens)})"
            )
        with self._writing():
            self._index.extend(tokens, sizes, ends)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self.prefix} cannot be written: {reason_of(error)}; name a place that has room"
            ) from error
