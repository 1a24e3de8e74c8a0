"""Writing checkpoints: each file is planned as a whole, and then written as its bytes arrive.

The header and the length of a file are known before its first byte, so tensors of any size are written in segments.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from shardwise.base.errors import ConfigError, StoreError
from shardwise.base.progress import progress
from shardwise.base.tensor_box import Box
from shardwise.base.units import size
from shardwise.checkpoint.format.manifest import MANIFEST, MODEL, Manifest, Pieces, TensorEntry, piece_label
from shardwise.checkpoint.format.safetensors import DTYPES, safetensors_header
from shardwise.checkpoint.format.weight_files import INDEX
from shardwise.checkpoint.storage.chunks import ChunkedWriter, FileEntry
from shardwise.checkpoint.storage.root import Buffer, Root

CONFIG = "config.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Size of a shard at most: the default of `transformers`."""
STREAM_BYTES = 64 * 2**20
"""Bytes of a tensor that are in memory at a time."""
_Weight = TypeVar("_Weight", "StreamedWeight", "PlannedPiece")


# ---- files that are planned as a whole


@dataclass(frozen=True)
class PlannedPiece:
    """A box of a tensor in a file: the tensor's state (`model`, `exp_avg`, …), and the offset of its bytes."""

    state: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return self.box.numel * DTYPES[self.dtype].itemsize

    @staticmethod
    def weight(name: str, shape: tuple[int, ...], dtype: str) -> PlannedPiece:
        return PlannedPiece(MODEL, name, shape, dtype, Box.whole(shape))


_TensorKey: TypeAlias = tuple[str, str, tuple[int, ...], str]  # state, name, shape and dtype of a tensor
PieceRows: TypeAlias = Mapping[_TensorKey, Sequence[tuple[int, ...]]]
"""Tensor in a file → its pieces there, each as one tuple of numbers: offset, start of the box, size of the box."""


@dataclass(frozen=True)
class PlannedFile:
    """A safetensors file that is to be written: its header, its length and its pieces in order."""

    path: str
    header: bytes
    size: int
    pieces: tuple[PlannedPiece, ...]

    @staticmethod
    def of(path: str, pieces: Sequence[PlannedPiece]) -> PlannedFile:
        labelled = [
            (piece_label(piece.state, piece.name, piece.shape, piece.box), piece.dtype, piece.box.size)
            for piece in pieces
        ]
        # `transformers` opens only files whose metadata name the format.
        first_bytes, offsets, total = safetensors_header(labelled, {"format": "pt"})
        placed = tuple(replace(piece, offset=offset) for piece, offset in zip(pieces, offsets, strict=True))
        return PlannedFile(path, first_bytes, total, placed)

    @property
    def piece_rows(self) -> tuple[str, PieceRows]:
        """The path and pieces for a manifest, in the form that takes least time to send and to merge."""
        rows: dict[_TensorKey, list[tuple[int, ...]]] = {}
        for piece in self.pieces:
            row = (piece.offset, *piece.box.start, *piece.box.size)
            rows.setdefault((piece.state, piece.name, piece.shape, piece.dtype), []).append(row)
        return self.path, rows


def tensor_entries(
    entries: Sequence[FileEntry], rows_of_files: Iterable[tuple[str, PieceRows]]
) -> dict[str, dict[str, TensorEntry]]:
    """The tensors of a manifest to write: state → name → tensor.

    Args:
        entries: the manifest's files, in their order.
        rows_of_files: (path, pieces) of each file with tensors.
    """
    number_of_file = {entry.path: number for number, entry in enumerate(entries)}
    table: dict[_TensorKey, list[tuple[int, ...]]] = {}
    for path, rows_by_tensor in rows_of_files:
        number = number_of_file[path]
        for key, rows in rows_by_tensor.items():
            table.setdefault(key, []).extend((number, *row) for row in rows)
    tensors: dict[str, dict[str, TensorEntry]] = {}
    for (state, name, shape, dtype), rows in table.items():
        tensors.setdefault(state, {})[name] = TensorEntry(shape, dtype, Pieces.of_rows(rows, len(shape)))
    return tensors


# ---- whole weights, one after the other


