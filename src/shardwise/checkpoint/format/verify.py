"""Verification of a checkpoint: every byte is read once, about 16 MiB at a time.

For each file: its length, the checksum of each chunk, and its safetensors header. For each tensor: whether its pieces
tile it without a gap or an overlap, and how many of its values are not finite.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from shardwise.base.errors import listing
from shardwise.base.tensor_box import Box
from shardwise.checkpoint.format.manifest import MANIFEST, Manifest, Numbers, Pieces, TensorEntry, label
from shardwise.checkpoint.format.safetensors import DTYPES, StoredTensor, parse_header
from shardwise.checkpoint.storage.chunks import READ_BYTES, FileEntry, require_size, verify_chunk
from shardwise.checkpoint.storage.root import DamageError, Root, StoreError

_SUFFIX = ".safetensors"
_NOT_FINITE = {
    "F8_E4M3": ("|u1", 0x7F),
    "F8_E5M2": ("|u1", 0x7C),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}
"""dtype → (numpy's integer of its bits, the exponent's bits): they are all set in NaN and infinity, and only there."""
_COUNTED_AT_ONCE = 2**18
_PAIRS_AT_ONCE = 2**20
_SHOWN = 5


@dataclass
class Report:
    """The result of a verification.

    Attributes:
        folder: the checkpoint.
        problems: one sentence each; empty where the checkpoint is as it was written.
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


