"""Reading boxes of stored tensors into a model of any layout, each byte by one rank.

The ranks of a group exchange the boxes that they need. A rank reads the rows that it alone needs. Rows that several
ranks need (copies of a tensor, or some columns each) are read by one of them and sent to the others: a checksum covers
a whole chunk, so to read a part of a row takes as long as to read all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.base.errors import DamageError, StoreError
from shardwise.base.tensor_box import Box
from shardwise.checkpoint.format.manifest import Manifest, Numbers, PieceEntry, TensorEntry
from shardwise.checkpoint.format.stored_tensors import StoredTensors
from shardwise.checkpoint.storage.chunks import READ_BYTES, consecutive_numbers, require_size
from shardwise.checkpoint.storage.root import Root
from shardwise.checkpoint.weight_writers import TORCH_DTYPES
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group, Mesh

SEGMENT_BYTES = 4 * 2**20
_ROUND_BYTES = 64 * 2**20
"""Bytes that all ranks of a group read for each other before they exchange them: they are in memory at once."""
_SHOWN = 3


@dataclass(frozen=True)
class ReadRequest:
    """A box of a stored tensor that this rank needs."""

    state: str  # state of the tensor, such as `model`
    name: str
    box: Box
    target: Tensor  # view of shape `box.size` that gets the values
    # Groups whose ranks all need the same box, such as data parallelism and both ends of a pipeline with a tied weight.
    # Each rank reads an equal part, and an all-gather completes them.
    copies: tuple[Group, ...] = ()

    def part(self, box: Box) -> ReadRequest:
        """The request of a part: `box` is counted from the start of this request's box."""
        start = tuple(a + b for a, b in zip(self.box.start, box.start, strict=True))
        return ReadRequest(self.state, self.name, Box(start, box.size), self.target[box.slices])

    def slot(self, part: Box) -> Tensor:
        """The view of the target for a part of the box."""
        return self.target[part.relative_to(self.box).slices]


class _RequestedBox(NamedTuple):
    """A rank of the group, the index of a request there, and a part of that request's box."""

    rank: int
    request: int
    box: Box


@dataclass(frozen=True)
class _Segment:
    """Rows of a stored piece, and the parts of them that ranks need."""

    entry: TensorEntry
    piece: PieceEntry
    rows: Box
    parts: tuple[_RequestedBox, ...]

    @property
    def nbytes(self) -> int:
        return self.rows.numel * TORCH_DTYPES[self.entry.dtype].itemsize

    @property
    def ranks(self) -> set[int]:
        return {part.rank for part in self.parts}

    def slices(self, part: Box) -> tuple[slice, ...]:
        """Indices of a part in the rows."""
        return part.relative_to(self.rows).slices


