"""Checkpoints of torch.distributed.checkpoint (DCP), read box by box and opened so that no code in them can run.

    FOLDER/.metadata        a pickle of torch's `Metadata`: each tensor's shape, dtype and chunks, and where they lie
    FOLDER/__R_N.distcp     file N of rank R: one file of `torch.save` after the other, each with a chunk or an object

As torch/distributed/checkpoint/{metadata,filesystem}.py write them. The pickle may name torch's own classes of records
alone, and none of them is imported: their fields are read into records of this module. A chunk's file is opened by
`torch.load` on the meta device, which gives its place in the file; its bytes are read when a box of them is asked for.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.base.errors import ConfigError, listing, see
from shardwise.base.files import reason_of
from shardwise.base.tensor_box import Box, box_segments
from shardwise.checkpoint.format.manifest import MODEL, TensorEntry
from shardwise.checkpoint.format.writing import StreamedWeight
from shardwise.checkpoint.storage.root import Buffer
from shardwise.checkpoint.weight_writers import DTYPE_NAMES
from shardwise_use.importing import pickled

METADATA = ".metadata"
_VERSIONS = (None, "1.0.0")  # versions of the format; torch before 2.7 wrote none
_SHOWN = 4
_PART_BYTES = 16 * 2**20
_TYPES = "torch.distributed.checkpoint.metadata."
_RECORDS = {
    *(_TYPES + name for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    # Megatron Core keeps the plans of its ranks there too.
    *("torch.distributed.checkpoint.planner." + name for name in (
        "SavePlan", "TensorWriteData", "BytesIOWriteData", "WriteItem", "WriteItemType",
    )),
    *("megatron.core.dist_checkpointing.strategies.torch." + name for name in ("MCoreMetadata", "MCoreSavePlan")),
    "torch.distributed.checkpoint.filesystem._StorageInfo", "olmo_core.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING", "torch.serialization._get_layout",
    "pathlib.Path", "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath",
}  # fmt: skip
"""The names that torch's writer puts in `.metadata`; an object of it becomes a `DcpRecord`."""


class DcpRecord:
    """The fields of an object in `.metadata` whose class is never imported."""

    # Python's own `__new__` takes any arguments where the class has an `__init__`.
    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"values": state})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Unpickler(pickle.Unpickler):
    """Makes records, tuples and plain values; `refused` gets any other name, of which nothing is imported."""

    refused: dict[str, None]

    def find_class(self, module: str, name: str, /) -> Any:
        full_name = f"{module}.{name}"
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        if full_name in ("torch.Size", "collections.OrderedDict"):
            return tuple if name == "Size" else OrderedDict
        if full_name not in _RECORDS:
            self.refused[full_name] = None
        return type(name, (DcpRecord,), {})


class _Part(io.RawIOBase):
    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])
        self._at += count
        return count