def verify(folder: Root, progress: Callable[[int], None] | None = None) -> Report:
    """Read a whole checkpoint and report every problem.

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
    report.tensors = sum(len(named) for named in manifest.tensors.values())
    report.problems += [f"{folder}: {problem}" for problem in untiled(manifest.tensors)]
    _find_unlisted(folder, manifest, present, report)
    # For each file: name in the file → (STATE/NAME, where the piece lies).
    expected: list[dict[str, tuple[str, StoredTensor]]] = [{} for _ in manifest.files]
    for state, tensors in manifest.tensors.items():
        for name, tensor in tensors.items():
            for piece in tensor.pieces:
                stop = piece.offset + tensor.nbytes(piece)
                stored = StoredTensor(tensor.dtype, piece.box.size, piece.offset, stop)
                expected[piece.file][label(state, name, tensor.shape, piece.box)] = f"{state}/{name}", stored
    for entry, pieces in zip(manifest.files, expected, strict=True):
        file = folder / entry.path
        try:
            require_size(file, entry)
            intact = _verify_file(file, entry, pieces.values(), report, progress)
            if intact and (pieces or entry.path.endswith(_SUFFIX)):
                report.problems += _header_problems(file, {name: stored for name, (_, stored) in pieces.items()})
        except StoreError as error:
            report.problems.append(str(error))
    return report


def untiled(tensors: Mapping[str, Mapping[str, TensorEntry]]) -> list[str]:
    """The tensors of a manifest whose pieces do not tile them, with the reason."""
    return [
        f"the pieces of {state}/{name} {problem}"
        for state, named in tensors.items()
        for name, tensor in named.items()
        if (problem := tiling_problem(tensor.shape, tensor.table))
    ]


def tiling_problem(shape: tuple[int, ...], pieces: Pieces) -> str | None:
    """Why pieces, each inside the shape, do not tile it; None where every element is in exactly one of them."""
    numels = pieces.sizes.prod(axis=1)
    starts, sizes = pieces.starts[numels > 0], pieces.sizes[numels > 0]
    if len(starts) > 1:
        if not shape:
            return "overlap: it has one element"
        if pair := _overlap(starts, starts + sizes):
            first, second = (Box(tuple(starts[at].tolist()), tuple(sizes[at].tolist())) for at in pair)
            return f"overlap: {_shown(first)} and {_shown(second)}"
    covered, whole = int(numels.sum()), math.prod(shape)
    return None if covered == whole else f"leave a gap: they cover {covered:,} of its {whole:,} elements"


def _overlap(starts: Numbers, stops: Numbers) -> tuple[int, int] | None:
    """Two boxes with elements that share one, by their numbers; `starts`, `stops`: `[boxes, dims]`.

    Along the dim with the most different starts, only boxes that overlap in it are compared, a million pairs at a time.
    """
    dim = max(range(starts.shape[1]), key=lambda i: len(np.unique(starts[:, i])))
    order = np.argsort(starts[:, dim], kind="stable")
    starts, stops = starts[order], stops[order]
    boxes = np.arange(len(starts))
    after = np.searchsorted(starts[:, dim], stops[:, dim]) - boxes - 1  # how many begin in the dim before a box ends
    for block in np.split(boxes, np.flatnonzero(np.diff(np.cumsum(after) // _PAIRS_AT_ONCE)) + 1):
        first, count = np.repeat(block, after[block]), after[block]
        second = first + 1 + np.arange(len(first)) - np.repeat(np.cumsum(count) - count, count)
        shared = np.flatnonzero(((starts[second] < stops[first]) & (starts[first] < stops[second])).all(axis=1))
        if len(shared):
            pair = shared[np.lexsort((first[shared], second[shared]))[0]]
            return int(order[first[pair]]), int(order[second[pair]])
    return None


def non_finite(data: memoryview, dtype: str) -> int:
    """How many values of a safetensors dtype are NaN or infinite."""
    if dtype not in _NOT_FINITE:
        return 0
    numpy, exponent = _NOT_FINITE[dtype]
    bits = np.frombuffer(data, numpy)
    blocks = (bits[i : i + _COUNTED_AT_ONCE] for i in range(0, len(bits), _COUNTED_AT_ONCE))
    return sum(int(np.count_nonzero((block & exponent) == exponent)) for block in blocks)


def non_finite_text(counts: Mapping[str, int]) -> str:
    """Which tensors have values that are NaN or infinite, and how many each; `counts`: by name, not empty."""
    shown = [f"{name} ({count:,})" for name, count in list(counts.items())[:_SHOWN]]
    if len(counts) > _SHOWN:
        shown.append(f"{len(counts) - _SHOWN:,} more tensors")
    return f"values that are NaN or infinite in {listing(shown)}"


def _verify_file(
    file: Root,
    entry: FileEntry,
    pieces: Iterable[tuple[str, StoredTensor]],
    report: Report,
    progress: Callable[[int], None] | None,
) -> bool:
    """Read a file once, for its checksums and its values; returns whether all chunks match their checksums."""
    damaged: list[int] = []
    begun = b""  # the first bytes of a value that continues in the next block
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
        if begun:
            begin, data = begin - len(begun), memoryview(begun + bytes(data))
        begun = _count_non_finite(pieces, begin, data, report.non_finite)
    for low, high in consecutive(damaged):
        begin, stop = low * entry.chunk_bytes, min((high + 1) * entry.chunk_bytes, entry.bytes)
        chunks = f"chunk {low}" if low == high else f"chunks {low} to {high}"
        report.problems.append(f"{file} is damaged: bytes {begin:,} to {stop:,} do not match their checksum ({chunks})")
    return not damaged


def _count_non_finite(
    pieces: Iterable[tuple[str, StoredTensor]], begin: int, data: memoryview, counts: dict[str, int]
) -> bytes:
    """Add the values in a block of a file that are not finite to `counts`, by the key of their piece.

    `begin`: the block's first byte in the file; a piece that began before it has a value that begins there. Returns the
    first bytes of a value that continues behind the block.
    """
    begun = b""
    for key, stored in pieces:
        start, stop = max(stored.start, begin), min(stored.stop, begin + len(data))
        if start < stop:
            whole = stop - (stop - start) % DTYPES[stored.dtype].itemsize
            if count := non_finite(data[start - begin : whole - begin], stored.dtype):
                counts[key] = counts.get(key, 0) + count
            begun = begun or bytes(data[whole - begin : stop - begin])
    return begun


def consecutive(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive numbers, of ascending ones."""
    # The difference of a number and its place is the same throughout a run.
    groups = itertools.groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    runs = [[number for _, number in group] for _, group in groups]
    return [(run[0], run[-1]) for run in runs]


def _header_problems(file: Root, expected: Mapping[str, StoredTensor]) -> list[str]:
    """Where a file's own header and the manifest disagree: other programs read the header."""
    stored = parse_header(file)
    differing = [name for name in dict.fromkeys([*expected, *stored]) if stored.get(name) != expected.get(name)]
    return [f"{file}: its header and {MANIFEST} say different things about {name}" for name in differing]


def _find_unlisted(folder: Root, manifest: Manifest, present: Iterable[str], report: Report) -> None:
    listed = {entry.path for entry in manifest.files} | {MANIFEST}
    report.unlisted = [path for path in present if path not in listed]
    report.problems += [
        f"{folder}/{path} holds weights that {MANIFEST} does not list: other programs read it"
        for path in report.unlisted
        if path.endswith((_SUFFIX, f"{_SUFFIX}.index.json"))
    ]


def _shown(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"
