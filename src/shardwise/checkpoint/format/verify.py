"""Verification of a checkpoint: every byte is read once, about 16 MiB at a time.

A file is checked for its length, the checksum of each chunk, and its safetensors header; a tensor for a gap or an
overlap of its pieces, and for values that are not finite. Where the run recorded a hash of its state, the tensors are
read once more, for their hash: it tells of values that were wrong already when they were written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwise.base.errors import DamageError, StoreError, listing
from shardwise.base.tensor_box import box_segments
from shardwise.checkpoint.format.manifest import MANIFEST, Manifest, piece_label, untiled_tensors
from shardwise.checkpoint.format.safetensors import DTYPES, StoredTensor, read_header
from shardwise.checkpoint.format.stored_tensors import StoredTensors, ordered_names
from shardwise.checkpoint.storage.chunks import (
    READ_BYTES,
    FileEntry,
    consecutive_numbers,
    read_range,
    require_size,
    verify_chunk,
)
from shardwise.checkpoint.storage.root import Root
from shardwise.optim.state_digest import StateHash, box_sum, digest_place

_SUFFIX = ".safetensors"
_EXPONENT_BITS = {
    "F8_E4M3": 0x7F, "F8_E5M2": 0x7C, "F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000,
}  # fmt: skip
"""Bits that are all set in NaN and infinity, and only there: the exponent's, and all but the sign of E4M3.

E4M3 has no infinity, and gives its largest exponent to numbers but for the NaN.
"""
_COUNTED_AT_ONCE = 2**18  # values whose mask is in memory at once: it then stays in the processor's cache
_HASHED_AT_ONCE = 2**20  # elements in memory at once, 8 MiB as integers of 64 bits
_SHOWN = 5


@dataclass
class VerificationReport:
    """The result of the verification of a checkpoint."""

    folder: Root
    # One sentence each; empty where the checkpoint is as it was written.
    problems: list[str] = field(default_factory=list)
    files: int = 0  # number of files that the manifest lists
    bytes: int = 0
    tensors: int = 0  # number of tensors that the manifest lists
    non_finite: dict[str, int] = field(default_factory=dict)  # STATE/NAME → number of values that are NaN or infinite
    unlisted: list[str] = field(default_factory=list)  # files that the manifest does not list
    # Hash of the state that the manifest has; None where it has none, or was not compared.
    state_hash: str | None = None

    @property
    def sound(self) -> bool:
        return not self.problems and not self.non_finite


def verify_checkpoint(folder: Root, progress: Callable[[int], None] = lambda _: None) -> VerificationReport:
    """Read a whole checkpoint and report every problem.

    `progress` is called with the number of bytes that were read since the last call.

    Raises:
        StoreError: there is no manifest (`missing`): this is no checkpoint.
    """
    report = VerificationReport(folder)
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
    report.problems += [f"{folder}: {problem}" for problem in untiled_tensors(manifest.tensors)]
    listed = {entry.path for entry in manifest.files} | {MANIFEST}
    report.unlisted = [path for path in present if path not in listed]
    for path in report.unlisted:
        if path.endswith((_SUFFIX, f"{_SUFFIX}.index.json")):
            report.problems.append(
                f"{folder}/{path} holds weights that {MANIFEST} does not list: other programs read it"
            )
    for entry, pieces in zip(manifest.files, _pieces_by_file(manifest), strict=True):
        file = folder / entry.path
        try:
            require_size(file, entry)
            is_intact = _verify_file(file, entry, pieces.values(), report, progress)
            # Of a file that is damaged, the header may be what is damaged: nothing more is said of it.
            if is_intact and (pieces or entry.path.endswith(_SUFFIX)):
                expected = {label: piece.stored for label, piece in pieces.items()}
                stored = read_header(file)
                # Other programs read the header.
                differing = [name for name in {**expected, **stored} if stored.get(name) != expected.get(name)]
                report.problems += [
                    f"{file}: its header and {MANIFEST} say different things about {name}" for name in differing
                ]
        except StoreError as error:
            report.problems.append(str(error))
    # Of a checkpoint that is damaged, the hash would only say so once more.
    if not report.problems:
        try:
            report.state_hash = None if manifest.state_hash is None else str(manifest.state_hash.get("hash"))
            report.problems += _state_hash_problems(folder, manifest)
        except StoreError as error:
            report.problems.append(str(error))
    return report


@dataclass(frozen=True)
class _LabelledPiece:
    """A piece in a file: STATE/NAME of its tensor, and its bytes, which are a tensor of that file."""

    tensor: str
    stored: StoredTensor


def _pieces_by_file(manifest: Manifest) -> list[dict[str, _LabelledPiece]]:
    pieces: list[dict[str, _LabelledPiece]] = [{} for _ in manifest.files]
    for state, tensors in manifest.tensors.items():
        for name, tensor in tensors.items():
            for piece in tensor.pieces:
                stop = piece.offset + tensor.nbytes(piece)
                stored = StoredTensor(tensor.dtype, piece.box.size, piece.offset, stop)
                name_in_file = piece_label(state, name, tensor.shape, piece.box)
                pieces[piece.file][name_in_file] = _LabelledPiece(f"{state}/{name}", stored)
    return pieces


def count_non_finite(data: memoryview, dtype: str) -> int:
    """The number of a stored tensor's values that are NaN or infinite."""
    if dtype not in _EXPONENT_BITS:
        return 0
    exponent = _EXPONENT_BITS[dtype]
    bits = np.frombuffer(data, f"<u{DTYPES[dtype].itemsize}")
    count = 0
    for start in range(0, len(bits), _COUNTED_AT_ONCE):
        block = bits[start : start + _COUNTED_AT_ONCE]
        count += int(np.count_nonzero((block & exponent) == exponent))
    return count


