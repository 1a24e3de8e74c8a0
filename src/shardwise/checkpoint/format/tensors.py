"""The tensors of a folder: those in a checkpoint's manifest, or plain Hugging Face weights.

Any box of a tensor can be read; it is put together from the stored pieces that overlap it.

The tensors of a place against those of a model: names, shapes, dtypes, and second copies of a tied weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import ConfigError, listing
from shardwise.base.parsing import json_value
from shardwise.base.tensor_box import Box
from shardwise.base.units import size
from shardwise.checkpoint.format.manifest import MANIFEST, MODEL, Manifest, PieceEntry, TensorEntry
from shardwise.checkpoint.format.safetensors import DTYPES, FLOATING, cast, parse_header
from shardwise.checkpoint.format.verify import consecutive
from shardwise.checkpoint.storage.chunks import READ_BYTES, ChunkedReader
from shardwise.checkpoint.storage.root import DamageError, Root, StoreError
from shardwise.config import weight_names
from shardwise.data.hub import INDEX, SINGLE, indexed

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


Shapes = Mapping[str, tuple[int, ...]]
TRAINABLE = "float64, float32, float16 or bfloat16"
"""What the dtype of a weight must be, for messages."""
_LAYER = re.compile(r"(?<![^.])\d+(?=\.)")
"""The part of a name that is a number; the first one is the layer's."""


def mismatches(
    where: str,
    shapes: Shapes,
    stored: Mapping[str, TensorEntry],
    *,
    canonical: Mapping[str, str] | None = None,
    needed: Iterable[str] | None = None,
    state: str = MODEL,
) -> list[str]:
    """Every way in which the tensors of a place are not the model's; layers with the same problem share a line.

    Args:
        where: names the place in the lines.
        shapes: canonical name → shape, of the model.
        stored: name at the place → tensor.
        canonical: name at the place → canonical name; other tensors there are no weights. Default: they are the same.
        needed: canonical names that must be there, unless they have no elements. Default: all of the model's.
        state: `model`, or the optimizer state that the tensors belong to.
    """
    names = {name: name for name in stored} if canonical is None else canonical
    known = {name: own for name, own in names.items() if own in shapes}
    lacked = (set(shapes) if needed is None else set(needed)) - set(known.values())
    facts: dict[str, list[tuple[str, object]]] = {
        " lacks {} {}": [(name, list(shapes[name])) for name in shapes if name in lacked and 0 not in shapes[name]],
        " has {} {}, which the model lacks": [(name, list(stored[name].shape)) for name in names if name not in known],
        ": shape of {} {}": [
            (name, f"{list(stored[name].shape)} must be {list(shapes[own])}")
            for name, own in known.items()
            if stored[name].shape != shapes[own]
        ],
        f": dtype of {{}} ({{}}) must be {TRAINABLE}: quantized weights cannot be trained": [
            (name, stored[name].dtype) for name in known if stored[name].dtype not in FLOATING
        ],
    }
    of = "" if state == MODEL else f"the {state} of "
    return [line for text, found in facts.items() for line in lines_of_layers(where, text, found, of)]


def find_sources(
    where: str, family: str, shapes: Shapes, stored: Mapping[str, TensorEntry]
) -> tuple[dict[str, list[str]], list[str]]:
    """Under which names a place holds each canonical tensor, the one to read first; and every mismatch.

    Names may be spelled as `spelling.py` says for the model's family.
    """
    spelled = weight_names(family)
    canonical = spelled.canonical(list(stored), set(shapes))
    sources: dict[str, list[str]] = {name: [] for name in shapes}
    for name, own in canonical.items():
        sources.setdefault(own, []).append(name)
    for own, names in sources.items():
        names.sort(key=lambda name: (name != own, name in spelled.tied))
    return sources, mismatches(where, shapes, stored, canonical=canonical)


def differing_copies(
    where: str, tensors: StoredTensors, sources: Mapping[str, Sequence[str]], boxes: Iterable[tuple[str, Box]]
) -> list[str]:
    """Second copies of a tied weight that differ from the first in one of the boxes (canonical name, box).

    Raises:
        StoreError: the weights cannot be read.
    """
    stored = tensors.states[MODEL]
    problems: dict[str, None] = {}
    for own, box in boxes:
        first, *copies = sources[own]
        for copy in copies:
            values = cast(tensors.read(MODEL, copy, box), stored[copy].dtype, stored[first].dtype)
            if not np.array_equal(tensors.read(MODEL, first, box), values):
                problems[f"{where}: {copy} must equal {first}: the model has one weight for both"] = None
    return list(problems)


def lines_of_layers(where: str, text: str, facts: Iterable[tuple[str, object]], of: str = "") -> Iterator[str]:
    """Lines `where` + `text`, one for all layers with the same fact.

    Args:
        where: names the place.
        text: a format of the name and the fact.
        facts: (name, fact); `h.0.ln.bias` … `h.11.ln.bias` are shown as `h.{0…11}.ln.bias`.
        of: stands before each name.
    """
    layers: dict[tuple[str, str], list[int]] = {}
    for name, fact in facts:
        numbers = layers.setdefault((_LAYER.sub("*", name, count=1), str(fact)), [])
        numbers += map(int, _LAYER.findall(name)[:1])
    for (pattern, fact), numbers in layers.items():
        runs = ", ".join(f"{a}…{b}" if a < b else f"{a}" for a, b in consecutive(sorted(numbers)))
        name = pattern.replace("*", runs if runs.isdigit() else f"{{{runs}}}", 1)
        yield where + text.format(of + name, fact)
