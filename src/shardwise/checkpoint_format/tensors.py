"""The tensors of a folder: those in a checkpoint's manifest, or plain Hugging Face weights.

Any box of a tensor can be read; it is put together from the stored pieces that overlap it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.boxes import Box
from shardwise.checkpoint_format.manifest import MANIFEST, MODEL, Manifest, TensorEntry
from shardwise.checkpoint_format.pieces import PieceEntry
from shardwise.checkpoint_format.safetensors import DTYPES, parse_header
from shardwise.errors import ConfigError, listing
from shardwise.hub import INDEX, SINGLE, indexed
from shardwise.parsing import json_value
from shardwise.storage.chunks import READ_BYTES, ChunkedReader
from shardwise.storage.root import DamageError, Root, StoreError
from shardwise.units import size

_MAX_INDEX_BYTES = 2**26
_DIGITS = re.compile(r"(\d+)")


@dataclass
class StoredTensors:
    """The tensors that a folder holds, read when they are asked for.

    Attributes:
        folder: where they are.
        states: state (`model`, `exp_avg`, …) → name → tensor.
        manifest: None for plain Hugging Face weights.
        readers: number of a file → what has read parts of it so far.
    """

    folder: Root
    states: Mapping[str, Mapping[str, TensorEntry]]
    manifest: Manifest | None
    _files: tuple[str, ...] = ()
    readers: dict[int, ChunkedReader] = field(default_factory=dict)

    @staticmethod
    def of(folder: Root) -> StoredTensors:
        """A checkpoint, or a folder with safetensors weights.

        Raises:
            ConfigError: it is neither. StoreError: it cannot be read, or is damaged.
        """
        if (folder / MANIFEST).exists():
            manifest = Manifest.read(folder)
            return StoredTensors(folder, manifest.tensors, manifest)
        files = _weight_files(folder)
        weights: dict[str, TensorEntry] = {}
        damage: list[str] = []
        for number, path in enumerate(files):
            try:
                header = parse_header(folder / path)
            except DamageError as error:
                damage.append(str(error))
                continue
            for name, tensor in header.items():
                piece = PieceEntry(number, tensor.start, Box.whole(tensor.shape))
                weights[name] = TensorEntry(tensor.shape, tensor.dtype, (piece,))
        if damage:
            raise DamageError("; ".join(damage))
        return StoredTensors(folder, {MODEL: weights}, None, files)

    def config(self) -> dict[str, Any]:
        """The fields of `config.json`; empty where it is missing or cannot be read."""
        try:
            fields = json_value((self.folder / "config.json").read(0, _MAX_INDEX_BYTES))
        except (StoreError, ValueError):
            return {}
        return fields if isinstance(fields, dict) else {}

    def read(self, state: str, name: str, box: Box) -> npt.NDArray[Any]:
        """A box of a tensor, its bits as `DTYPES` has them for numpy; shape `box.size`.

        Raises:
            DamageError: bytes of it do not match their checksum, or its pieces leave a gap in it.
        """
        tensor = self.states[state][name]
        result = np.empty(box.size, DTYPES[tensor.dtype].numpy)
        covered = 0
        for piece in tensor.pieces:
            common = box.intersect(piece.box)
            if common is None:
                continue
            result[common.relative_to(box).slices] = self.read_part(piece, tensor.dtype, common.relative_to(piece.box))
            covered += common.numel
        if covered != box.numel:
            raise DamageError(f"{self.folder}: the pieces of {state}/{name} do not tile it")
        return result

    def read_part(self, piece: PieceEntry, dtype_name: str, box: Box) -> npt.NDArray[Any]:
        """A box of a piece. Of a plain file whole rows are read: some columns would take a read for each row."""
        dtype = DTYPES[dtype_name]
        runs = box.runs(piece.box.size)
        if self.manifest is not None or len(runs) == 1:
            offsets = ((piece.offset + start * dtype.itemsize, length * dtype.itemsize) for start, length in runs)
            parts = [self._bytes(piece.file, start, start + length) for start, length in offsets]
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            return np.frombuffer(data, dtype.numpy).reshape(box.size)
        width = piece.box.size[1:]
        row_bytes = math.prod(width) * dtype.itemsize
        step = max(1, READ_BYTES // row_bytes)
        columns = []
        for first in range(box.start[0], box.stop[0], step):
            start, stop = (piece.offset + row * row_bytes for row in (first, min(first + step, box.stop[0])))
            rows = np.frombuffer(self._bytes(piece.file, start, stop), dtype.numpy).reshape(-1, *width)
            columns.append(rows[(slice(None), *box.slices[1:])])
        return np.concatenate(columns)

    def _bytes(self, file: int, start: int, stop: int) -> bytes | memoryview:
        if self.manifest is None:
            place = self.folder / self._files[file]
            data = place.read(start, stop)
            if len(data) != stop - start:
                raise DamageError(f"{place} is damaged: it ends at byte {start + len(data):,}, before byte {stop:,}")
            return data
        return self.reader(file).read(start, stop)

    def reader(self, file: int) -> ChunkedReader:
        assert self.manifest is not None
        if file not in self.readers:
            self.readers[file] = ChunkedReader(self.folder, self.manifest.files[file])
        return self.readers[file]


def ordered_states(states: Iterable[str]) -> list[str]:
    """The model first."""
    return sorted(states, key=lambda state: (state != MODEL, state))


def ordered_names(names: Iterable[str]) -> list[str]:
    """By name, numbers in it by their value: layer 10 after layer 2."""
    # Every second part is a number without leading zeros: the longer one is the larger one.
    return sorted(names, key=lambda name: [(len(part) * part.isdigit(), part) for part in _DIGITS.split(name)])


def segments(shape: tuple[int, ...], elements: int) -> Iterator[Box]:
    """A tensor as boxes of at most `elements` elements, in order: whole rows where a row has fewer."""
    total = math.prod(shape)
    row = total // shape[0] if shape and shape[0] else total
    step = max(elements // row, 1) * row if 0 < row <= elements else elements
    for offset in range(0, total, step):
        yield from Box.of_run(offset, min(step, total - offset), shape)


def _weight_files(folder: Root) -> tuple[str, ...]:
    """The safetensors files of a Hugging Face folder.

    Raises:
        ConfigError: there are none, or the index names what is not there.
    """
    if (folder / SINGLE).exists():
        return (SINGLE,)
    index = folder / INDEX
    if not index.exists():
        holds = listing(folder.names()[:6]) or "nothing"
        raise ConfigError(
            f"{folder} must be a checkpoint (with {MANIFEST}) or have safetensors weights ({SINGLE} or {INDEX}): "
            f"it has {holds}"
        )
    if (length := index.size()) > _MAX_INDEX_BYTES:
        raise ConfigError(
            f"{index} ({size(length)}) must be an index of safetensors files, which has at most "
            f"{size(_MAX_INDEX_BYTES)}"
        )
    return tuple(indexed(index.read(), folder, lambda name: (folder / name).exists()))