class CheckpointReader:
    """Reads the tensors of one checkpoint and verifies the checksum of each chunk."""

    def __init__(self, folder: Root, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._tensors = StoredTensors(folder, manifest.tensors, manifest)

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank has read so far, in whole chunks."""
        return sum(reader.bytes_read for reader in self._tensors.readers.values())

    def read(self, entry: TensorEntry, piece: PieceEntry, box: Box) -> Tensor:
        """Whole rows of a piece; StoreError where the file cannot be read, or is damaged there."""
        rows = self._tensors.read_part(piece, entry.dtype, box.relative_to(piece.box))
        return torch.from_numpy(rows.copy()).view(TORCH_DTYPES[entry.dtype])

    def verified(self) -> Tensor:
        """For each chunk of all files, in the manifest's order: 1 where it was read and is intact."""
        flags: list[bytearray] = []
        for number, file in enumerate(self.manifest.files):
            reader = self._tensors.readers.get(number)
            flags.append(bytearray(file.chunks) if reader is None else reader.verified)
        return torch.from_numpy(np.frombuffer(b"".join(flags), np.uint8).copy())

    def verify(self, file: int, chunks: Numbers) -> None:
        """Read chunks of a file, in order and some megabytes at a time; StoreError where one is damaged or not read."""
        entry = self.manifest.files[file]
        require_size(self.folder / entry.path, entry)
        at_once = max(1, READ_BYTES // entry.chunk_bytes)
        for first, last in consecutive_numbers(chunks.tolist()):
            for chunk in range(first, last + 1, at_once):
                stop = min(chunk + at_once, last + 1) * entry.chunk_bytes
                self._tensors.reader(file).read(chunk * entry.chunk_bytes, min(stop, entry.bytes))


# ---- reading what ranks need


@torch.no_grad()
def read_tensors(
    reader: CheckpointReader, requests: Iterable[ReadRequest], mesh: Mesh, group: Group | None = None
) -> None:
    """Fill the targets of every rank from a checkpoint; each group (default: tensor parallelism's) reads for itself.

    Collective over the mesh; ranks that have copies of a request have these requests in the same order.

    Raises:
        DamageError: bytes do not match their checksums or are missing. StoreError: the store did not give them, and
        they may well be there. Both are raised on every rank, and the targets are then not to be used.
    """
    divided: list[tuple[ReadRequest, Group]] = []
    parts: list[ReadRequest] = []
    for request in requests:
        # Each group divides among its ranks the parts that the groups before it left to this rank.
        pending = [request]
        for ranks in request.copies:
            if ranks.size > 1:
                divided += [(whole_request, ranks) for whole_request in pending]
                pending = [part for whole_request in pending for part in _parts(whole_request, ranks)]
        parts += pending
    _read_parts(reader, parts, mesh, group or mesh.tp)
    # A part of a part is complete before the whole is.
    for request, ranks in reversed(divided):
        _gather_parts(request, ranks, mesh.device)


def _element_range(request: ReadRequest, group: Group) -> slice:
    """The elements of a request that this rank of a group reads, in their canonical order."""
    numel = request.box.numel
    part = -(-numel // group.size)
    return slice(min(group.rank * part, numel), min((group.rank + 1) * part, numel))


def _parts(request: ReadRequest, group: Group) -> Iterator[ReadRequest]:
    """This rank's equal part of a request that all ranks of the group have."""
    elements = _element_range(request, group)
    for box in Box.of_run(elements.start, elements.stop - elements.start, request.box.size):
        yield request.part(box)


def _gather_parts(request: ReadRequest, group: Group, device: torch.device) -> None:
    """Bring to all ranks the `_parts` that each has read; collective over the group."""
    elements = _element_range(request, group)
    # The group's collectives take tensors of the device, and offloaded state is in the host's memory.
    part = torch.zeros(-(-request.box.numel // group.size), dtype=request.target.dtype, device=device)
    part[: elements.stop - elements.start] = request.target.reshape(-1)[elements]
    gathered = collectives.all_gather(part, group)
    request.target.copy_(gathered[: request.box.numel].view(request.box.size))


def _read_parts(reader: CheckpointReader, requests: Sequence[ReadRequest], mesh: Mesh, group: Group) -> None:
    """Read the rows that this rank alone needs, then those that several ranks need; collective over the mesh."""
    # An error is raised only at the end: a rank that left earlier would leave the others waiting in an exchange.
    problems: list[StoreError] = []
    boxes_by_rank = collectives.all_gather_objects(
        [(request.state, request.name, request.box) for request in requests], group
    )
    segments = list(_segments(reader.manifest.tensors, boxes_by_rank, group.rank))
    # In the order of their bytes: neighbours share a chunk, which the reader keeps.
    segments.sort(key=lambda segment: (segment.piece.file, segment.piece.offset, segment.rows.start))
    for segment in segments:
        if segment.ranks == {group.rank}:
            rows = _read_rows(reader, segment, problems)
            for part in segment.parts:
                requests[part.request].slot(part.box).copy_(rows[segment.slices(part.box)])
    for round_ in _rounds([segment for segment in segments if len(segment.ranks) > 1], group.size):
        _share(reader, round_, requests, group, mesh.device, problems)
    _raise_on_all_ranks(problems, mesh.world)


def _raise_on_all_ranks(problems: Sequence[StoreError], world: Group) -> None:
    """Raise, on every rank, the errors of all ranks. Damage is raised before a store that gave no answer."""
    texts = collectives.union([(str(problem), problem.is_damage) for problem in problems], world)
    damage = [text for text, damages in texts if damages]
    if damage:
        raise DamageError("; ".join(damage[:_SHOWN]))
    if texts:
        raise StoreError("; ".join(text for text, _ in texts[:_SHOWN]))


def _segments(
    tensors: Mapping[str, Mapping[str, TensorEntry]], boxes_by_rank: Sequence[Sequence[tuple[str, str, Box]]], rank: int
) -> Iterator[_Segment]:
    """The runs of rows of stored pieces that a rank reads or gets from others.

    These are the rows that it needs alone, and all that several ranks need, since all must agree on who reads them.
    A stage of 512 ranks has 100,000 pieces that other ranks need alone: no object is made for any of them.
    """
    requested: dict[tuple[str, str], list[_RequestedBox]] = {}
    for requesting_rank, boxes in enumerate(boxes_by_rank):
        for number, (state, name, box) in enumerate(boxes):
            requested.setdefault((state, name), []).append(_RequestedBox(requesting_rank, number, box))
    for (state, name), requests in requested.items():
        entry = tensors[state][name]
        table = entry.table
        starts_and_sizes = np.array([(request.box.start, request.box.size) for request in requests], np.int64)
        # `numbers` and `pieces` are pairs: request `numbers[i]` needs a part of piece `pieces[i]`, for `ranks[i]`.
        numbers, pieces = table.meeting(starts_and_sizes.reshape(len(requests), 2, len(entry.shape)))
        ranks = np.array([request.rank for request in requests])[numbers]
        # Of the ranks that need a piece, the assignment keeps one: any pair of another rank shows that it is shared.
        rank_of_piece = np.full(len(table), -1)
        rank_of_piece[pieces] = ranks
        is_shared = np.zeros(len(table), np.bool_)
        is_shared[pieces[rank_of_piece[pieces] != ranks]] = True
        requests_of_piece: dict[int, list[_RequestedBox]] = {}
        is_needed = is_shared[pieces] | (ranks == rank)
        for number, piece_number in zip(numbers[is_needed].tolist(), pieces[is_needed].tolist(), strict=True):
            requests_of_piece.setdefault(piece_number, []).append(requests[number])
        for piece_number, of_piece in requests_of_piece.items():
            piece = table[piece_number]
            yield from _rows(entry, piece, _overlaps(of_piece, piece.box))


def _overlaps(requests: Iterable[_RequestedBox], box: Box) -> list[_RequestedBox]:
    overlaps = ((request, request.box.intersect(box)) for request in requests)
    return [request._replace(box=overlap) for request, overlap in overlaps if overlap is not None]


def _rows(entry: TensorEntry, piece: PieceEntry, parts: list[_RequestedBox]) -> Iterator[_Segment]:
    """The rows of a piece that a rank needs, and no others, some megabytes at a time."""
    box = piece.box
    # A scalar has no rows.
    if not box.size:
        yield _Segment(entry, piece, box, tuple(parts))
        return
    row_bytes = max(1, box.numel // box.size[0] * TORCH_DTYPES[entry.dtype].itemsize)
    step = max(1, SEGMENT_BYTES // row_bytes)
    # Parts that overlap or touch are one run of rows, which is cut every `step` rows from its first one.
    first = stop = -1
    by_start: dict[int, list[_RequestedBox]] = {}
    for part in sorted(parts, key=lambda part: part.box.start[0]):
        low = part.box.start[0]
        if low > stop:
            first = low
        stop = max(stop, part.box.stop[0])
        for start in range(first + (low - first) // step * step, part.box.stop[0], step):
            by_start.setdefault(start, []).append(part)
    for start, inside in by_start.items():
        end = min(start + step, max(part.box.stop[0] for part in inside))
        rows = Box((start, *box.start[1:]), (end - start, *box.size[1:]))
        yield _Segment(entry, piece, rows, tuple(_overlaps(inside, rows)))


def _read_rows(reader: CheckpointReader, segment: _Segment, problems: list[StoreError]) -> Tensor:
    """A segment's rows; zeros where they cannot be read, since other ranks wait for something.

    A store that failed once is not asked again: each failure may take minutes.
    """
    if not problems or problems[-1].is_damage:
        try:
            return reader.read(segment.entry, segment.piece, segment.rows)
        except StoreError as error:
            problems.append(error)
    return torch.zeros(segment.rows.size, dtype=TORCH_DTYPES[segment.entry.dtype], device="cpu")


def _rounds(shared: Sequence[_Segment], ranks: int) -> Iterable[list[list[_Segment]]]:
    """Rounds of segments by the rank that reads them, some megabytes each. Each rank reads about as many bytes."""
    total = sum(segment.nbytes for segment in shared)
    limit = max(SEGMENT_BYTES, _ROUND_BYTES // ranks)
    rounds: dict[int, list[list[_Segment]]] = {}
    round_of_rank = [0] * ranks
    bytes_in_round = [0] * ranks
    bytes_before = 0
    for segment in shared:
        # The segments are in the order of their bytes: each rank reads a run of neighbours.
        rank = min(bytes_before * ranks // max(total, 1), ranks - 1)
        if bytes_in_round[rank] and bytes_in_round[rank] + segment.nbytes > limit:
            round_of_rank[rank] += 1
            bytes_in_round[rank] = 0
        rounds.setdefault(round_of_rank[rank], [[] for _ in range(ranks)])[rank].append(segment)
        bytes_in_round[rank] += segment.nbytes
        bytes_before += segment.nbytes
    return rounds.values()


def _share(
    reader: CheckpointReader,
    round_: Sequence[Sequence[_Segment]],
    requests: Sequence[ReadRequest],
    group: Group,
    device: torch.device,
    problems: list[StoreError],
) -> None:
    """Read this rank's segments of a round, and send each rank its parts."""
    sent: list[list[Tensor]] = [[] for _ in range(group.size)]
    for segment in round_[group.rank]:
        rows = _read_rows(reader, segment, problems)
        for part in segment.parts:
            sent[part.rank].append(rows[segment.slices(part.box)])
    received: list[list[Tensor]] = []
    slots: list[Tensor] = []
    for segments in round_:
        values: list[Tensor] = []
        for segment in segments:
            # Values travel in the stored dtype, and are cast where they are copied into their slots.
            dtype = TORCH_DTYPES[segment.entry.dtype]
            for part in segment.parts:
                if part.rank == group.rank:
                    values.append(torch.empty(part.box.size, dtype=dtype, device=device))
                    slots.append(requests[part.request].slot(part.box))
        received.append(values)
    collectives.exchange_async(sent, received, group, device).wait()
    # The slots are in the order of all values, whichever rank they come from.
    for slot, value in zip(slots, [value for values in received for value in values], strict=True):
        slot.copy_(value)


# ---- verifying what no rank needs


def verify_unread(reader: CheckpointReader, mesh: Mesh) -> tuple[str, ...]:
    """Verify the chunks of a checkpoint that no rank has read, an equal part on each; collective over the mesh.

    Returns:
        the first damage in each file that each rank found, the same on every rank.

    Raises:
        StoreError: the store did not give the bytes; raised on every rank.
    """
    world = mesh.world
    files = reader.manifest.files
    is_read = reader.verified().to(mesh.device)
    unread = np.flatnonzero(collectives.all_reduce_(is_read, world, op="max").cpu().numpy() == 0)
    # Chunks are numbered over all files. Each rank verifies a run of unread chunks with about equally many bytes.
    first_chunks = np.cumsum([0, *(file.chunks for file in files)])[:-1]
    file_of_chunk = np.searchsorted(first_chunks, unread, side="right") - 1
    last_bytes = np.cumsum(np.array([file.chunk_bytes for file in files])[file_of_chunk]) - 1
    unread_bytes = last_bytes[-1] + 1 if len(unread) else 1
    is_local = last_bytes * world.size // unread_bytes == world.rank
    # Damage is only reported, as training needs none of these bytes.
    damage: list[str] = []
    unanswered: list[StoreError] = []
    empty_files = [number for number, file in enumerate(files) if not file.chunks and world.rank == 0]
    for number in [*empty_files, *np.unique(file_of_chunk[is_local]).tolist()]:
        try:
            reader.verify(number, unread[is_local & (file_of_chunk == number)] - first_chunks[number])
        except StoreError as error:
            if not error.is_damage:
                unanswered.append(error)
                break
            damage.append(str(error))
    _raise_on_all_ranks(unanswered, world)
    return tuple(collectives.union(damage, world))
