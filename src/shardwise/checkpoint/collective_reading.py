"""Reading boxes of stored tensors into a model of any layout, each byte by one rank.

The ranks of a group exchange the boxes that they want. A rank reads the rows that it alone wants. Rows that several
ranks want (copies of a tensor, or some columns each) are read by one of them and sent to the others: a checksum covers
a whole chunk, so to read a part of a row takes as long as to read all of it.

The dtypes that a model can be trained from: names of safetensors, and torch's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.base.tensor_box import Box
from shardwise.checkpoint.format.manifest import Manifest, PieceEntry, TensorEntry
from shardwise.checkpoint.format.stored_tensors import StoredTensors
from shardwise.checkpoint.format.verify import consecutive
from shardwise.checkpoint.storage.chunks import READ_BYTES, require_size
from shardwise.checkpoint.storage.root import DamageError, Root, StoreError
from shardwise.checkpoint.storage.step_folders import is_damage
from shardwise.distributed import collectives
from shardwise.distributed.agreement import union
from shardwise.distributed.mesh import Group, Mesh
from shardwise.distributed.placement import Piece

SEGMENT_BYTES = 4 * 2**20
"""Of a stored tensor that are read at a time."""
_ROUND_BYTES = 64 * 2**20
_SHOWN = 3


@dataclass(frozen=True)
class Want:
    """A box of a stored tensor that this rank needs.

    Attributes:
        state: of the tensor, such as `model`.
        name: canonical name of the tensor.
        box: the part that is needed.
        target: where it belongs: a view of shape `box.size`.
        copies: groups whose ranks all need the same box, such as data parallelism and both ends of a pipeline with a
            tied weight. Each rank reads an equal part, and an all-gather completes them.
    """

    state: str
    name: str
    box: Box
    target: Tensor
    copies: tuple[Group, ...] = ()

    def part(self, box: Box) -> Want:
        """The want of a part: `box` is counted from the start of this want's box."""
        start = tuple(a + b for a, b in zip(self.box.start, box.start, strict=True))
        return Want(self.state, self.name, Box(start, box.size), self.target[box.slices])

    def slot(self, part: Box) -> Tensor:
        """Where a part of its box belongs."""
        return self.target[part.relative_to(self.box).slices]


_Wanted: TypeAlias = tuple[int, int, Box]
"""(rank in the group, index of its want, the part of that want's box)."""


@dataclass(frozen=True)
class _Segment:
    """Rows of a stored piece of which some rank wants a part."""

    entry: TensorEntry
    piece: PieceEntry
    box: Box
    wanted: tuple[_Wanted, ...]

    @property
    def nbytes(self) -> int:
        return self.box.numel * TORCH_DTYPES[self.entry.dtype].itemsize

    @property
    def ranks(self) -> set[int]:
        return {rank for rank, _, _ in self.wanted}

    def slices(self, part: Box) -> tuple[slice, ...]:
        """Where a part lies in the rows."""
        return part.relative_to(self.box).slices