@dataclass(frozen=True)
class StreamedWeight:
    """A weight that is written into a shard in parts: `read` yields its bytes, contiguous and row-major.

    `state`: that of an optimizer, such as `exp_avg`, where it is not the weight but what the optimizer keeps of it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Iterator[Buffer]]
    state: str = MODEL

    @property
    def nbytes(self) -> int:
        return Box.whole(self.shape).numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class WrittenFolder:
    """A folder of weights that was written."""

    folder: Root  # the folder, under its final name
    files: int  # number of files, the manifest included
    bytes: int  # length of all files but the manifest


def write_folder(
    parent: Root,
    name: str,
    weights: Sequence[StreamedWeight],
    small_files: Mapping[str, bytes],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    manifest: Callable[[Sequence[FileEntry], Sequence[PlannedFile]], Manifest] | None = None,
) -> WrittenFolder:
    """Write a Hugging Face folder or a checkpoint: complete or not there.

    Args:
        weights: weights in the order in which they are written; those of other states go to files of their own.
        small_files: name → content of the other files. `config.json`, which makes a folder a model's, is written last.
        max_shard_bytes: size of a file with weights at most; a larger tensor has one to itself.
        manifest: makes the manifest from the written files, once all weights were read; None for a folder without one.

    Raises:
        ConfigError: the folder exists. StoreError: a file cannot be written. Whatever reading the weights raises.
    """
    final = parent / name
    # An object store has no folders: names below it show that it is taken.
    if final.exists() or final.names():
        raise ConfigError(f"{final} exists already: choose another name, or remove it")
    parent.make()
    nbytes = sum(weight.nbytes for weight in weights)
    require_disk_room(parent, nbytes, f"writing {name}")
    with staged_folder(parent, name) as staging:
        with progress(f"writing {name}", nbytes) as advance:
            files, entries = _write_shards(staging, _shards(weights, max_shard_bytes), advance)
        models = {file.path: file.pieces for file in files if file.pieces[0].state == MODEL}
        contents = {**small_files, **weight_index(models)}
        for path in sorted(contents, key=lambda path: path == CONFIG):
            entries.append(write_small_file(staging, path, contents[path]))
        if manifest is not None:
            (staging / MANIFEST).write(manifest(entries, files).to_json().encode())
    count = len(entries) + (manifest is not None)
    return WrittenFolder(final, count, sum(entry.bytes for entry in entries))


def weight_index(shards: Mapping[str, Sequence[PlannedPiece]]) -> dict[str, bytes]:
    """Name and content of the file that says which shard holds which weight; nothing where there is one shard.

    `shards`: path → weights.
    """
    if len(shards) < 2:
        return {}
    total = sum(weight.nbytes for weights in shards.values() for weight in weights)
    path_of_weight = {weight.name: path for path, weights in shards.items() for weight in weights}
    return {INDEX: to_json({"metadata": {"total_size": total}, "weight_map": path_of_weight})}


def _shards(weights: Sequence[StreamedWeight], max_shard_bytes: int) -> dict[str, list[StreamedWeight]]:
    """Path → tensors of the files: weights are named as `transformers` names them, other states as ranks save them."""
    models = list(cut_into_shards([weight for weight in weights if weight.state == MODEL], max_shard_bytes))
    states = cut_into_shards([weight for weight in weights if weight.state != MODEL], max_shard_bytes)
    shards = dict(zip(shard_names(len(models)), models, strict=True))
    return shards | {state_file(number): shard for number, shard in enumerate(states)}


def state_file(number: int) -> str:
    """The path in a written checkpoint of a file with optimizer state: that of a rank, or of a shard."""
    return f"optimizer/rank-{number:05}.safetensors"


def _write_shards(
    folder: Root, shards: Mapping[str, Sequence[StreamedWeight]], advance: Callable[[int], None]
) -> tuple[list[PlannedFile], list[FileEntry]]:
    files: list[PlannedFile] = []
    entries: list[FileEntry] = []
    for subfolder in {name.rpartition("/")[0] for name in shards} - {""}:
        (folder / subfolder).make()
    for name, shard in shards.items():
        pieces = [PlannedPiece(w.state, w.name, w.shape, w.dtype, Box.whole(w.shape)) for w in shard]
        file = PlannedFile.of(name, pieces)
        with ChunkedWriter(folder / name, file.size, name) as writer:
            writer.write(file.header)
            for weight in shard:
                for data in weight.read():
                    writer.write(data)
                    advance(memoryview(data).nbytes)
            entries.append(writer.close())
        files.append(file)
    return files, entries


def write_small_file(folder: Root, path: str, data: bytes) -> FileEntry:
    """Write one of the files beside the weights, which may lie in a folder of its own."""
    subfolder = path.rpartition("/")[0]
    if subfolder:
        (folder / subfolder).make()
    with ChunkedWriter(folder / path, len(data), path) as writer:
        writer.write(data)
        entry = writer.close()
    # Whoever completes `folder` brings its names to the disk, and not those of its subfolders.
    if subfolder:
        (folder / subfolder).sync()
    return entry


def cut_into_shards(weights: Sequence[_Weight], max_shard_bytes: int) -> Iterator[list[_Weight]]:
    """Cut weights into shards of at most `max_shard_bytes`; a larger tensor has one to itself."""
    shard: list[_Weight] = []
    shard_bytes = 0
    for weight in weights:
        if shard and shard_bytes + weight.nbytes > max_shard_bytes:
            yield shard
            shard = []
            shard_bytes = 0
        shard.append(weight)
        shard_bytes += weight.nbytes
    if shard:
        yield shard


def shard_names(count: int) -> list[str]:
    """The names of a model's shards, as `transformers` has them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def to_json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


# ---- folders


@contextlib.contextmanager
def staged_folder(parent: Root, name: str) -> Iterator[Root]:
    """Yield a folder for weights that is complete or not there: a local one is `.NAME.partial` until it is complete.

    An object store has no rename; there, the file that makes the folder valid must be written last.
    """
    final = parent / name
    staging = parent / f".{name}.partial" if parent.is_local else final
    # A process that was killed has left its files.
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


def require_disk_room(folder: Root, needed: int, subject: str, advice: str = "make room there") -> None:
    """Raise StoreError where the disk has no room for a checkpoint of `needed` bytes.

    The message begins with `subject` and ends with `advice`.
    """
    free = folder.free_bytes()
    if free is not None and free < needed:
        raise StoreError(
            f"{subject} needs {size(needed)} ({needed:,} bytes) in {folder}, where {size(free)} are free: {advice}"
        )
