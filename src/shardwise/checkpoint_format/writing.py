"""Writing checkpoints: files that are planned whole and filled as their bytes come.

Everything in a file is known before its first byte, so that tensors of any size go by in segments.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from shardwise.boxes import Box
from shardwise.checkpoint_format.manifest import PieceEntry, TensorEntry
from shardwise.checkpoint_format.safetensors import DTYPES, header
from shardwise.checkpoint_format.verify import MODEL
from shardwise.storage.chunks import ChunkedWriter, FileEntry
from shardwise.storage.root import Buffer, Root, StoreError
from shardwise.units import size

MAX_SHARD_BYTES = 5 * 10**9
STREAM_BYTES = 64 * 2**20
"""Of a tensor that are held in memory at a time."""


@dataclass(frozen=True)
class Part:
    """A box of a tensor in a file: of which state (`model`, `exp_avg`, …), and where its bytes begin."""

    state: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    offset: int = 0


@dataclass(frozen=True)
class File:
    """A safetensors file as it will be, before its first byte is written."""

    path: str
    header: bytes
    size: int
    parts: tuple[Part, ...]

    @staticmethod
    def of(path: str, named: Sequence[tuple[str, Part]]) -> File:
        """`named`: what the file holds, in order, under the names that it has there."""
        head, offsets, total = header([(name, part.dtype, part.box.size) for name, part in named], {"format": "pt"})
        placed = tuple(
            Part(part.state, part.name, part.shape, part.dtype, part.box, offset)
            for (_, part), offset in zip(named, offsets, strict=True)
        )
        return File(path, head, total, placed)


def tensor_entries(entries: Sequence[FileEntry], files: Sequence[File]) -> dict[str, dict[str, TensorEntry]]:
    """What a manifest says of the tensors in `files`; `entries`: its files, in its order."""
    index = {entry.path: number for number, entry in enumerate(entries)}
    pieces: dict[tuple[str, str, tuple[int, ...], str], list[PieceEntry]] = {}
    for file in files:
        for part in file.parts:
            piece = PieceEntry(index[file.path], part.offset, part.box)
            pieces.setdefault((part.state, part.name, part.shape, part.dtype), []).append(piece)
    tensors: dict[str, dict[str, TensorEntry]] = {}
    for (state, name, shape, dtype), found in pieces.items():
        tensors.setdefault(state, {})[name] = TensorEntry(shape, dtype, tuple(found))
    return tensors


# ---- whole weights, one after the other


@dataclass(frozen=True)
class Weight:
    """A weight that comes piece by piece: `read` yields its bytes, contiguous and row-major, in any cuts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Iterator[Buffer]]

    @property
    def nbytes(self) -> int:
        return Box.whole(self.shape).numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Written:
    """The shards of a model's weights."""

    files: tuple[File, ...]
    entries: tuple[FileEntry, ...]

    @property
    def index(self) -> dict[str, Any] | None:
        """`model.safetensors.index.json`; None where there is one shard."""
        if len(self.files) < 2:
            return None
        names = {part.name: file.path for file in self.files for part in file.parts}
        total = sum(file.size - len(file.header) for file in self.files)
        return {"metadata": {"total_size": total}, "weight_map": names}


def write_weights(
    folder: Root,
    weights: Sequence[Weight],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int], None] | None = None,
) -> Written:
    """Write weights as `transformers` names their shards; `progress` is called with bytes written since the last call.

    Raises:
        StoreError: a file cannot be written. Whatever reading the weights raises.
    """
    shards = list(cut(weights, max_shard_bytes))
    files, entries = [], []
    for name, shard in zip(shard_names(len(shards)), shards, strict=True):
        named = [(w.name, Part(MODEL, w.name, w.shape, w.dtype, Box.whole(w.shape))) for w in shard]
        file = File.of(name, named)
        writer = ChunkedWriter(folder / name, file.size, name)
        try:
            writer.write(file.header)
            for weight in shard:
                for data in weight.read():
                    writer.write(data)
                    if progress is not None:
                        progress(memoryview(data).nbytes)
            entries.append(writer.close())
        except BaseException:
            writer.abandon()
            raise
        files.append(file)
    return Written(tuple(files), tuple(entries))


def write_small(file: Root, data: bytes, path: str | None = None) -> FileEntry:
    """One of the files beside the weights."""
    writer = ChunkedWriter(file, len(data), path)
    try:
        writer.write(data)
        return writer.close()
    except BaseException:
        writer.abandon()
        raise


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_Weight = TypeVar("_Weight", bound=Sized)


def cut(weights: Sequence[_Weight], max_shard_bytes: int) -> Iterator[list[_Weight]]:
    """Shards of at most so many bytes; a larger tensor has one to itself."""
    shard: list[_Weight] = []
    held = 0
    for weight in weights:
        if shard and held + weight.nbytes > max_shard_bytes:
            yield shard
            shard, held = [], 0
        shard.append(weight)
        held += weight.nbytes
    if shard:
        yield shard


def shard_names(count: int) -> list[str]:
    """What `transformers` calls the shards of a model."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def to_json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


# ---- folders


@contextlib.contextmanager
def staged(parent: Root, name: str, partial: str) -> Iterator[Root]:
    """A folder that is complete or not there: on a local disk it has the name `partial` until all of it is written.

    An object store has no such thing as a rename; there, what makes the folder valid must be written last.
    """
    final = parent / name
    staging = parent / partial if parent.is_local else final
    staging.remove()
    staging.make()
    try:
        yield staging
        if parent.is_local:
            staging.sync()
            staging.rename(final)
            parent.sync()
    except BaseException:
        with contextlib.suppress(StoreError):
            staging.remove()
        raise


def require_room(folder: Root, needed: int, what: str) -> None:
    """Raise StoreError where the disk has no room for `needed` bytes of what is to be written."""
    free = folder.free_bytes()
    if free is not None and free < needed:
        raise StoreError(
            f"{what} needs {size(needed)} ({needed:,} bytes) in {folder}, where {size(free)} are free: make room there",
            out_of_space=True,
        )