class CheckpointReader:
    """Reads the tensors of one checkpoint and verifies the checksum of each chunk."""

    def __init__(self, folder: Root, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._tensors = StoredTensors(folder, manifest.tensors, manifest)

    @property
    def bytes_read(self) -> int:
        """By this rank so far, in whole chunks."""
        return sum(reader.bytes_read for reader in self._tensors.readers.values())

    def read(self, entry: TensorEntry, piece: PieceEntry, box: Box) -> Tensor:
        """Whole rows of a piece; StoreError where the file cannot be read, or is damaged there."""
        rows = self._tensors.read_part(piece, entry.dtype, box.relative_to(piece.box))
        return torch.from_numpy(rows.copy()).view(TORCH_DTYPES[entry.dtype])

    def verified(self) -> npt.NDArray[np.uint8]:
        """For each chunk of all files, in the manifest's order: 1 where it was read and is intact."""
        readers = self._tensors.readers
        files = enumerate(self.manifest.files)
        flags = [readers[i].verified if i in readers else bytearray(file.chunks) for i, file in files]
        return np.frombuffer(b"".join(flags), np.uint8).copy()

    def verify(self, file: int, chunks: npt.NDArray[np.int64]) -> None:
        """Read chunks of a file, in order and some megabytes at a time; StoreError where one is damaged or not read."""
        entry = self.manifest.files[file]
        require_size(self.folder / entry.path, entry)
        at_once = max(1, READ_BYTES // entry.chunk_bytes)
        for first, last in consecutive(chunks.tolist()):
            for chunk in range(first, last + 1, at_once):
                stop = min(chunk + at_once, last + 1) * entry.chunk_bytes
                self._tensors.reader(file).read(chunk * entry.chunk_bytes, min(stop, entry.bytes))


@torch.no_grad()
def read(reader: CheckpointReader, wants: Iterable[Want], mesh: Mesh, group: Group | None = None) -> None:
    """Fill the targets of every rank, each group's (default: tensor parallelism's) from its own reads.

    Collective over the mesh; ranks that have copies of a want have these wants in the same order.

    Raises:
        DamageError: on every rank, bytes do not match their checksums or are missing. StoreError: on every rank, the
        store did not give them, and they may well be there. The targets are then not to be used.
    """
    shared: list[tuple[Want, Group]] = []
    parts: list[Want] = []
    for want in wants:
        pending = [want]
        for ranks in want.copies:
            if ranks.size > 1:
                shared += [(whole, ranks) for whole in pending]
                pending = [part for whole in pending for part in _parts(whole, ranks)]
        parts += pending
    _read_parts(reader, parts, mesh, group or mesh.tp)
    for want, ranks in reversed(shared):  # a part of a part is complete before the whole is
        _gather_parts(want, ranks)


def _read_parts(reader: CheckpointReader, wants: Sequence[Want], mesh: Mesh, group: Group) -> None:
    problems: list[StoreError] = []
    everyone = collectives.all_gather_objects([(want.state, want.name, want.box) for want in wants], group)
    segments = list(_segments(reader.manifest.tensors, everyone, group.rank))
    segments.sort(key=lambda segment: (segment.piece.file, segment.piece.offset, segment.box.start))
    for segment in segments:
        if segment.ranks == {group.rank}:
            rows = _read_rows(reader, segment, problems)
            for _, number, part in segment.wanted:
                wants[number].slot(part).copy_(rows[segment.slices(part)])
    for round_ in _rounds([segment for segment in segments if len(segment.ranks) > 1], group.size):
        _share(reader, round_, wants, group, mesh.device, problems)
    _raise_alike(problems, mesh.world)


def _raise_alike(problems: Sequence[StoreError], world: Group) -> None:
    """Every rank raises what any rank met, or none does. Damage is raised before a store that gave no answer."""
    everyones = union([(str(problem), is_damage(problem)) for problem in problems], world)
    for is_lost, kind in ((True, DamageError), (False, StoreError)):
        if texts := [text for text, lost in everyones if lost == is_lost]:
            raise kind("; ".join(texts[:_SHOWN]))


def verify_rest(reader: CheckpointReader, mesh: Mesh) -> tuple[str, ...]:
    """Verify the chunks of a checkpoint that no rank has read, an equal part on each; collective over the mesh.

    Returns the damage, the same on every rank: for each file and rank the first that was found.

    Raises:
        StoreError: on every rank, the store did not give it.
    """
    world, files = mesh.world, reader.manifest.files
    seen = collectives.all_reduce_(torch.from_numpy(reader.verified()).to(mesh.device), world, op="max").cpu().numpy()
    # Chunks are numbered over all files: of each unread one, its file, and how many unread bytes are before its last.
    unread = np.flatnonzero(seen == 0)
    starts = np.cumsum([0, *(file.chunks for file in files)])[:-1]
    of_file = np.searchsorted(starts, unread, side="right") - 1
    before = np.cumsum(np.array([file.chunk_bytes for file in files])[of_file]) - 1
    mine = before * world.size // (before[-1] + 1) == world.rank if len(unread) else unread == 0
    empty = [number for number, file in enumerate(files) if not file.chunks and world.rank == 0]
    damage: list[str] = []
    unanswered: list[StoreError] = []
    for number in [*empty, *np.unique(of_file[mine]).tolist()]:
        try:
            reader.verify(number, unread[mine & (of_file == number)] - starts[number])
        except StoreError as error:
            if not is_damage(error):
                unanswered.append(error)
                break
            damage.append(str(error))
    _raise_alike(unanswered, world)
    return tuple(union(damage, world))


def other_ends(piece: Piece, mesh: Mesh) -> Group:
    """The pipeline ranks with the same piece: of a tied weight both ends, else this rank alone."""
    along = piece.copies.size > 1 and set(piece.copies.ranks) <= set(mesh.pp.ranks)
    return piece.copies if along else Group()


def _part_of(want: Want, group: Group) -> slice:
    """A rank's part of a want's elements, in their canonical order."""
    numel = want.box.numel
    part = -(-numel // group.size)
    return slice(min(group.rank * part, numel), min((group.rank + 1) * part, numel))


def _parts(want: Want, group: Group) -> Iterator[Want]:
    """This rank's equal part of a want that all ranks of the group have."""
    run = _part_of(want, group)
    for box in Box.of_run(run.start, run.stop - run.start, want.box.size):
        yield want.part(box)


def _gather_parts(want: Want, group: Group) -> None:
    """Bring to all ranks what each has read of its `_parts`; collective over the group."""
    run = _part_of(want, group)
    mine = want.target.new_zeros(-(-want.box.numel // group.size))
    mine[: run.stop - run.start] = want.target.reshape(-1)[run]
    want.target.copy_(collectives.all_gather(mine, group)[: want.box.numel].view(want.box.size))


def _segments(
    tensors: Mapping[str, Mapping[str, TensorEntry]], everyone: Sequence[Sequence[tuple[str, str, Box]]], rank: int
) -> Iterator[_Segment]:
    """The runs of rows of stored pieces that a rank reads or gets from others.

    These are the rows that it wants alone, and all that several ranks want, since all must agree on who reads them.
    A stage of 512 ranks has 100,000 pieces that other ranks want alone: no object is made for any of them.

    Args:
        everyone: the wants by rank.
    """
    wanted: dict[tuple[str, str], list[_Wanted]] = {}
    for other, boxes in enumerate(everyone):
        for number, (state, name, box) in enumerate(boxes):
            wanted.setdefault((state, name), []).append((other, number, box))
    for (state, name), wants in wanted.items():
        entry = tensors[state][name]
        table = entry.table
        boxes_of = np.array([(box.start, box.size) for *_, box in wants], np.int64)
        numbers, pieces = table.meeting(boxes_of.reshape(len(wants), 2, len(entry.shape)))
        ranks = np.array([other for other, *_ in wants])[numbers]
        is_common = np.zeros(len(table), np.bool_)
        wanted_by = np.full(len(table), -1)
        wanted_by[pieces] = ranks  # one of them
        is_common[pieces[wanted_by[pieces] != ranks]] = True
        common: dict[int, list[_Wanted]] = {}
        needed = is_common[pieces] | (ranks == rank)
        for want, at in zip(numbers[needed].tolist(), pieces[needed].tolist(), strict=True):
            common.setdefault(at, []).append(wants[want])
        for at, by in common.items():
            piece = table[at]
            parts = [(other, number, part) for other, number, box in by if (part := box.intersect(piece.box))]
            yield from _rows(entry, piece, parts)


def _rows(entry: TensorEntry, piece: PieceEntry, wanted: list[_Wanted]) -> Iterator[_Segment]:
    """The rows of a piece that a rank wants, and no others, some megabytes at a time."""
    box = piece.box
    if not box.size:
        yield _Segment(entry, piece, box, tuple(wanted))
        return
    row_bytes = max(1, box.numel // box.size[0] * TORCH_DTYPES[entry.dtype].itemsize)
    step = max(1, SEGMENT_BYTES // row_bytes)
    first = stop = -1
    by_start: dict[int, list[_Wanted]] = {}
    for rank, number, part in sorted(wanted, key=lambda entry: entry[2].start[0]):
        if part.start[0] > stop:
            first = part.start[0]
        stop = max(stop, part.stop[0])
        for start in range(first + (part.start[0] - first) // step * step, part.stop[0], step):
            by_start.setdefault(start, []).append((rank, number, part))
    for start, inside in by_start.items():
        end = min(start + step, max(part.stop[0] for _, _, part in inside))
        rows = Box((start, *box.start[1:]), (end - start, *box.size[1:]))
        parts = [(rank, number, common) for rank, number, part in inside if (common := part.intersect(rows))]
        yield _Segment(entry, piece, rows, tuple(parts))


def _read_rows(reader: CheckpointReader, segment: _Segment, problems: list[StoreError]) -> Tensor:
    """A segment's rows; zeros where they cannot be read, since other ranks wait for something.

    A store that failed once is not asked again: each failure may take minutes.
    """
    if not problems or is_damage(problems[-1]):
        try:
            return reader.read(segment.entry, segment.piece, segment.box)
        except StoreError as error:
            problems.append(error)
    return torch.zeros(segment.box.size, dtype=TORCH_DTYPES[segment.entry.dtype], device="cpu")


def _rounds(shared: Sequence[_Segment], ranks: int) -> Iterable[list[list[_Segment]]]:
    """Rounds of segments by the rank that reads them, some megabytes each. Each rank reads about as many bytes."""
    total, before = sum(segment.nbytes for segment in shared), 0
    limit = max(SEGMENT_BYTES, _ROUND_BYTES // ranks)
    rounds: dict[int, list[list[_Segment]]] = {}
    last, held = [0] * ranks, [0] * ranks  # of each rank: its last round so far, and the bytes that it reads in it
    for segment in shared:
        rank = min(before * ranks // max(total, 1), ranks - 1)
        if held[rank] and held[rank] + segment.nbytes > limit:
            last[rank], held[rank] = last[rank] + 1, 0
        rounds.setdefault(last[rank], [[] for _ in range(ranks)])[rank].append(segment)
        held[rank] += segment.nbytes
        before += segment.nbytes
    return rounds.values()


def _share(
    reader: CheckpointReader,
    round_: Sequence[Sequence[_Segment]],
    wants: Sequence[Want],
    group: Group,
    device: torch.device,
    problems: list[StoreError],
) -> None:
    """Read this rank's segments of a round, and send each rank its parts."""
    sent: list[list[Tensor]] = [[] for _ in range(group.size)]
    for segment in round_[group.rank]:
        rows = _read_rows(reader, segment, problems)
        for rank, _, part in segment.wanted:
            sent[rank].append(rows[segment.slices(part)])
    received: list[list[Tensor]] = []
    slots: list[Tensor] = []
    for segments in round_:
        mine = [(seg, number, part) for seg in segments for rank, number, part in seg.wanted if rank == group.rank]
        # Values travel in the stored dtype, and are cast where they belong.
        received.append([torch.empty(p.size, dtype=TORCH_DTYPES[seg.entry.dtype], device=device) for seg, _, p in mine])
        slots += [wants[number].slot(part) for _, number, part in mine]
    collectives.exchange(sent, received, group, device)
    for slot, values in zip(slots, itertools.chain.from_iterable(received), strict=True):
        slot.copy_(values)


TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
