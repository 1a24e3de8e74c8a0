"""The tensors of a folder: those in a checkpoint's manifest, or plain Hugging Face weights.

Any box of a tensor can be read; it is put together from the stored pieces that overlap it. The second half compares the
tensors of a folder with those of a model: names, shapes, dtypes, and second copies of a tied weight.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwise.base.errors import ConfigError, DamageError, StoreError, listing
from shardwise.base.tensor_box import Box
from shardwise.checkpoint.format import weight_files
from shardwise.checkpoint.format.expert_weights import EXPERT_NUMBER, differing_expert_blocks, unfused_experts
from shardwise.checkpoint.format.manifest import MANIFEST, MODEL, Manifest, PieceEntry, TensorEntry
from shardwise.checkpoint.format.safetensors import DTYPES, FLOATING, Values, cast_values, read_header
from shardwise.checkpoint.storage.chunks import READ_BYTES, ChunkedReader, chunk_numbers_text, read_range
from shardwise.checkpoint.storage.root import Root
from shardwise.config import weight_names

Shapes = Mapping[str, tuple[int, ...]]
"""Canonical name → shape."""
TRAINABLE = "float64, float32, float16 or bfloat16"
"""The dtypes that a weight may have, for messages."""
_DIGITS = re.compile(r"(\d+)")
_LAYER = re.compile(r"(?<![^.])\d+(?=\.)")  # the part of a name that is a number; the first one is the layer's


@dataclass
class StoredTensors:
    """The tensors that a folder holds, read when they are asked for."""

    folder: Root
    states: Mapping[str, Mapping[str, TensorEntry]]  # state (`model`, `exp_avg`, …) → name → tensor
    manifest: Manifest | None  # manifest of a checkpoint; None for plain Hugging Face weights
    files: tuple[str, ...] = ()  # names of its weight files, where it has no manifest
    # Number of a file → reader that has read parts of it so far.
    readers: dict[int, ChunkedReader] = field(default_factory=dict)

    @staticmethod
    def of(folder: Root) -> StoredTensors:
        """Open a checkpoint or a folder of safetensors; ConfigError if it is neither, StoreError if it is not read."""
        if (folder / MANIFEST).exists():
            manifest = Manifest.read(folder)
            return StoredTensors(folder, manifest.tensors, manifest)
        files = weight_files.find_weight_files(folder)
        weights: dict[str, TensorEntry] = {}
        parts: dict[tuple[str, str, int], list[PieceEntry]] = {}
        damage: list[str] = []
        for number, path in enumerate(files):
            try:
                header = read_header(folder / path)
            except DamageError as error:
                damage.append(str(error))
                continue
            for name, tensor in header.items():
                piece = PieceEntry(number, tensor.start, Box(tensor.first or (0,) * len(tensor.shape), tensor.shape))
                weights[name] = TensorEntry(tensor.shape, tensor.dtype, (piece,))
                if tensor.first is not None:
                    parts.setdefault((name, tensor.dtype, len(tensor.shape)), []).append(piece)
        if damage:
            raise DamageError("; ".join(damage))
        weights |= _whole(folder, parts)
        return StoredTensors(folder, {MODEL: unfused_experts(folder, weights)}, None, files)

    def read(self, state: str, name: str, box: Box) -> Values:
        """A box of a tensor, its bits as `DTYPES` has them; shape `box.size`.

        Raises:
            DamageError: bytes of it do not match their checksum, or its pieces leave a gap in it.
            StoreError: its dtype is none of `DTYPES`.
        """
        tensor = self.states[state][name]
        if tensor.dtype not in DTYPES:
            raise StoreError(f"{self.folder}: the dtype of {name} ({tensor.dtype}) must be {listing(DTYPES, 'or')}")
        values = np.empty(box.size, DTYPES[tensor.dtype])
        covered = 0
        for piece in tensor.pieces:
            overlap = box.intersect(piece.box)
            if overlap is not None:
                part = self.read_part(piece, tensor.dtype, overlap.relative_to(piece.box))
                values[overlap.relative_to(box).slices] = part
                covered += overlap.numel
        if covered != box.numel:
            raise DamageError(f"{self.folder}: the pieces of {state}/{name} do not tile it")
        return values

    def read_part(self, piece: PieceEntry, dtype_name: str, box: Box) -> Values:
        """A box of a piece; `box` is counted from the start of the piece's box."""
        dtype = DTYPES[dtype_name]
        runs = box.runs(piece.box.size)
        # The reader of a checkpoint's file keeps its last chunk, so that the next run is often in memory already.
        if self.manifest is None and len(runs) > 1:
            return self._read_columns(piece, dtype_name, box)
        ranges = ((piece.offset + start * dtype.itemsize, length * dtype.itemsize) for start, length in runs)
        parts = [self._bytes(piece.file, start, start + length) for start, length in ranges]
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        return np.frombuffer(data, dtype).reshape(box.size)

    def _read_columns(self, piece: PieceEntry, dtype_name: str, box: Box) -> Values:
        """Some columns of a piece in a plain file, cut from its whole rows: else each row would take a read."""
        dtype = DTYPES[dtype_name]
        row_shape = piece.box.size[1:]
        row_bytes = Box.whole(row_shape).numel * dtype.itemsize
        step = max(1, READ_BYTES // row_bytes)
        columns = []
        for first in range(box.start[0], box.stop[0], step):
            last = min(first + step, box.stop[0])
            data = self._bytes(piece.file, piece.offset + first * row_bytes, piece.offset + last * row_bytes)
            rows = np.frombuffer(data, dtype).reshape(-1, *row_shape)
            columns.append(rows[(slice(None), *box.slices[1:])])
        return np.concatenate(columns)

    def _bytes(self, file: int, start: int, stop: int) -> bytes | memoryview:
        """Bytes of a file, verified where it is a checkpoint's: plain files have no checksums."""
        if self.manifest is not None:
            return self.reader(file).read(start, stop)
        return read_range(self.folder / self.files[file], start, stop)

    def reader(self, file: int) -> ChunkedReader:
        """The reader of a checkpoint's file, which is kept."""
        assert self.manifest is not None
        if file not in self.readers:
            self.readers[file] = ChunkedReader(self.folder, self.manifest.files[file])
        return self.readers[file]


def _whole(folder: Root, parts: Mapping[tuple[str, str, int], list[PieceEntry]]) -> dict[str, TensorEntry]:
    """The tensors whose parts (by name, dtype and dimensions) lie in several files; ConfigError if some are missing."""
    tensors: dict[str, TensorEntry] = {}
    incomplete: list[str] = []
    for (name, dtype, _), pieces in parts.items():
        shape = tuple(max(ends) for ends in zip(*(piece.box.stop for piece in pieces), strict=True))
        if name in tensors or sum(piece.box.numel for piece in pieces) != Box.whole(shape).numel:
            incomplete.append(name)
        tensors[name] = TensorEntry(shape, dtype, pieces)
    if incomplete:
        raise ConfigError(
            f"{folder} must have the files {weight_files.SHARDS} of all ranks of one save: parts of "
            f"{listing(incomplete, most=3)} are missing, or there twice"
        )
    return tensors


# ---- the order of states and names, and cuts of a tensor


def ordered_states(states: Iterable[str]) -> list[str]:
    """The states of a checkpoint by name, the model first."""
    return sorted(states, key=lambda state: (state != MODEL, state))


def ordered_names(names: Iterable[str]) -> list[str]:
    """Names of stored tensors in order, numbers in them by their value: layer 10 after layer 2."""
    # Every second part is a number without leading zeros: the longer one is the larger one.
    return sorted(names, key=lambda name: [(len(part) * part.isdigit(), part) for part in _DIGITS.split(name)])


# ---- the tensors of a folder against those of a model


def find_sources(
    where: str, family: str, shapes: Shapes, stored: Mapping[str, TensorEntry], files: Collection[str] = ()
) -> tuple[dict[str, list[str]], list[str]]:
    """The names under which a folder holds each canonical tensor, the one to read first; and every mismatch.

    Names may be spelled as `config/hugging_face_names.py` says for the model's family.

    Args:
        where: subject of the lines on mismatches.
        shapes: canonical tensors of the model.
        stored: name in the folder → tensor.
        files: names of the files, where a manifest does not tell that all are there.
    """
    spelled = weight_names(family)
    canonical_names = spelled.canonical(list(stored), set(shapes))
    sources: dict[str, list[str]] = {name: [] for name in shapes}
    for name, canonical_name in canonical_names.items():
        sources.setdefault(canonical_name, []).append(name)
    for canonical_name, names in sources.items():
        # The canonical spelling comes first, and the second copy of a tied weight last.
        names.sort(key=lambda name: (name != canonical_name, name in spelled.tied))
    absent = weight_files.absent_parts_problem(
        where, files, _ranks_of_parts(shapes, stored, sources) if weight_files.unconsolidated_files(files) else 0
    )
    return sources, absent or tensor_mismatches(where, shapes, stored, canonical=canonical_names)


def _ranks_of_parts(shapes: Shapes, stored: Mapping[str, TensorEntry], sources: Mapping[str, Sequence[str]]) -> int:
    """The least number of ranks that saved, where all matrices are cut short along one dim; 0 where they are not.

    No file says how many there were: each but the last has an equal part.
    """
    ranks = []
    for name, shape in shapes.items():
        for entry in (stored[source] for source in sources[name] if len(shape) > 1 and not EXPERT_NUMBER.search(name)):
            sizes = zip(shape, entry.shape, entry.pieces[0].box.size, strict=False)
            cut = [-(-full // max(1, part)) for full, length, part in sizes if length < full]
            ranks += cut if len(cut) == 1 else [0]
    return max(ranks, default=0) if all(ranks) else 0


def tensor_mismatches(
    where: str,
    shapes: Shapes,
    stored: Mapping[str, TensorEntry],
    *,
    canonical: Mapping[str, str] | None = None,
    needed: Iterable[str] | None = None,
    state: str = MODEL,
) -> list[str]:
    """Every way in which the tensors of a folder are not the model's; layers with the same problem share a line.

    Args:
        where: subject of the lines.
        shapes: canonical tensors of the model.
        stored: name in the folder → tensor.
        canonical: name in the folder → canonical name; other tensors there are no weights. Default: they are the same.
        needed: canonical names that must be there, unless they have no elements. Default: all of the model's.
        state: `model`, or the optimizer state that the tensors belong to.
    """
    canonical_names = {name: name for name in stored} if canonical is None else canonical
    needed_names = set(shapes) if needed is None else set(needed)
    missing = needed_names - set(canonical_names.values())
    lacks: list[tuple[str, object]] = [
        (name, list(shape)) for name, shape in shapes.items() if name in missing and 0 not in shape
    ]
    unknown: list[tuple[str, object]] = []
    wrong_shapes: list[tuple[str, object]] = []
    wrong_dtypes: list[tuple[str, object]] = []
    for name, canonical_name in canonical_names.items():
        tensor = stored[name]
        if canonical_name not in shapes:
            unknown.append((name, list(tensor.shape)))
            continue
        if tensor.shape != shapes[canonical_name]:
            wrong_shapes.append((name, f"{list(tensor.shape)} must be {list(shapes[canonical_name])}"))
        if tensor.dtype not in FLOATING:
            wrong_dtypes.append((name, tensor.dtype))
    prefix = "" if state == MODEL else f"the {state} of "
    blocks: list[str] = []
    if state == MODEL:
        blocks, is_explained = differing_expert_blocks(where, needed_names, canonical_names.values())
        lacks, unknown, wrong_shapes = (
            [fact for fact in facts if not is_explained(fact[0])] for facts in (lacks, unknown, wrong_shapes)
        )
    quantized = f": dtype of {{}} ({{}}) must be {TRAINABLE}: quantized weights cannot be trained"
    return [
        *blocks,
        *lines_of_layers(where, " lacks {} {}", lacks, prefix),
        *lines_of_layers(where, " has {} {}, which the model lacks", unknown, prefix),
        *lines_of_layers(where, ": shape of {} {}", wrong_shapes, prefix),
        *lines_of_layers(where, quantized, wrong_dtypes, prefix),
    ]


def differing_tied_copies(
    where: str, tensors: StoredTensors, sources: Mapping[str, Sequence[str]], boxes: Iterable[tuple[str, Box]]
) -> list[str]:
    """Stored second copies of a tied weight that differ from the first in one of the boxes (canonical name, box).

    Raises:
        StoreError: the weights cannot be read.
    """
    stored = tensors.states[MODEL]
    problems: dict[str, None] = {}
    for canonical_name, box in boxes:
        first, *copies = sources[canonical_name]
        for copy in copies:
            values = cast_values(tensors.read(MODEL, copy, box), stored[copy].dtype, stored[first].dtype)
            if not np.array_equal(tensors.read(MODEL, first, box), values):
                problems[f"{where}: {copy} must equal {first}: the model has one weight for both"] = None
    return list(problems)


def lines_of_layers(where: str, text: str, facts: Iterable[tuple[str, object]], prefix: str = "") -> Iterator[str]:
    """Lines `where` + `text` on stored tensors, one for all layers with the same fact.

    Args:
        where: subject of the lines.
        text: format of the name and the fact.
        facts: (name, fact); `h.0.ln.bias` … `h.11.ln.bias` are shown as `h.{0…11}.ln.bias`, and experts likewise.
        prefix: text before each name.
    """
    texts = [(name, str(fact)) for name, fact in facts]
    for part in (EXPERT_NUMBER, _LAYER):
        layers: dict[tuple[str, str], list[int]] = {}
        for name, fact_text in texts:
            numbers = layers.setdefault((part.sub("*", name, count=1), fact_text), [])
            numbers += map(int, part.findall(name)[:1])
        runs = {key: chunk_numbers_text(numbers) for key, numbers in layers.items()}
        texts = [
            (key[0].replace("*", text if text.isdigit() else f"{{{text}}}", 1), key[1]) for key, text in runs.items()
        ]
    for name, fact_text in texts:
        yield where + text.format(prefix + name, fact_text)
