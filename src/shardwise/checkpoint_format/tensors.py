"""The tensors of a folder, whoever cut them: a checkpoint by its manifest, or plain Hugging Face weights.

Any box of a canonical tensor is put together from the pieces that have a part in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.boxes import Box
from shardwise.checkpoint_format.manifest import MANIFEST, Manifest, PieceEntry, TensorEntry
from shardwise.checkpoint_format.safetensors import DTYPES, parse_header
from shardwise.errors import ConfigError, listing
from shardwise.hub import INDEX, SINGLE, indexed
from shardwise.storage.chunks import ChunkedReader
from shardwise.storage.root import DamageError, Root, StoreError

_MAX_INDEX_BYTES = 2**26
_DIGITS = re.compile(r"(\d+)")


@dataclass
class Tensors:
    """What a folder holds.

    Attributes:
        states: `model`, `exp_avg`, … → canonical name → tensor. manifest: None of plain Hugging Face weights.
    """

    folder: Root
    states: Mapping[str, Mapping[str, TensorEntry]]
    manifest: Manifest | None
    _files: tuple[str, ...] = ()
    _readers: dict[int, ChunkedReader] = field(default_factory=dict)

    @staticmethod
    def of(folder: Root) -> Tensors:
        """A checkpoint, or a folder with safetensors weights.

        Raises:
            ConfigError: it is neither. StoreError: it cannot be read, or is damaged.
        """
        if (folder / MANIFEST).exists():
            manifest = Manifest.read(folder)
            return Tensors(folder, manifest.tensors, manifest)
        files = _weight_files(folder)
        weights: dict[str, TensorEntry] = {}
        for number, path in enumerate(files):
            for name, tensor in parse_header(folder / path).items():
                piece = PieceEntry(number, tensor.start, Box.whole(tensor.shape))
                weights[name] = TensorEntry(tensor.shape, tensor.dtype, (piece,))
        return Tensors(folder, {"model": weights}, None, files)

    def config(self) -> dict[str, Any]:
        """`config.json`, or nothing where there is none that can be read."""
        try:
            found = json.loads((self.folder / "config.json").read(0, _MAX_INDEX_BYTES))
        except (StoreError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def read(self, state: str, name: str, box: Box) -> npt.NDArray[Any]:
        """A box of a tensor, its bits as `DTYPES` has them for numpy; shape `box.size`.

        Raises:
            DamageError: bytes of it do not match their checksum, or its pieces leave a gap in it.
        """
        tensor = self.states[state][name]
        dtype = DTYPES[tensor.dtype]
        result = np.empty(box.size, dtype.numpy)
        covered = 0
        for piece in tensor.pieces:
            common = box.intersect(piece.box)
            if common is None:
                continue
            inside = common.relative_to(piece.box).runs(piece.box.size)
            offsets = ((piece.offset + a * dtype.itemsize, n * dtype.itemsize) for a, n in inside)
            data = b"".join(self._bytes(piece.file, a, a + n) for a, n in offsets)
            result[common.relative_to(box).slices] = np.frombuffer(data, dtype.numpy).reshape(common.size)
            covered += common.numel
        if covered != box.numel:
            raise DamageError(f"{self.folder}: the pieces of {state}/{name} do not tile it")
        return result

    def _bytes(self, file: int, start: int, stop: int) -> bytes | memoryview:
        if self.manifest is None:
            place = self.folder / self._files[file]
            data = place.read(start, stop)
            if len(data) != stop - start:
                raise DamageError(f"{place} is damaged: it ends at byte {start + len(data):,}, before byte {stop:,}")
            return data
        if file not in self._readers:
            self._readers[file] = ChunkedReader(self.folder, self.manifest.files[file])
        return self._readers[file].read(start, stop)


def ordered_states(states: Iterable[str]) -> list[str]:
    """The model first."""
    return sorted(states, key=lambda state: (state != "model", state))


def ordered_names(names: Iterable[str]) -> list[str]:
    """By name, numbers in it by their value: layer 10 after layer 2."""
    return sorted(names, key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    """Texts and numbers by turns: texts compare as texts, numbers (no leading zeros) by their length first."""
    return [(len(part) if part.isdigit() else 0, part) for part in _DIGITS.split(name)]


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
    if index.size() > _MAX_INDEX_BYTES:
        raise ConfigError(f"{index} is no index of safetensors files: it is too long")
    return tuple(indexed(index.read(), folder, lambda name: (folder / name).exists()))
