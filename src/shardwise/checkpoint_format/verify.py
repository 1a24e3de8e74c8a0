"""Whether a checkpoint is what was written: every byte is read once, at most 16 MiB at a time.

Of each file the length, the checksum of every chunk and the safetensors header; of each tensor whether its pieces tile
it, without a gap and without an overlap, and how many of its values are not finite.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwise.boxes import Box
from shardwise.checkpoint_format.manifest import MANIFEST, Manifest, TensorEntry, label
from shardwise.checkpoint_format.safetensors import DTYPES, StoredTensor, parse_header
from shardwise.errors import listing
from shardwise.storage.chunks import READ_BYTES, FileEntry, require_size, verify_chunk
from shardwise.storage.root import DamageError, Root, StoreError

_SUFFIX = ".safetensors"
_NOT_FINITE = {
    "F8_E4M3": ("|u1", 0x7F),
    "F8_E5M2": ("|u1", 0x7C),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}
"""Bits that are all set in NaN and infinity, and in nothing else."""
_COUNTED_AT_ONCE = 2**18
_SHOWN = 5


@dataclass
class Report:
    """What was found.

    Attributes:
        folder: the checkpoint.
        problems: one sentence each; empty where all is as it was written.
        files: number of files that the manifest lists.
        bytes: number of bytes that were read.
        tensors: number of tensors that the manifest lists.
        non_finite: STATE/NAME → how many values are NaN or infinite.
        unlisted: files that the manifest does not list.
    """

    folder: Root
    problems: list[str] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    tensors: int = 0
    non_finite: dict[str, int] = field(default_factory=dict)
    unlisted: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.problems and not self.non_finite


@dataclass(frozen=True)
class _Span:
    """Bytes `start` to `stop` of a file, which are values of a tensor."""

    start: int
    stop: int
    key: str
    dtype: str


def verify(folder: Root, progress: Callable[[int], None] | None = None) -> Report:
    """Read a checkpoint whole.

    Args:
        progress: called with the number of bytes that were read since the last call.

    Raises:
        StoreError: there is no manifest (`missing`): this is no checkpoint.
    """
    report = Report(folder)
    try:
        manifest = Manifest.read(folder)
        present = folder.files()
    except StoreError as error:
        if error.missing:
            raise
        report.problems.append(str(error))
        return report
    report.files = len(manifest.files)
    _find_unlisted(folder, manifest, present, report)
    spans: list[list[_Span]] = [[] for _ in manifest.files]
    expected: list[dict[str, StoredTensor]] = [{} for _ in manifest.files]
    for state, tensors in manifest.tensors.items():
        for name, tensor in tensors.items():
            report.tensors += 1
            problem = tiling_problem(tensor.shape, [piece.box for piece in tensor.pieces])
            if problem:
                report.problems.append(f"{folder}: the pieces of {state}/{name} {problem}")
            for piece in tensor.pieces:
                stop = piece.offset + tensor.nbytes(piece)
                spans[piece.file].append(_Span(piece.offset, stop, f"{state}/{name}", tensor.dtype))
                stored = StoredTensor(tensor.dtype, piece.box.size, piece.offset, stop)
                expected[piece.file][label(state, name, tensor.shape, piece.box)] = stored
    for entry, inside, wanted in zip(manifest.files, spans, expected, strict=True):
        file = folder / entry.path
        try:
            require_size(file, entry)
            intact = _read_through(file, entry, sorted(inside, key=lambda span: span.start), report, progress)
            if intact and (wanted or entry.path.endswith(_SUFFIX)):
                report.problems += _header_problems(file, wanted)
        except StoreError as error:
            report.problems.append(str(error))
    return report


def untiled(tensors: Mapping[str, Mapping[str, TensorEntry]]) -> list[str]:
    """The tensors of a manifest whose pieces do not tile them, with the reason."""
    return [
        f"the pieces of {state}/{name} {problem}"
        for state, named in tensors.items()
        for name, tensor in named.items()
        if (problem := tiling_problem(tensor.shape, [piece.box for piece in tensor.pieces]))
    ]


def tiling_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Why boxes, each inside of the shape, do not tile it; None where every element is in exactly one of them."""
    boxes = [box for box in boxes if box.numel]
    if shape and len(boxes) > 1:
        # A sweep along the dim with the most different starts: only boxes that overlap in it are compared.
        dim = max(range(len(shape)), key=lambda i: len({box.start[i] for box in boxes}))
        open_: list[Box] = []
        for box in sorted(boxes, key=lambda each: each.start[dim]):
            open_ = [each for each in open_ if each.stop[dim] > box.start[dim]]
            for each in open_:
                if each.intersect(box):
                    return f"overlap: {_shown(each)} and {_shown(box)}"
            open_.append(box)
    elif len(boxes) > 1:
        return "overlap: it has one element"
    covered, whole = sum(box.numel for box in boxes), math.prod(shape)
    return None if covered == whole else f"leave a gap: they cover {covered:,} of its {whole:,} elements"


