"""Saving: the state is copied to host memory; a thread writes it while training continues.

On a CPU training waits for the copies. An accelerator makes them behind the next step, whose update waits for them.

    training thread    collect weights, take slices of optimizer state → host buffer
    writing thread     host buffer → files with checksums → all ranks agree → manifest → the folder's name

Every byte is written once: a canonical weight by its owner (`weight_writers.py`), a slice of optimizer state by the
rank that answers for it (`optim/state.py`). A checkpoint is complete with its manifest or not there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

from shardwise.base.errors import ShardwiseError, StoreError, listing, see
from shardwise.base.hardware import available_memory
from shardwise.checkpoint.companions import Companions, model_files
from shardwise.checkpoint.format import writing
from shardwise.checkpoint.format.manifest import MANIFEST, MODEL, Manifest, manifest_size_problem, untiled_tensors
from shardwise.checkpoint.format.model_card import MODEL_CARD, model_card
from shardwise.checkpoint.host_buffer import CopyAborted, HostBuffer
from shardwise.checkpoint.storage import checkpoint_folders
from shardwise.checkpoint.storage.chunks import ChunkedWriter, FileEntry
from shardwise.checkpoint.storage.root import Root
from shardwise.checkpoint.weight_writers import DTYPE_NAMES, TORCH_DTYPES, WeightPlan
from shardwise.config import Config
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Group, Mesh
from shardwise.optim.state import (
    OPTION,
    Number,
    StateSlice,
    names_by_bucket,
    state_numbers,
    state_slices,
    state_tensors,
)
from shardwise.optim.zero import ZeroRedundancyOptimizer

_ABORTED = "the copy of the state failed"
_StateSlices: TypeAlias = dict[str, list[tuple[StateSlice, Tensor]]]
"""State → the slices that this rank writes, each with the flat tensor that holds it."""
_StateNumbers: TypeAlias = dict[str, dict[str, Number]]
"""State → canonical tensor → the number that the wrapped optimizer keeps for it."""
_SEEN_WITHIN_SECONDS = 30.0
"""Time for rank 0 to see the files of other machines: a network file system may report for some seconds that a file is
missing which another machine has written."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """The end of the save of a checkpoint."""

    step: int  # updates done
    folder: str
    bytes: int  # length of all files, over all ranks
    blocked: float  # seconds for which training waited
    seconds: float  # time from the call to the complete checkpoint
    problem: str | None = None  # why there is no checkpoint, or None
    removed: tuple[int, ...] = ()  # steps of the older checkpoints that were removed, as `KeptCheckpoints` says
    warning: str | None = None  # why an older checkpoint could not be removed, or None
    lost_peer: bool = False  # another rank ended during the save; the problem, if there is one, is a consequence


@dataclass
class _PendingSave:
    """A save under way, as the writing thread needs it."""

    step: int
    final: Root
    buffer: HostBuffer  # source of the bytes of `files`, in their order
    files: tuple[writing.PlannedFile, ...]
    numbers: _StateNumbers
    manifest: dict[str, Any]  # fields of the manifest that are known before the files are written
    started: float  # time of the call, as `time.perf_counter` has it
    blocked: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self.started

    def result(self, total_bytes: int, problem: str | None, *, lost_peer: bool = False) -> SavedCheckpoint:
        """The end of this save, which is now."""
        folder = str(self.final)
        return SavedCheckpoint(self.step, folder, total_bytes, self.blocked, self.seconds, problem, lost_peer=lost_peer)


@dataclass(frozen=True)
class _WrittenFiles:
    entries: list[FileEntry]
    rows: list[tuple[str, writing.PieceRows]]
    numbers: _StateNumbers


@dataclass(frozen=True)
class KeptCheckpoints:
    """The checkpoints that stay: the last `last` (None: all) and those of every `every`-th step."""

    last: int | None = None
    every: int | None = None


class Saver:
    """Saves the checkpoints of one training; every rank of the mesh has one and makes the same calls.

    Args:
        config: the run's configuration; None in a loop of the user's own, whose checkpoints then have no `config.json`.
        group: all ranks, for the writing threads alone: their collectives must not meet those of the training.
        described: fields of the manifest that are the same for every save (`data`, `versions`, `layout`).
        tokenizer: a folder whose files are copied into each checkpoint.
        companions: other files and token ids beside the weights.
        base_model: hub id of the weights that the training started from, for the model card; None: there is none.
        buffer_bytes: host memory of this rank for copies; None: as much as a save needs, but at most this rank's share
            of half the memory that is free.
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
        base_model: str | None = None,
        buffer_bytes: int | None = None,
        keeping: KeptCheckpoints | None = None,
        max_shard_bytes: int = writing.MAX_SHARD_BYTES,
        find_root: Callable[[], None] | None = None,
    ) -> None:
        self.root = root
        self._find_root = find_root
        self._model = model
        self._optimizer = optimizer
        self._config = config
        self._mesh = mesh
        self._group = group
        self._described = described
        self._base_model = base_model
        self._keeping = keeping or KeptCheckpoints()
        self._weights = WeightPlan(model, mesh, max_shard_bytes, optimizer)
        # Read now: the tokenizer may be gone from its cache by the time of a save.
        self._small_files = self._read_small_files(tokenizer, companions) if mesh.world.rank == 0 else {}
        self._buffer_bytes = buffer_bytes
        self._buffer: HostBuffer | None = None
        self._thread: threading.Thread | None = None
        self._done: list[SavedCheckpoint] = []
        self._lengths: dict[int, dict[str, int]] = {}
        """Step → file → bytes, of the last checkpoints that were saved; on rank 0 alone."""

    def save(self, step: int, progress: Mapping[str, Any]) -> None:
        """Copy the state, which a thread then writes; waits for an earlier save. Collective over the mesh.

        `progress`: fields of the manifest that say how far training is (`samples`, `position`, `tokens`, `schedule`,
        `rng`).
        """
        # An earlier save still uses the buffer.
        self.wait()
        started = time.perf_counter()
        # The weights of the last step may still be on their way from the ranks that updated them.
        self._optimizer.gathers.wait()
        slices = self._state_slices()
        files = tuple(self._planned_files(slices))
        # The first save makes the buffer, and later ones use it again: pinned memory is slow to allocate.
        if self._buffer is None:
            limit = self._buffer_limit(sum(file.size for file in files))
            self._buffer = HostBuffer(self._mesh.device, limit)
        buffer = self._buffer
        final = self.root / checkpoint_folders.step_name(step)
        pending = _PendingSave(
            step, final, buffer, files, self._state_numbers(), self._manifest(step, progress), started
        )
        self._thread = threading.Thread(target=self._write, args=(pending,), name="checkpoint", daemon=True)
        # With room for all, nothing is written before training continues: until then the cores are for the copy.
        if buffer.is_limited:
            self._thread.start()
        try:
            self._copy(buffer, slices, files)
        except BaseException:
            # This rank must not wait for its writing thread: those of the other ranks wait for a copy that never comes.
            buffer.abort()
            self._thread = None
            raise
        buffer.end()
        end_of_copies = buffer.end_of_copies()
        if end_of_copies is not None:
            self._optimizer.overwrite_after(end_of_copies)
        pending.blocked = pending.seconds
        if not buffer.is_limited:
            self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finished(self) -> list[SavedCheckpoint]:
        """Return the saves that ended since the last call."""
        done = self._done
        self._done = []
        return done

    # ---- in the training thread

    def _buffer_limit(self, needed: int) -> int | None:
        """Bytes of host memory for copies; None: enough for all, where this machine's ranks leave half of it free."""
        if self._buffer_bytes is not None:
            return self._buffer_bytes
        available = available_memory()
        if available is None:
            return None
        share = available // (2 * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return None if needed <= share else share

    def _state_slices(self) -> _StateSlices:
        """The slices of optimizer state that this rank writes. Ranks with copies of a piece leave it to the first."""
        slices = [part for part in state_slices(self._model, self._optimizer) if part.piece.copies.rank == 0]
        slices.sort(key=lambda part: (part.piece.name, part.box.start))
        return {
            state: [(part, flats[part.bucket]) for part in slices if part.bucket in flats]
            for state, flats in sorted(state_tensors(self._optimizer).items())
        }

    def _state_numbers(self) -> _StateNumbers:
        """The numbers of the state, from one rank of those that have the same tensors."""
        numbers: _StateNumbers = {}
        mesh = self._mesh
        if mesh.tp.rank == 0 and mesh.replicas.rank < mesh.dividing_tensors[0].size:
            names = names_by_bucket(self._model, self._optimizer)
            for bucket, values in zip(self._optimizer.buckets, state_numbers(self._optimizer), strict=True):
                for state, value in values.items():
                    numbers.setdefault(state, {}).update(dict.fromkeys(names[bucket], value))
        return numbers

    def _planned_files(self, slices: _StateSlices) -> Iterator[writing.PlannedFile]:
        """This rank's files, in the order in which their bytes are copied."""
        rank = self._mesh.world.rank
        for file in self._weights.files:
            if file.owner == rank:
                yield writing.PlannedFile.of(file.name, file.weights)
        state_pieces = [
            writing.PlannedPiece(state, part.piece.name, part.piece.shape, DTYPE_NAMES[flat.dtype], part.box)
            for state, parts in slices.items()
            for part, flat in parts
        ]
        if state_pieces:
            yield writing.PlannedFile.of(writing.state_file(rank), state_pieces)

    def _copy(self, buffer: HostBuffer, slices: _StateSlices, files: Sequence[writing.PlannedFile]) -> None:
        """Copy the bytes of `files`, in their order. Collective over the tensor-parallel group."""
        headers = {file.pieces[0].name: file.header for file in files if file.pieces[0].state == MODEL}
        for weight, box, values in self._weights.collect():
            # The first segment of a weight may be the first of a file, and comes behind the file's header.
            if not any(box.start):
                buffer.put_bytes(headers.get(weight.name, b""))
            buffer.put(values)
            if self._weights.collects and (copied := buffer.end_of_copies()) is not None:
                copied.synchronize()
        if files and files[-1].pieces[0].state != MODEL:
            buffer.put_bytes(files[-1].header)
        for parts in slices.values():
            for part, flat in parts:
                buffer.put(part.of(flat))

    def _manifest(self, step: int, progress: Mapping[str, Any]) -> dict[str, Any]:
        config = self._config
        wrapped_class = self._optimizer.optimizer_class.__name__
        name = wrapped_class.lower() if config is None else config.optimizer.name
        return {
            "step": step,
            "config": {} if config is None else config.recorded(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "optimizer": {"name": name, "class": wrapped_class, "steps": self._optimizer.steps},
            **self._described,
            **progress,
        }

    def _read_small_files(self, tokenizer: Path | None, companions: Companions | None) -> dict[str, bytes]:
        files = self._weights.files
        index = writing.weight_index({file.name: file.weights for file in files})
        if self._config is None:
            return index
        dtype = TORCH_DTYPES[files[0].weights[0].dtype]
        return {**model_files(self._config.model, dtype, tokenizer, companions), **index}

    # ---- in the writing thread

    def _write(self, pending: _PendingSave) -> None:
        try:
            saved = self._saved(pending)
        except Exception as error:  # noqa: BLE001  else it would end with this thread, and the checkpoint count as saved
            # The ranks could not agree on it.
            lost_peer = devices.is_lost_connection(error)
            # A checkpoint may have its name already: only the answer that it has did not arrive.
            committed = self._lengths.get(pending.step) if lost_peer else None
            problem = (
                f"rank {self._group.rank} lost the connection to another rank" if lost_peer else self._reason(error)
            )
            total_bytes = sum((committed or {}).values())
            saved = pending.result(total_bytes, problem if committed is None else None, lost_peer=lost_peer)
        self._done.append(saved)

    def _saved(self, pending: _PendingSave) -> SavedCheckpoint:
        """Write the checkpoint. Every step that can fail on one rank ends with an agreement of all."""
        staging = self._staging(pending.step, pending.final)
        problem = self._together(lambda: self._prepare(staging, pending))
        entries, problem = self._write_files(staging, pending, problem)
        problem = self._agreed(problem)
        total_bytes = 0
        if problem is None:
            written = _WrittenFiles(entries, [file.piece_rows for file in pending.files], pending.numbers)
            gathered = collectives.gather_objects(written, self._group)
            if gathered is not None:
                total_bytes = sum(entry.bytes for files in gathered for entry in files.entries)
            problem = self._together(lambda: self._commit(staging, pending, gathered))
        saved = pending.result(total_bytes, problem)
        if self._group.rank != 0:
            return saved
        # Old checkpoints go only now that the new one is complete.
        try:
            if problem is None:
                removed = checkpoint_folders.prune_checkpoints(
                    self.root, self._lengths, self._keeping.last, self._keeping.every
                )
                return replace(saved, removed=tuple(removed))
            # A save with a manifest lacks only its name, which a resume gives it.
            if not (staging / MANIFEST).exists():
                staging.remove()
        except ShardwiseError as error:
            # After a failed save, the next one removes what is left of it.
            return replace(saved, warning=str(error) if problem is None else None)
        return saved

    def _reason(self, error: Exception) -> str:
        """The text of an error that all ranks report: one that is not for users has its rank and type."""
        if isinstance(error, ShardwiseError):
            return str(error)
        return f"rank {self._group.rank}: {type(error).__name__}: {error}"

    def _staging(self, step: int, final: Root) -> Root:
        """The folder in which a save is written: in an object store, which has no rename, its own if that is free."""
        is_final = False
        if self._group.rank == 0 and not self.root.is_local:
            # A place without an answer fails the save a moment later, on all ranks together.
            with contextlib.suppress(StoreError):
                is_final = not (final / MANIFEST).exists()
        is_final = collectives.broadcast_object(is_final, self._group)
        return final if is_final else self.root / checkpoint_folders.partial_name(step)

    def _together(self, action: Callable[[], None]) -> str | None:
        """Run an action on every rank. Return why it failed on any, the same text on all, or None."""
        problem = None
        try:
            action()
        # The other ranks wait for an answer, whatever happened here, unless no answer would reach them.
        except Exception as error:
            if devices.is_lost_connection(error):
                raise
            problem = self._reason(error)
        return self._agreed(problem)

    def _agreed(self, problem: str | None) -> str | None:
        """The problems of all ranks, the same text on each; None where no rank has one."""
        problems = [] if problem is None else [problem]
        return "; ".join(collectives.union(problems, self._group)) or None

    def _prepare(self, staging: Root, pending: _PendingSave) -> None:
        """On rank 0: make the folder, if the disk has room for all files."""
        (needed,) = collectives.reduce_numbers([sum(file.size for file in pending.files)], self._group, op="sum")
        if self._group.rank == 0:
            if self._find_root is not None:
                self._find_root()
            checkpoint_folders.remove_checkpoint(staging)
            staging.make()
            (staging / "optimizer").make()
            advice = "make room, or lower checkpoint.keep"
            writing.require_disk_room(self.root, needed, f"the checkpoint of step {pending.step}", advice)

    def _write_files(
        self, staging: Root, pending: _PendingSave, problem: str | None
    ) -> tuple[list[FileEntry], str | None]:
        """Write this rank's files, unless there is a problem already; returns them, or why they could not be written.

        The buffer is emptied in any case: the training thread may wait for room in it.
        """
        blocks = pending.buffer.blocks()
        entries: list[FileEntry] = []
        try:
            if problem is None:
                entries = list(_write_stream(staging, pending.files, blocks))
        except CopyAborted:
            problem = _ABORTED
        except Exception as error:  # noqa: BLE001  all ranks get to know it
            problem = self._reason(error)
        try:
            for _ in blocks:
                pass
        except CopyAborted:
            problem = problem or _ABORTED
        return entries, problem

    def _commit(self, staging: Root, pending: _PendingSave, gathered: Sequence[_WrittenFiles] | None) -> None:
        """On rank 0, which alone has `gathered`: write the small files and the manifest, and name the folder."""
        if gathered is None:
            return
        entries = [entry for files in gathered for entry in files.entries]
        _require_visible(staging, entries)
        tensors = writing.tensor_entries(entries, [rows for files in gathered for rows in files.rows])
        small_files = dict(self._small_files)
        if self._config is not None:
            manifest = Manifest(**pending.manifest, files=(), tensors=tensors)
            small_files[MODEL_CARD] = model_card(manifest, self._base_model)
        entries += [writing.write_small_file(staging, name, data) for name, data in small_files.items()]
        # From the tensors of all ranks: this one may have nothing to train, and so no state.
        pending.manifest["optimizer"]["states"] = sorted(tensors.keys() - {MODEL})
        pending.manifest["optimizer"]["numbers"] = _joined([files.numbers for files in gathered])
        text = Manifest(**pending.manifest, files=tuple(entries), tensors=tensors).to_json()
        problems = untiled_tensors(tensors)
        if problem := manifest_size_problem(text):
            problems.append(f"of its manifest {problem}")
        if problems:
            raise StoreError(f"{staging} could not be read again: {problems[0]}")
        (staging / MANIFEST).write(text.encode())
        if staging is not pending.final:
            # The names of files are on the disk before the folder gets its own, and that one before the save is done.
            for folder in (staging / "optimizer", staging):
                folder.sync()
            checkpoint_folders.put_checkpoint_in_place(staging, pending.final)
            self.root.sync()
        # `prune_checkpoints` compares the files of the checkpoints that stay with these lengths.
        self._lengths[pending.step] = {entry.path: entry.bytes for entry in entries}
        for step in sorted(self._lengths)[: -(self._keeping.last or 1)]:
            del self._lengths[step]


def _joined(numbers_by_rank: Sequence[_StateNumbers]) -> dict[str, Number | dict[str, Number]]:
    """The numbers of all ranks by state: by canonical tensor, or one where all tensors have the same."""
    by_tensor: _StateNumbers = {}
    for numbers in numbers_by_rank:
        for state, values in numbers.items():
            by_tensor.setdefault(state, {}).update(values)
    joined: dict[str, Number | dict[str, Number]] = {}
    for state, values in by_tensor.items():
        # Most optimizers keep only the number of steps, which is one for all tensors; not each group has an option.
        is_common = len(set(values.values())) == 1 and not state.startswith(OPTION)
        joined[state] = next(iter(values.values())) if is_common else values
    return joined


def _require_visible(staging: Root, entries: Sequence[FileEntry]) -> None:
    """Raise StoreError where a file is missing here, because another rank wrote it to a disk of its own."""
    missing = [entry.path for entry in entries]
    deadline = time.monotonic() + _SEEN_WITHIN_SECONDS
    # A network file system shows the files of other machines after a while.
    while missing and time.monotonic() < deadline:
        lengths = staging.files()
        missing = [entry.path for entry in entries if lengths.get(entry.path) != entry.bytes]
        time.sleep(1.0 if missing else 0.0)
    if missing:
        raise StoreError(
            f"{staging} lacks {listing(missing[:3])} here, which another rank wrote: all ranks must write to one "
            "place, which all machines share, or to a URL: set checkpoint.path or --run-dir"
            f"{see('checkpoints#disk-not-shared')}"
        )


def _write_stream(
    folder: Root, files: Sequence[writing.PlannedFile], blocks: Iterator[memoryview]
) -> Iterator[FileEntry]:
    # A block may hold the end of a file and the beginning of the next one.
    block = memoryview(b"")
    for file in files:
        with ChunkedWriter(folder / file.path, file.size, file.path) as writer:
            remaining = file.size
            while remaining:
                block = block or next(blocks)
                part = block[:remaining]
                block = block[remaining:]
                writer.write(part)
                remaining -= len(part)
            yield writer.close()