def non_finite_text(counts: Mapping[str, int]) -> str:
    """The stored tensors with values that are NaN or infinite, for messages; `counts`: numbers by name, not empty."""
    shown = [f"{name} ({count:,})" for name, count in list(counts.items())[:_SHOWN]]
    if len(counts) > _SHOWN:
        shown.append(f"{len(counts) - _SHOWN:,} more tensors")
    return f"values that are NaN or infinite in {listing(shown)}"


def _verify_file(
    file: Root,
    entry: FileEntry,
    pieces: Iterable[_LabelledPiece],
    report: VerificationReport,
    progress: Callable[[int], None],
) -> bool:
    """Read a file once, for its checksums and its values; returns whether all chunks match their checksums."""
    damaged: list[int] = []
    # Blocks end where chunks end, which may be within a value: its first bytes wait for the next block.
    partial_value = b""
    at_once = max(1, READ_BYTES // entry.chunk_bytes)
    for first in range(0, entry.chunks, at_once):
        begin = first * entry.chunk_bytes
        stop = min(begin + at_once * entry.chunk_bytes, entry.bytes)
        data = memoryview(read_range(file, begin, stop))
        report.bytes += len(data)
        progress(len(data))
        for chunk in range(first, min(first + at_once, entry.chunks)):
            offset = (chunk - first) * entry.chunk_bytes
            try:
                verify_chunk(file, entry, chunk, data[offset : offset + entry.chunk_bytes])
            except DamageError:
                damaged.append(chunk)
        if partial_value:
            begin -= len(partial_value)
            data = memoryview(partial_value + bytes(data))
        partial_value = _count_non_finite(pieces, begin, data, report.non_finite)
    for low, high in consecutive_numbers(damaged):
        begin = low * entry.chunk_bytes
        stop = min((high + 1) * entry.chunk_bytes, entry.bytes)
        chunks = f"chunk {low}" if low == high else f"chunks {low} to {high}"
        report.problems.append(f"{file} is damaged: bytes {begin:,} to {stop:,} do not match their checksum ({chunks})")
    return not damaged


def _count_non_finite(pieces: Iterable[_LabelledPiece], begin: int, data: memoryview, counts: dict[str, int]) -> bytes:
    """Add the number of values in a block of a file that are not finite to `counts`, by their tensor.

    `begin`: the block's first byte in the file; a piece that began before it has a value that begins there. Returns the
    first bytes of a value that continues behind the block.
    """
    partial_value = b""
    for piece in pieces:
        stored = piece.stored
        start = max(stored.start, begin)
        stop = min(stored.stop, begin + len(data))
        if start < stop:
            stop_of_values = stop - (stop - start) % DTYPES[stored.dtype].itemsize
            count = count_non_finite(data[start - begin : stop_of_values - begin], stored.dtype)
            if count:
                counts[piece.tensor] = counts.get(piece.tensor, 0) + count
            partial_value = partial_value or bytes(data[stop_of_values - begin : stop - begin])
    return partial_value


def _state_hash_problems(folder: Root, manifest: Manifest) -> list[str]:
    """Compare the hash of the stored state with that in the manifest; returns one sentence at most.

    Raises:
        StoreError: a tensor cannot be read, or is damaged.
    """
    recorded = manifest.state_hash
    if recorded is None:
        return []
    sums = recorded.get("sums")
    seed = manifest.rng.get("seed")
    if not isinstance(sums, Mapping) or not _are_sums(sums, manifest) or not isinstance(seed, int):
        return [f"{folder}: the state hash in its manifest must name tensors of the checkpoint, and the seed be there"]
    place = digest_place(manifest.step, manifest.samples, manifest.tokens, manifest.position, seed)
    stored = StoredTensors(folder, manifest.tensors, manifest)
    computed = StateHash(
        place, {state: {name: _stored_sum(stored, state, name) for name in names} for state, names in sums.items()}
    )
    found_sums = computed.recorded()["sums"]
    differing = [
        f"{state}/{name}" for state, names in sums.items() for name in names if names[name] != found_sums[state][name]
    ]
    if not differing and computed.text == recorded.get("hash"):
        return []
    subject = "its place in the training" if not differing else listing(ordered_names(differing), most=5)
    return [
        f"{folder}: the state hash of its files ({computed.text}) must be that of the training "
        f"({recorded.get('hash')}): it differs in {subject}"
    ]


def _stored_sum(stored: StoredTensors, state: str, name: str) -> int:
    shape = stored.states[state][name].shape
    boxes = box_segments(shape, _HASHED_AT_ONCE)
    return sum(box_sum(stored.read(state, name, box), shape, box) for box in boxes) % 2**64


def _are_sums(sums: Mapping[str, Any], manifest: Manifest) -> bool:
    for state, names in sums.items():
        known = manifest.tensors.get(state, {})
        if not isinstance(names, Mapping) or not names.keys() <= known.keys():
            return False
        if not all(isinstance(text, str) for text in names.values()):
            return False
    return True
