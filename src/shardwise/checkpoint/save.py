"""Saving: training waits while its state is copied to host memory; a thread writes it while training continues.

    training thread    collect weights, take slices of optimizer state → conveyor
    writing thread     conveyor → files with checksums → all ranks agree → manifest → the folder's name

Every byte is written once: a canonical weight by its owner (`weights.py`), a slice of optimizer state by the rank that
answers for it (`optim/state.py`). A checkpoint is complete with its manifest or not there.

Host memory between the training thread, which copies tensors into it, and the thread that writes them to a file.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardwise.base.errors import ShardwiseError, listing, see
from shardwise.base.hardware import available_memory
from shardwise.checkpoint.collective_reading import DTYPE_NAMES, TORCH_DTYPES
from shardwise.checkpoint.companion_files import Companions
from shardwise.checkpoint.export_model import model_files
from shardwise.checkpoint.format.manifest import MANIFEST, MODEL, Manifest, too_large
from shardwise.checkpoint.format.verify import untiled
from shardwise.checkpoint.format.writing import (
    MAX_SHARD_BYTES,
    Places,
    PlannedFile,
    PlannedPiece,
    require_room,
    tensor_entries,
    weight_index,
    write_small,
)
from shardwise.checkpoint.storage.chunks import ChunkedWriter, FileEntry
from shardwise.checkpoint.storage.root import Root, StoreError
from shardwise.checkpoint.storage.step_folders import partial_name, prune, put_in_place, remove_checkpoint, step_name
from shardwise.checkpoint.weight_writers import WeightPlan
from shardwise.config import Config
from shardwise.distributed import collectives, devices
from shardwise.distributed.agreement import union
from shardwise.distributed.mesh import Group, Mesh
from shardwise.optim.state import Number, StateSlice, names_by_bucket, state_numbers, state_slices, state_tensors
from shardwise.optim.zero import ZeroRedundancyOptimizer

_ABORTED = "the copy of the state failed"
_Slices: TypeAlias = dict[str, list[tuple[StateSlice, Tensor]]]
"""By state: the slices that this rank writes, each with the flat tensor that it is in."""
_Numbers: TypeAlias = dict[str, dict[str, Number]]
"""By state: the number that the wrapped optimizer keeps for each canonical tensor."""
_SEEN_WITHIN_SECONDS = 30.0
"""For rank 0 to see the files of other machines: a network file system may report for some seconds that a file is
missing which another machine has written."""


@dataclass(frozen=True)
class Saved:
    """How a save ended.

    Attributes:
        step: updates done.
        folder: where the checkpoint is.
        bytes: length of all files, over all ranks.
        blocked: seconds for which training waited.
        seconds: from the call to the complete checkpoint.
        problem: why there is no checkpoint, or None.
        removed: steps of the older checkpoints that were removed, as `Keeping` says.
        warning: why an older checkpoint could not be removed, or None.
        lost_peer: another rank ended during the save; the problem, if there is one, is a consequence.
    """

    step: int
    folder: str
    bytes: int
    blocked: float
    seconds: float
    problem: str | None = None
    removed: tuple[int, ...] = ()
    warning: str | None = None
    lost_peer: bool = False


@dataclass
class _Job:
    """One save, as the writing thread needs it."""

    step: int
    final: Root
    conveyor: Conveyor
    files: tuple[PlannedFile, ...]
    numbers: _Numbers
    manifest: dict[str, Any]
    started: float
    blocked: float = 0.0


@dataclass(frozen=True)
class Keeping:
    """Which checkpoints stay: the last `last` (None: all) and those of every `every`-th step."""

    last: int | None = None
    every: int | None = None


class Saver:
    """Saves the checkpoints of one training; every rank of the mesh has one and makes the same calls.

    Args:
        root: the folder of the checkpoints.
        config: of the run; None in a loop of the user's own, whose checkpoints then have no `config.json`.
        group: all ranks, for the writing threads alone: their collectives must not meet those of the training.
        described: fields of the manifest that are the same for every save (`data`, `versions`, `layout`).
        tokenizer: a folder whose files are copied into each checkpoint.
        companions: what else lies beside the weights.
        buffer_bytes: host memory of this rank for copies; None: as much as a save needs, but at most this rank's share
            of half the memory that is free.
        keeping: which checkpoints stay after each save.
        max_shard_bytes: largest size of a file with weights; a larger tensor has a file to itself.
        find_root: called on rank 0 before a save makes its folder, for a root that may have been renamed.
    """

    def __init__(
        self,
        root: Root,
        model: nn.Module,
        optimizer: ZeroRedundancyOptimizer,
        config: Config | None,
        mesh: Mesh,
        group: Group,
        *,
        described: Mapping[str, Any],
        tokenizer: Path | None = None,
        companions: Companions | None = None,
        buffer_bytes: int | None = None,
        keeping: Keeping | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        find_root: Callable[[], None] | None = None,
    ) -> None:
        self.root, self._find_root = root, find_root
        self._model, self._optimizer, self._config = model, optimizer, config
        self._mesh, self._group = mesh, group
        self._described = described
        self._keeping = keeping or Keeping()
        self._weights = WeightPlan(model, mesh, max_shard_bytes)
        # Read now: the tokenizer may be gone from its cache by the time of a save.
        self._small = self._small_files(tokenizer, companions) if mesh.world.rank == 0 else {}
        self._buffer_bytes = buffer_bytes
        self._conveyor: Conveyor | None = None
        self._thread: threading.Thread | None = None
        self._done: list[Saved] = []
        self._lengths: dict[int, dict[str, int]] = {}
        """On rank 0: of the last checkpoints that were saved, by step, the bytes of each file."""

    def save(self, step: int, progress: Mapping[str, Any]) -> None:
        """Copy the state, which a thread then writes; waits for an earlier save. Collective over the mesh.

        `progress`: fields of the manifest that say how far training is (`samples`, `position`, `tokens`, `schedule`,
        `rng`).
        """
        self.wait()
        started = time.perf_counter()
        self._optimizer.gathers.wait()
        slices = self._slices()
        files = tuple(self._files(slices))
        if self._conveyor is None:
            self._conveyor = Conveyor(self._mesh.device, self._limit(sum(file.size for file in files)))
        conveyor = self._conveyor
        final = self.root / step_name(step)
        job = _Job(step, final, conveyor, files, self._numbers(), self._manifest(step, progress), started)
        self._thread = threading.Thread(target=self._write, args=(job,), name="checkpoint", daemon=True)
        if conveyor.is_limited:  # else nothing is written before training continues: the cores are for the copy
            self._thread.start()
        try:
            self._copy(conveyor, slices, files)
        except BaseException:
            # This rank must not wait for its writing thread: those of the other ranks wait for a copy that never comes.
            conveyor.abort()
            self._thread = None
            raise
        job.blocked = time.perf_counter() - started
        conveyor.end()
        if not conveyor.is_limited:
            self._thread.start()

    def _limit(self, needed: int) -> int | None:
        """Bytes of host memory for copies; None: enough for all, where this machine's ranks leave half of it free."""
        if self._buffer_bytes is not None:
            return self._buffer_bytes
        available = available_memory()
        share = available // (2 * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if available is not None else needed
        return None if needed <= share else share

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finished(self) -> list[Saved]:
        """The saves that ended since the last call."""
        done, self._done = self._done, []
        return done

    # ---- in the training thread

    def _slices(self) -> _Slices:
        mine = [part for part in state_slices(self._model, self._optimizer) if part.piece.copies.rank == 0]
        mine.sort(key=lambda part: (part.piece.name, part.box.start))
        return {
            state: [(part, flats[part.bucket]) for part in mine if part.bucket in flats]
            for state, flats in sorted(state_tensors(self._optimizer).items())
        }

    def _numbers(self) -> _Numbers:
        """The numbers of the state, from one rank of each pipeline stage: its other ranks have the same."""
        numbers: _Numbers = {}
        if self._mesh.dp.rank == self._mesh.tp.rank == 0:
            names = names_by_bucket(self._model, self._optimizer)
            for bucket, values in zip(self._optimizer.buckets, state_numbers(self._optimizer), strict=True):
                for state, value in values.items():
                    numbers.setdefault(state, {}).update(dict.fromkeys(names[bucket], value))
        return numbers

    def _files(self, slices: _Slices) -> Iterator[PlannedFile]:
        """This rank's files, in the order in which their bytes are copied."""
        rank = self._mesh.world.rank
        for file in self._weights.files:
            if file.owner == rank:
                yield PlannedFile.of(file.name, file.weights)
        state_pieces = [
            PlannedPiece(state, part.piece.name, part.piece.shape, DTYPE_NAMES[flat.dtype], part.box)
            for state, of_state in slices.items()
            for part, flat in of_state
        ]
        if state_pieces:
            yield PlannedFile.of(f"optimizer/rank-{rank:05}.safetensors", state_pieces)

    def _copy(self, conveyor: Conveyor, slices: _Slices, files: Sequence[PlannedFile]) -> None:
        heads = {file.pieces[0].name: file.header for file in files if file.pieces[0].state == MODEL}
        for weight, box, segment in self._weights.collect():
            if not any(box.start):
                conveyor.put_bytes(heads.get(weight.name, b""))
            conveyor.put(segment)
        if files and files[-1].pieces[0].state != MODEL:
            conveyor.put_bytes(files[-1].header)
        for of_state in slices.values():
            for part, flat in of_state:
                conveyor.put(part.of(flat))

    def _manifest(self, step: int, progress: Mapping[str, Any]) -> dict[str, Any]:
        config, wrapped = self._config, self._optimizer.optimizer_class.__name__
        name = wrapped.lower() if config is None else config.optimizer.name
        return {
            "step": step,
            "config": {} if config is None else config.recorded(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "optimizer": {"name": name, "class": wrapped, "steps": self._optimizer.steps},
            **self._described,
            **progress,
        }

    # ---- in the writing thread

    def _write(self, job: _Job) -> None:
        try:
            saved = self._saved(job)
        except Exception as error:  # noqa: BLE001  else it would end with this thread, and the checkpoint count as saved
            saved = self._broken_off(job, error)
        self._done.append(saved)

    def _broken_off(self, job: _Job, error: Exception) -> Saved:
        """The result of a save where the ranks could not agree on it."""
        folder, seconds = str(job.final), time.perf_counter() - job.started
        is_lost, committed = collectives.is_lost_connection(error), self._lengths.get(job.step)
        problem: str | None = self._reason(error)
        if is_lost:
            problem = f"rank {self._group.rank} lost the connection to another rank" if committed is None else None
        total = sum(committed.values()) if is_lost and committed is not None else 0
        return Saved(job.step, folder, total, job.blocked, seconds, problem, lost_peer=is_lost)

    def _reason(self, error: Exception) -> str:
        """The text of an error that all ranks report: one that is not for users has its rank and type."""
        if isinstance(error, ShardwiseError):
            return str(error)
        return f"rank {self._group.rank}: {type(error).__name__}: {error}"

    def _saved(self, job: _Job) -> Saved:
        final = job.final
        staging = self._staging(job.step, final)
        problem, total = self._together(lambda: self._prepare(staging, job)), 0
        removed: tuple[int, ...] = ()
        warning: str | None = None
        entries, problem = self._write_files(staging, job, problem)
        problem = self._agreed(problem)
        if problem is None:
            mine = entries, [file.places for file in job.files], job.numbers
            gathered = collectives.gather_objects(mine, self._group)
            total = sum(entry.bytes for of_rank, *_ in gathered or [] for entry in of_rank)
            problem = self._together(lambda: self._commit(staging, final, job, gathered))
        seconds = time.perf_counter() - job.started
        if self._group.rank == 0:
            try:
                if problem is None:
                    removed = tuple(prune(self.root, self._lengths, self._keeping.last, self._keeping.every))
                elif not (staging / MANIFEST).exists():  # else it lacks only its name, which a resume gives it
                    staging.remove()
            except ShardwiseError as error:
                warning = str(error) if problem is None else None  # the next save removes what is left of this one
        return Saved(job.step, str(final), total, job.blocked, seconds, problem, removed, warning)

    def _staging(self, step: int, final: Root) -> Root:
        """Where a save is written. An object store has no rename: there, under its own name if that is not taken."""
        is_final = False
        if self._group.rank == 0 and not self.root.is_local:
            with contextlib.suppress(StoreError):  # a place without an answer fails the save, a moment later
                is_final = not (final / MANIFEST).exists()
        return final if collectives.broadcast_object(is_final, self._group) else self.root / partial_name(step)

    def _together(self, action: Callable[[], None]) -> str | None:
        """Run an action on every rank; why it failed on any, the same text on all, or None."""
        problem = None
        try:
            action()
        except Exception as error:  # the other ranks wait for an answer, whatever happened here
            if collectives.is_lost_connection(error):
                raise  # no answer would reach them
            problem = self._reason(error)
        return self._agreed(problem)

    def _agreed(self, problem: str | None) -> str | None:
        """The problems of all ranks, the same text on each; None where no rank has one."""
        return "; ".join(union([problem] if problem else [], self._group)) or None

    def _prepare(self, staging: Root, job: _Job) -> None:
        (needed,) = collectives.reduce_numbers([sum(file.size for file in job.files)], self._group, op="sum")
        if self._group.rank == 0:
            if self._find_root is not None:
                self._find_root()
            remove_checkpoint(staging)
            staging.make()
            (staging / "optimizer").make()
            advice = "make room, or lower checkpoint.keep"
            require_room(self.root, needed, f"the checkpoint of step {job.step}", advice)

    def _write_files(self, staging: Root, job: _Job, problem: str | None) -> tuple[list[FileEntry], str | None]:
        """Write this rank's files, unless there is a problem already; returns them, or why they could not be written.

        The conveyor is emptied in any case: the training thread may wait for room in it.
        """
        blocks, entries = job.conveyor.blocks(), []
        try:
            if problem is None:
                entries = list(_written(staging, job.files, blocks))
        except Aborted:
            problem = _ABORTED
        except Exception as error:  # noqa: BLE001  all ranks get to know it
            problem = self._reason(error)
        try:
            for _ in blocks:
                pass
        except Aborted:
            problem = problem or _ABORTED
        return entries, problem

    def _commit(
        self,
        staging: Root,
        final: Root,
        job: _Job,
        gathered: list[tuple[list[FileEntry], list[tuple[str, Places]], _Numbers]] | None,
    ) -> None:
        """On rank 0: the small files, the manifest, and the folder's name."""
        if gathered is None:
            return
        entries = [entry for of_rank, *_ in gathered for entry in of_rank]
        _require_all(staging, entries)
        tensors = tensor_entries(entries, [file for _, files, _ in gathered for file in files])
        entries += [write_small(staging, name, data) for name, data in self._small.items()]
        # Of all ranks: this one may have nothing to train, and so no state.
        job.manifest["optimizer"]["states"] = sorted(tensors.keys() - {MODEL})
        job.manifest["optimizer"]["numbers"] = _joined([numbers for *_, numbers in gathered])
        text = Manifest(**job.manifest, files=tuple(entries), tensors=tensors).to_json()
        problems = untiled(tensors)
        if problem := too_large(text):
            problems.append(f"of its manifest {problem}")
        if problems:
            raise StoreError(f"{staging} could not be read again: {problems[0]}")
        (staging / MANIFEST).write(text.encode())
        if staging is not final:
            for folder in (staging / "optimizer", staging):
                folder.sync()
            put_in_place(staging, final)
            self.root.sync()
        self._lengths[job.step] = {entry.path: entry.bytes for entry in entries}
        for step in sorted(self._lengths)[: -(self._keeping.last or 1)]:
            del self._lengths[step]

    def _small_files(self, tokenizer: Path | None, companions: Companions | None) -> dict[str, bytes]:
        """What `transformers` reads beside the weights."""
        files = self._weights.files
        dtype = TORCH_DTYPES[files[0].weights[0].dtype]
        index = weight_index({file.name: file.weights for file in files})
        if self._config is None:
            return index
        return {**model_files(self._config.model, dtype, tokenizer, companions), **index}


def _joined(of_ranks: Sequence[_Numbers]) -> dict[str, Number | dict[str, Number]]:
    """The numbers of all ranks by state: by canonical tensor, or one where all tensors have the same."""
    joined: _Numbers = {}
    for numbers in of_ranks:
        for state, of_tensors in numbers.items():
            joined.setdefault(state, {}).update(of_tensors)
    return {
        state: next(iter(of_tensors.values())) if len(set(of_tensors.values())) == 1 else of_tensors
        for state, of_tensors in joined.items()
    }


def _require_all(staging: Root, entries: Sequence[FileEntry]) -> None:
    """Raise StoreError where a file is missing here, because another rank wrote it to a disk of its own."""
    missing, deadline = [entry.path for entry in entries], time.monotonic() + _SEEN_WITHIN_SECONDS
    while missing and time.monotonic() < deadline:  # a network file system shows other machines' files after a while
        there = staging.files()
        missing = [entry.path for entry in entries if there.get(entry.path) != entry.bytes]
        time.sleep(1.0 if missing else 0.0)
    if missing:
        raise StoreError(
            f"{staging} lacks {listing(missing[:3])} here, which another rank wrote: all ranks must write to one "
            "place, which all machines share, or to a URL: set checkpoint.path or --run-dir"
            f"{see('checkpoints#disk-not-shared')}"
        )


def _written(folder: Root, files: Sequence[PlannedFile], blocks: Iterator[memoryview]) -> Iterator[FileEntry]:
    """Cut a stream of bytes into files."""
    block = memoryview(b"")
    for file in files:
        with ChunkedWriter(folder / file.path, file.size, file.path) as writer:
            left = file.size
            while left:
                block = block or next(blocks)
                taken, block = block[:left], block[left:]
                writer.write(taken)
                left -= len(taken)
            yield writer.close()


BLOCK_BYTES = 16 * 2**20
PINNED_BYTES = 4 * 2**30
"""Pinned memory of a rank at most: it is lost to all other programs of the machine for as long as the run lasts."""


class Aborted(Exception):
    """The thread that copies failed, so the bytes that arrived are incomplete."""


class Conveyor:
    """A stream of bytes through a pool of memory blocks, which every save uses again.

    Attributes:
        is_limited: whether `put` may have to wait until a block was written.

    Args:
        device: where the tensors are; the first `PINNED_BYTES` that come from an accelerator go to pinned memory, which
            is faster.
        limit: bytes of the pool, None for as much as a save needs. `put` waits while the pool is full.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device, self.is_limited = device, limit is not None
        self._block_bytes = BLOCK_BYTES if limit is None else max(2**12, min(BLOCK_BYTES, limit // 2 // 8 * 8))
        self._room = None if limit is None else max(2, limit // self._block_bytes)
        self._pinned_room = 0 if device.type == "cpu" else PINNED_BYTES // self._block_bytes
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[Tensor, int] | Aborted | None] = queue.SimpleQueue()
        self._block: Tensor | None = None
        self._filled = 0

    def put(self, tensor: Tensor) -> None:
        """Append a tensor's elements in their order."""
        if not tensor.numel():
            return
        flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor
        done = 0
        while done < len(flat):
            row_bytes = flat[0].numel() * flat.element_size()
            if row_bytes > self._block_bytes:
                self.put(flat[done])
                done += 1
                continue
            block = self._block if self._block is not None else self._take()
            rows = min(len(flat) - done, (self._block_bytes - self._filled) // row_bytes)
            if rows and self._filled % flat.element_size() == 0:
                size = rows * row_bytes
                room = block[self._filled : self._filled + size].view(flat.dtype).view(rows, *flat.shape[1:])
                room.copy_(flat[done : done + rows], non_blocking=True)
                self._filled += size
                done += rows
            else:
                self._pass_on()

    def put_bytes(self, data: bytes) -> None:
        if data:
            self.put(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def end(self) -> None:
        """All bytes of the save have been put."""
        self._pass_on()
        self._full.put(None)

    def abort(self) -> None:
        """The remaining bytes of the save will not come."""
        self._filled = 0
        self._pass_on()
        self._full.put(Aborted())

    def blocks(self) -> Iterator[memoryview]:
        """The bytes of one save, block by block; each is valid until the next is asked for.

        Raises:
            Aborted: the other thread gave up.
        """
        while True:
            item = self._full.get()
            if item is None:
                return
            if isinstance(item, Aborted):
                raise item
            block, filled = item
            try:
                yield memoryview(block.numpy().data)[:filled]
            finally:
                self._free.put(block)

    def _take(self) -> Tensor:
        if self._room != 0 and self._free.empty():
            if self._room is not None:
                self._room -= 1
            pinned = self._pinned_room > 0
            self._pinned_room -= pinned
            self._block = torch.empty(self._block_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        else:
            self._block = self._free.get()
        self._filled = 0
        return self._block

    def _pass_on(self) -> None:
        if self._block is None:
            return
        devices.synchronize(self._device)
        if self._filled:
            self._full.put((self._block, self._filled))
        else:
            self._free.put(self._block)
        self._block, self._filled = None, 0