# ---- tensors that are not in memory


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to import from another program's checkpoint; `load` reads a box when asked, in shape `box.size`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[Box], Tensor]

    @staticmethod
    def of(tensor: Tensor) -> LazyTensor:
        """A tensor that is in memory."""
        return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda box: tensor[box.slices])

    @staticmethod
    def cat(tensors: Sequence[LazyTensor]) -> LazyTensor:
        """The tensors one below the other; they differ in their rows alone."""
        first = tensors[0]
        if len(tensors) == 1:
            return first
        stops = [sum(len(tensor) for tensor in tensors[: i + 1]) for i in range(len(tensors))]

        def load(box: Box) -> Tensor:
            low, high = box.start[0], box.stop[0]
            parts = [
                tensor.rows(max(low - stop + len(tensor), 0), min(high - stop + len(tensor), len(tensor)))
                for tensor, stop in zip(tensors, stops, strict=True)
                if low < stop and high > stop - len(tensor)
            ]
            inner = (box.start[1:], box.size[1:])
            read = [part.load(Box((0, *inner[0]), (len(part), *inner[1]))) for part in parts]
            return torch.cat(read) if len(read) > 1 else read[0]

        return LazyTensor((stops[-1], *first.shape[1:]), first.dtype, load)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> LazyTensor:
        inner = self.shape[1:]
        return LazyTensor(
            inner, self.dtype, lambda box: self.load(Box((index, *box.start), (1, *box.size))).reshape(box.size)
        )

    @property
    def t(self) -> LazyTensor:
        return LazyTensor(self.shape[::-1], self.dtype, lambda box: self.load(box.permuted((1, 0))).t())

    def rows(self, start: int, stop: int) -> LazyTensor:
        stop = min(stop, len(self))

        def load(box: Box) -> Tensor:
            return self.load(Box((box.start[0] + start, *box.start[1:]), box.size))

        return LazyTensor((stop - start, *self.shape[1:]), self.dtype, load)

    def by_rows(self, count: int, change: Callable[[Tensor], Tensor]) -> LazyTensor:
        """The tensor with each block of `count` rows changed; `change` keeps the shape."""

        def load(box: Box) -> Tensor:
            first = box.start[0] // count * count
            stop = min(-(-box.stop[0] // count) * count, len(self))
            blocks = self.load(Box((first, *box.start[1:]), (stop - first, *box.size[1:]))).split(count)
            return torch.cat([change(block) for block in blocks])[box.start[0] - first : box.stop[0] - first]

        return LazyTensor(self.shape, self.dtype, load)

    def read(self, box: Box | None = None) -> Tensor:
        return self.load(box or Box.whole(self.shape))

    def segments(self) -> Iterator[Buffer]:
        """The bytes, row-major, few rows at a time."""
        for box in box_segments(self.shape, _PART_BYTES // self.dtype.itemsize):
            yield _bytes(self.load(box).contiguous())

    @property
    def entry(self) -> TensorEntry:
        return TensorEntry(self.shape, DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix("torch.")), ())

    def streamed(self, name: str, state: str = MODEL) -> StreamedWeight:
        """The tensor as one that is written; its dtype must be one that a weight may have."""
        return StreamedWeight(name, DTYPE_NAMES[self.dtype], self.shape, self.segments, state)


# ---- folders


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor, or an object: bytes of a file, which are a file of `torch.save`."""

    path: Path
    start: int
    length: int
    box: Box


@dataclass
class DcpFolder:
    """A checkpoint of torch.distributed.checkpoint, of which nothing but `.metadata` has been read."""

    where: str
    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    objects: dict[str, _Chunk] = field(default_factory=dict)
    _places: dict[_Chunk, int | Tensor] = field(default_factory=dict)

    @staticmethod
    def open(folder: Path) -> DcpFolder:
        """Open a folder; ConfigError: it is none, incomplete, of another version, or not safe to open."""
        record = _read_metadata(folder / METADATA)
        opened = DcpFolder(str(folder))
        with pickled.content_errors(f"{folder / METADATA} is no list of tensors as torch writes it"):
            stored: dict[tuple[str, tuple[int, ...] | None], DcpRecord] = {
                (index.fqn, None if index.offset is None else tuple(index.offset)): info
                for index, info in record.storage_data.items()
            }
            opened._require_files(folder, {info.relative_path for info in stored.values()}, record)
            for name, entry in record.state_dict_metadata.items():
                opened._add(folder, name, entry, stored)
        return opened

    def _require_files(self, folder: Path, names: set[str], record: DcpRecord) -> None:
        if record.version not in _VERSIONS:
            raise ConfigError(
                f"{folder / METADATA}: its version ({record.version!r}) must be {_VERSIONS[1]!r}: save the checkpoint "
                "by a torch of that format"
            )
        outside = sorted(name for name in names if Path(name).name != name)
        if outside:
            raise ConfigError(f"{folder / METADATA} must name files in its folder, and it names {outside[0]!r}")
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            raise ConfigError(
                f"{folder} must have the files of all ranks: of {len(names)} that its {METADATA} names it lacks "
                f"{listing(missing, most=_SHOWN)}: copy the folder whole, or save it again"
            )
        packed = [info.relative_path for info in record.storage_data.values() if info.transform_descriptors]
        if packed:
            raise ConfigError(f"{folder / packed[0]} is compressed by an extension of torch's writer: save without it")

    def _add(
        self, folder: Path, name: str, entry: DcpRecord, stored: Mapping[tuple[str, tuple[int, ...] | None], DcpRecord]
    ) -> None:
        def chunk(offset: tuple[int, ...] | None, box: Box) -> _Chunk:
            info = stored[name, offset]
            path = folder / info.relative_path
            if not 0 <= info.offset <= info.offset + info.length <= path.stat().st_size:
                end = info.offset + info.length
                raise ConfigError(f"{path} is truncated: {name} ends at byte {end:,}, after the end of the file")
            return _Chunk(path, info.offset, info.length, box)

        if type(entry).__name__ == "BytesStorageMetadata":
            self.objects[name] = chunk(None, Box((), ()))
            return
        shape = tuple(entry.size)
        boxes = [Box(tuple(part.offsets), tuple(part.sizes)) for part in entry.chunks]
        full_box = Box.whole(shape)
        if sum(box.numel for box in boxes) != full_box.numel or any(
            box.numel and box.intersect(full_box) != box for box in boxes
        ):
            raise ConfigError(f"{self.where}: the chunks of {name} must tile its shape {list(shape)}: save it again")
        chunks = [chunk(box.start, box) for box in boxes if box.numel]
        properties = entry.properties
        dtype = properties.values[0] if properties.dtype is None else properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype of {name}")

        def load(box: Box) -> Tensor:
            out = torch.empty(box.size, dtype=dtype)
            for part in chunks:
                overlap = part.box.intersect(box)
                if overlap is not None:
                    self._fill(out[overlap.relative_to(box).slices], part, overlap.relative_to(part.box), name)
            return out

        self.tensors[name] = LazyTensor(shape, dtype, load)

    def object(self, name: str) -> Any:
        """An object beside the tensors, such as a number; ConfigError where its pickle asks for more than values."""
        chunk = self.objects[name]
        with chunk.path.open("rb") as file:
            file.seek(chunk.start)
            return pickled.load_pickled(chunk.path, content=file.read(chunk.length), name=name)

    def _fill(self, target: Tensor, chunk: _Chunk, box: Box, name: str) -> None:
        place = self._place(chunk, target.dtype, name)
        if isinstance(place, Tensor):
            target.copy_(place[box.slices])
            return
        # Copied on a write, as torch warns of memory that nobody may write.
        data = np.memmap(chunk.path, np.uint8, "c", place, (chunk.box.numel * target.dtype.itemsize,))
        target.copy_(torch.from_numpy(data).view(target.dtype).view(chunk.box.size)[box.slices])

    def _place(self, chunk: _Chunk, dtype: torch.dtype, name: str) -> int | Tensor:
        """The byte of its file where the elements of a chunk begin; the chunk itself where they are not row-major."""
        if chunk not in self._places:
            with chunk.path.open("rb") as file:
                part = _Part(file, chunk.start, chunk.length)
                tensor = _load(part, chunk.path, "meta")
                if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.box.size or tensor.dtype != dtype:
                    raise ConfigError(f"{chunk.path} is damaged: its {name} is not what {METADATA} says")
                offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
                if tensor.is_contiguous() and offset is not None:
                    offset += tensor.storage_offset() * dtype.itemsize
                    if offset + tensor.nbytes > chunk.length:
                        raise ConfigError(f"{chunk.path} is truncated inside of {name}")
                    self._places[chunk] = chunk.start + offset
                else:
                    part.seek(0)
                    whole: Tensor = _load(part, chunk.path, "cpu")
                    return whole
        return self._places[chunk]


def is_dcp_folder(folder: Path) -> bool:
    return (folder / METADATA).is_file()


def _read_metadata(path: Path) -> DcpRecord:
    if not path.is_file():
        raise ConfigError(
            f"{path.parent} must be a folder of torch.distributed.checkpoint, with {METADATA}: it has none"
        )
    try:
        with path.open("rb") as file:
            unpickler = _Unpickler(file)
            unpickler.refused = {}
            record = unpickler.load()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}") from None
    except Exception as error:  # noqa: BLE001  what pickle raises for bytes it does not expect: almost any
        if not unpickler.refused:
            raise ConfigError(f"{path} is truncated or no pickle of torch's Metadata ({error})") from None
    if unpickler.refused:
        raise ConfigError(
            f"{path} is refused: beside torch's records and plain values its pickle names "
            f"{listing(sorted(unpickler.refused))}, by which opening it could run code; none was run"
            f"{see('checkpoints#pickle-refused')}"
        )
    if not isinstance(record, DcpRecord) or not isinstance(record.storage_data, dict):
        raise ConfigError(f"{path} must hold torch's Metadata, and it holds another value")
    return record


def _load(part: Any, path: Path, device: str) -> Any:
    try:
        if part.read(2) != b"PK":
            raise ValueError("it begins as no zip archive")
        part.seek(0)
        return torch.load(part, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{path} is refused: {pickled.unpickling_reason(error)}; no code of it was run") from None
    except Exception as error:  # noqa: BLE001  what torch's readers raise for bytes they do not expect: almost any
        raise ConfigError(f"{path} is damaged: no file of torch.save ({pickled.unpickling_reason(error)})") from None


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data.cast("B")