def non_finite(data: memoryview, dtype: str) -> int:
    """How many values of a safetensors dtype are NaN or infinite."""
    if dtype not in _NOT_FINITE:
        return 0
    numpy, mask = _NOT_FINITE[dtype]
    bits = np.frombuffer(data, numpy)
    blocks = (bits[i : i + _COUNTED_AT_ONCE] for i in range(0, len(bits), _COUNTED_AT_ONCE))
    return sum(int(np.count_nonzero((block & mask) == mask)) for block in blocks)


def non_finite_text(found: Mapping[str, int]) -> str:
    """Which tensors have values that are NaN or infinite, and how many each; `found`: by name, not empty."""
    shown = [f"{name} ({count:,})" for name, count in itertools.islice(found.items(), _SHOWN)]
    if len(found) > _SHOWN:
        shown.append(f"{len(found) - _SHOWN:,} more tensors")
    return f"values that are NaN or infinite in {listing(shown)}"


class _Values:
    """Takes a file's bytes in order and counts the values in it that are not finite."""

    def __init__(self, spans: Sequence[_Span], found: dict[str, int]) -> None:
        self._spans, self._found = spans, found
        self._next = 0
        self._begun = b""
        """The first bytes of a value that continues in the next part."""

    def feed(self, at: int, data: memoryview) -> None:
        """Bytes from `at` on."""
        end = at + len(data)
        while self._next < len(self._spans) and self._spans[self._next].start < end:
            span = self._spans[self._next]
            self._count(span, data[max(span.start - at, 0) : min(span.stop, end) - at])
            if span.stop > end:
                return
            self._next += 1
            self._begun = b""

    def _count(self, span: _Span, data: memoryview) -> None:
        itemsize = DTYPES[span.dtype].itemsize
        parts = [data]
        if self._begun:
            missing = itemsize - len(self._begun)
            parts = [memoryview(self._begun + bytes(data[:missing])), data[missing:]]
        for part in parts:
            whole = len(part) // itemsize * itemsize
            count = non_finite(part[:whole], span.dtype)
            if count:
                self._found[span.key] = self._found.get(span.key, 0) + count
            self._begun = bytes(part[whole:])


def _read_through(
    file: Root,
    entry: FileEntry,
    spans: Sequence[_Span],
    report: Report,
    progress: Callable[[int], None] | None,
) -> bool:
    """Every chunk of a file; returns whether all match their checksums."""
    values = _Values(spans, report.non_finite)
    damaged: list[int] = []
    at_once = max(1, READ_BYTES // entry.chunk_bytes)
    for first in range(0, entry.chunks, at_once):
        begin = first * entry.chunk_bytes
        stop = min(begin + at_once * entry.chunk_bytes, entry.bytes)
        data = memoryview(file.read(begin, stop))
        report.bytes += len(data)
        if progress is not None:
            progress(len(data))
        if len(data) != stop - begin:
            raise DamageError(f"{file} is damaged: it ends at byte {begin + len(data):,}, before byte {stop:,}")
        for chunk in range(first, min(first + at_once, entry.chunks)):
            at = (chunk - first) * entry.chunk_bytes
            try:
                verify_chunk(file, entry, chunk, data[at : at + entry.chunk_bytes])
            except DamageError:
                damaged.append(chunk)
        values.feed(begin, data)
    for low, high in _consecutive(damaged):
        begin, stop = low * entry.chunk_bytes, min((high + 1) * entry.chunk_bytes, entry.bytes)
        chunks = f"chunk {low}" if low == high else f"chunks {low} to {high}"
        report.problems.append(f"{file} is damaged: bytes {begin:,} to {stop:,} do not match their checksum ({chunks})")
    return not damaged


def _header_problems(file: Root, expected: dict[str, StoredTensor]) -> list[str]:
    """Where a file's own header and the manifest disagree: other programs read the header."""
    found = parse_header(file)
    names = dict.fromkeys([*expected, *found])
    differing = [name for name in names if found.get(name) != expected.get(name)]
    return [f"{file}: its header and {MANIFEST} say different things about {name}" for name in differing]


def _find_unlisted(folder: Root, manifest: Manifest, present: Iterable[str], report: Report) -> None:
    listed = {entry.path for entry in manifest.files} | {MANIFEST}
    for path in present:
        if path in listed:
            continue
        report.unlisted.append(path)
        if path.endswith((_SUFFIX, f"{_SUFFIX}.index.json")):
            report.problems.append(
                f"{folder}/{path} holds weights that {MANIFEST} does not list: other programs read it"
            )


def _consecutive(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    groups = itertools.groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    runs = [[number for _, number in group] for _, group in groups]
    return [(run[0], run[-1]) for run in runs]


def _shown(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"
