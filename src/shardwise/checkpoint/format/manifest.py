"""`manifest.json`: contents of a checkpoint, the place of each tensor in its files, and the checksums of the files.

The manifest is written last: a folder without one is no checkpoint. It is canonical JSON (sorted keys, no spaces,
ASCII) with a digest of itself, so that a changed bit is found before any value is used. No value is trusted: names must
be inside the folder, offsets inside the files, boxes inside the tensors.

The pieces of a stored tensor are a table of numbers, which ranks send each other and search. The manifest of a 20
B-parameter model with its moments that 1,024 ranks saved (TP 8, ZeRO-1 over 128) has 560,000 pieces and 68 MB of
checksums. As objects the pieces take each rank 6 s to receive, and 460 MB; as numbers 0.1 s and 27 MB.
"""

from __future__ import annotations

import base64
import functools
import gc
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from shardwise.base.errors import DamageError, StoreError
from shardwise.base.files import name_problem
from shardwise.base.tensor_box import Box
from shardwise.base.units import size as size_text
from shardwise.checkpoint.format.safetensors import DTYPES, is_counts, tensor_fields
from shardwise.checkpoint.storage.chunks import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, FileEntry
from shardwise.checkpoint.storage.root import Root

MANIFEST = "manifest.json"
MODEL = "model"
"""The state whose tensors are the weights, each whole in a file under its own name."""
IMPORTED = {"imported": True}
"""`data` of a checkpoint whose steps another program did, with data of its own."""
FORMAT = "shardwise-checkpoint"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 2**30
"""About ten times the manifest of a 20 B-parameter model on 1,024 ranks."""
MAX_MANIFEST_VALUES = 2**25
"""About ten times those of the same manifest. A parsed value takes up to 240 bytes, so a manifest from an unknown
source takes at most 8 GB of memory; the limit on its length alone would allow 32 GB."""
_JSON_TYPES: dict[type, str] = {dict: "object", list: "array", str: "string"}
# Keys are sorted, so that the digest stands before the files, and in the first kilobytes of any manifest.
_DIGEST = re.compile(r'"digest":"xxh3_128:([0-9a-f]{32})",(?="files":)')


class ManifestError(StoreError):
    """A manifest is intact, and this version cannot use it."""


@dataclass(frozen=True)
class TensorEntry:
    """A canonical tensor in canonical orientation; its pieces tile it."""

    shape: tuple[int, ...]
    dtype: str
    pieces: Pieces | Sequence[PieceEntry]

    def nbytes(self, piece: PieceEntry) -> int:
        return piece.box.numel * DTYPES[self.dtype].itemsize

    @property
    def table(self) -> Pieces:
        """The pieces as a table, which they are where they were read."""
        return Pieces.of(self.pieces, len(self.shape))


@dataclass(frozen=True)
class Manifest:
    """The contents of the checkpoint of one step."""

    step: int  # updates done
    samples: int  # samples that were trained on
    position: int  # next sample of the data order; skipped samples count
    tokens: int  # tokens that were trained on
    config: Mapping[str, Any]  # resolved configuration
    layout: Mapping[str, Any]  # degrees of parallelism of the run that wrote it
    schedule: Mapping[str, Any]  # state of the learning rate's schedule
    data: Mapping[str, Any]  # identity of the data, and the run's id
    rng: Mapping[str, Any]  # state of the random number generators
    versions: Mapping[str, Any]  # versions of the programs that wrote it
    created: str  # date and time, in ISO 8601
    # Name, steps and names of its states; None where the checkpoint has weights alone.
    optimizer: Mapping[str, Any] | None
    losses: tuple[float, ...] = field(default=(), kw_only=True)  # losses of the last steps, whose mean a run shows
    # Hash of the state (`StateHash.recorded`); None where the run made none.
    state_hash: Mapping[str, Any] | None = field(default=None, kw_only=True)
    files: tuple[FileEntry, ...] = field(repr=False)  # every file of the folder but the manifest
    # State (`model`, `exp_avg`, …) → canonical name → tensor.
    tensors: Mapping[str, Mapping[str, TensorEntry]] = field(repr=False)

    def to_json(self) -> str:
        """Canonical JSON with its digest; floats in the mappings must be finite.

        Rank 0 writes it alone, and a large model by many ranks has a million pieces and hundreds of megabytes of
        checksums: each text is made once, and they are joined once, at the end.
        """
        values: dict[str, object] = {"format": FORMAT, "version": FORMAT_VERSION}
        # The last two are `files` and `tensors`, whose texts are made below.
        values |= {field_.name: getattr(self, field_.name) for field_ in fields(self)[:-2]}
        if self.state_hash is None:
            del values["state_hash"]
        members = {key: [_canonical(value)] for key, value in values.items()}
        members["files"] = _array([_file_text(file) for file in self.files])
        states: dict[str, list[str]] = {}
        for state, tensors in self.tensors.items():
            states[state] = _object({name: [_tensor_text(tensor)] for name, tensor in tensors.items()})
        members["tensors"] = _object(states)
        digest = xxhash.xxh3_128()
        for text in _object(members):
            digest.update(text.encode())
        return "".join([*_object({**members, "digest": [_canonical(f"xxh3_128:{digest.hexdigest()}")]}), "\n"])

    @staticmethod
    def from_json(text: str, where: str) -> Manifest:
        """The manifest in `text`; `where` names it in messages.

        Raises:
            DamageError: it is not what was written. ManifestError: another version's, or it contradicts itself.
        """
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            raise DamageError(f"{where} is damaged: it is no JSON") from None
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise DamageError(f"{where} is damaged: its format must be {FORMAT}")
        # The version comes before the digest: another version may compute it otherwise.
        _require_version(fields, where)
        if not _matches_digest(text):
            raise DamageError(f"{where} is damaged: it does not match its digest")
        try:
            return _manifest(fields)
        except ValueError as error:
            raise ManifestError(f"{where} cannot be used: {error}") from None

    @staticmethod
    def read(folder: Root) -> Manifest:
        """The manifest of a checkpoint's folder.

        Raises:
            StoreError: there is none (`missing`), or it cannot be read. DamageError, ManifestError: as `from_json`.
        """
        file = folder / MANIFEST
        # Before it is read: a manifest from an unknown source must not fill the memory.
        if problem := _too_long(file.size()):
            raise DamageError(f"{file} is damaged: {problem}")
        try:
            text = file.read().decode("ascii")
        except UnicodeDecodeError:
            raise DamageError(f"{file} is damaged: it has bytes that are not ASCII") from None
        if problem := manifest_size_problem(text):
            raise DamageError(f"{file} is damaged: {problem}")
        # The garbage collector would take half of the time: it searches a million small objects again and again.
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            return Manifest.from_json(text, str(file))
        finally:
            if is_collecting:
                gc.enable()


def piece_label(state: str, name: str, shape: tuple[int, ...], box: Box) -> str:
    """The name of a box of a tensor in a checkpoint's file: a weight has its own name, others STATE/NAME@START."""
    if state == MODEL and box == Box.whole(shape):
        return name
    return f"{state}/{name}@{','.join(map(str, box.start))}"


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _matches_digest(text: str) -> bool:
    """True if the digest in a manifest is that of the text around it: to write the text again would take seconds."""
    match = _DIGEST.search(text)
    if match is None or not text.endswith("\n"):
        return False
    # The text may have hundreds of megabytes, of which a view copies none.
    data = memoryview(text.encode())
    digest = xxhash.xxh3_128(data[: match.start()])
    digest.update(data[match.end() : -1])
    return digest.hexdigest() == match[1]


def manifest_size_problem(text: str) -> str | None:
    """The reason why reading a manifest would take too much memory or time, or None."""
    values = text.count(",") + 1
    if values > MAX_MANIFEST_VALUES:
        return f"it must have at most {MAX_MANIFEST_VALUES:,} values, and it has about {values:,}"
    return _too_long(len(text))


def _too_long(length: int) -> str | None:
    if length <= MAX_MANIFEST_BYTES:
        return None
    return f"its length ({size_text(length)}) must be at most {size_text(MAX_MANIFEST_BYTES)}"


def _object(members: Mapping[str, Sequence[str]]) -> list[str]:
    texts: list[str] = []
    separator = "{"
    for name in sorted(members):
        texts += [f"{separator}{_canonical(name)}:", *members[name]]
        separator = ","
    return [*texts, "}"] if texts else ["{}"]


def _array(items: Sequence[str]) -> list[str]:
    texts: list[str] = []
    for item in items:
        texts += ["," if texts else "[", item]
    return [*texts, "]"] if texts else ["[]"]


def _file_text(file: FileEntry) -> str:
    # base64 has no character that JSON escapes.
    checksums = base64.b64encode(file.checksums).decode()
    path = _canonical(file.path)
    return f'{{"bytes":{file.bytes},"checksums":"{checksums}","chunk_bytes":{file.chunk_bytes},"path":{path}}}'


def _tensor_text(tensor: TensorEntry) -> str:
    # One formatting of all numbers is many times faster than `json.dumps` of nested lists.
    box = ",".join(["%d"] * len(tensor.shape))
    rows = ",".join([f"[%d,%d,[{box}],[{box}]]"] * len(tensor.pieces))
    pieces = f"[{rows % tuple(tensor.table.table.ravel().tolist())}]"
    return f'{{"dtype":{_canonical(tensor.dtype)},"pieces":{pieces},"shape":{_canonical(tensor.shape)}}}'


def _require_version(fields: Mapping[str, Any], where: str) -> None:
    version = fields.get("version")
    if type(version) is not int or version < 1:
        raise DamageError(f"{where} is damaged: its version ({version!r}) must be a whole number from 1 on")
    if version > FORMAT_VERSION:
        versions = fields.get("versions")
        writer = versions.get("shardwise") if isinstance(versions, dict) else None
        release = "a newer one"
        if isinstance(writer, str) and writer.isprintable():
            release = f"shardwise ≥ {writer}, which wrote it"
        raise ManifestError(
            f"the format version of {where} ({version}) must be at most the one that this shardwise reads "
            f"({FORMAT_VERSION}): it is read by {release}"
        )


# ---- from JSON values to entries: every value is checked before it is used, and ValueError says what is wrong


def _manifest(plain: Mapping[str, Any]) -> Manifest:
    optimizer = plain.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, dict):
        raise ValueError("optimizer must be an object or null")
    state_hash = plain.get("state_hash")
    if state_hash is not None and not isinstance(state_hash, dict):
        raise ValueError("state_hash must be an object")
    files = tuple(_file(entry) for entry in _value(plain, "files", list))
    lengths = np.array([file.bytes for file in files], dtype=np.int64)
    paths = [file.path for file in files]
    if len(set(paths)) < len(paths):
        raise ValueError("files must name each file once")
    tensors: dict[str, dict[str, TensorEntry]] = {}
    states = _value(plain, "tensors", dict)
    for state in states:
        entries = _value(states, state, dict)
        tensors[state] = {name: _tensor(f"{state}/{name}", entries[name], lengths) for name in entries}
    _require_disjoint(tensors)
    known: dict[str, Any] = {key: _count(plain, key) for key in ("step", "samples", "position", "tokens")}
    for key in ("config", "layout", "schedule", "data", "rng", "versions"):
        known[key] = _value(plain, key, dict)
    known |= {"created": _value(plain, "created", str), "losses": _losses(plain, known["schedule"])}
    return Manifest(**known, optimizer=optimizer, files=files, tensors=tensors, state_hash=state_hash)


def _losses(plain: Mapping[str, Any], schedule: dict[str, Any]) -> tuple[float, ...]:
    """The last losses. Older checkpoints have none, or have them in `schedule`, from which they are taken."""
    # Popped also where `losses` is there: the schedule's state must not take it for its own.
    earlier = schedule.pop("recent_losses", [])
    losses = plain.get("losses", earlier)
    if not isinstance(losses, list) or not all(type(loss) in (int, float) for loss in losses):
        raise ValueError("losses must be a JSON array of numbers")
    return tuple(losses)


def _file(plain: object) -> FileEntry:
    if not isinstance(plain, dict):
        raise ValueError("files must be JSON objects")
    path = _value(plain, "path", str)
    encoded = _value(plain, "checksums", str)
    length = _count(plain, "bytes")
    chunk = _count(plain, "chunk_bytes")
    if name_problem(path, nested=True) is not None or not path.isprintable() or path == MANIFEST:
        raise ValueError(f"the path of a file ({path!r}) must be a plain name in the checkpoint's folder")
    if not MIN_CHUNK_BYTES <= chunk <= MAX_CHUNK_BYTES or chunk.bit_count() != 1:
        limits = f"{size_text(MIN_CHUNK_BYTES)} to {size_text(MAX_CHUNK_BYTES)}"
        raise ValueError(f"chunk_bytes of {path} ({chunk}) must be a power of two from {limits}")
    try:
        checksums = base64.b64decode(encoded, validate=True)
    except ValueError:
        # No multiple of 8 bytes, so it is refused below.
        checksums = b"none"
    file = FileEntry(path, length, chunk, checksums)
    if len(checksums) != 8 * file.chunks:
        raise ValueError(f"{path} must have {file.chunks} checksums of 8 bytes")
    return file


def _tensor(name: str, plain: object, lengths: Numbers) -> TensorEntry:
    fields, dtype, shape = tensor_fields(name, plain)
    if dtype not in DTYPES:
        raise ValueError(f"the dtype of {name} ({dtype!r}) must be one of {', '.join(DTYPES)}")
    pieces = Pieces.of_json(_value(fields, "pieces", list), len(shape))
    if pieces is None:
        raise ValueError(
            f"the pieces of {name} must be [file, offset, start, size], start and size with {len(shape)} whole numbers"
        )
    # All pieces are looked at together, and no sum or product here can overflow.
    if not (pieces.files < len(lengths)).all():
        raise ValueError(f"the pieces of {name} must be in files that are listed")
    if not (pieces.starts <= np.array(shape, dtype=np.int64) - pieces.sizes).all():
        raise ValueError(f"the pieces of {name} must lie in its shape ({list(shape)})")
    # No file is as long as a product that is not exact: its checksums would not fit in a manifest.
    nbytes = pieces.sizes.prod(axis=1, dtype=np.float64) * DTYPES[dtype].itemsize
    if not (pieces.offsets <= lengths[pieces.files] - nbytes).all():
        raise ValueError(f"the pieces of {name} must lie in their files")
    return TensorEntry(shape, dtype, pieces)


def _require_disjoint(tensors: Mapping[str, Mapping[str, TensorEntry]]) -> None:
    """Raise ValueError where two tensors share a byte: to read all tensors is to read no more than the files hold."""
    # Pairs: a state `a/b` with a tensor `c` has the label of a state `a` with a tensor `b/c`.
    entries = [(f"{state}/{name}", tensor) for state, named in tensors.items() for name, tensor in named.items()]
    if not entries:
        return
    entries.sort(key=lambda entry: entry[0])
    labels = [label for label, _ in entries]
    tables = [tensor.table for _, tensor in entries]
    # One row for each piece of all tensors, sorted by its bytes: only neighbours can overlap first.
    tensor_of_piece = np.repeat(np.arange(len(labels)), [len(table) for table in tables])
    files = np.concatenate([table.files for table in tables])
    starts = np.concatenate([table.offsets for table in tables])
    lengths = [
        table.sizes.prod(axis=1) * DTYPES[tensor.dtype].itemsize
        for (_, tensor), table in zip(entries, tables, strict=True)
    ]
    stops = starts + np.concatenate(lengths)
    order = np.lexsort((stops, starts, files))
    files = files[order]
    starts = starts[order]
    stops = stops[order]
    shared = np.flatnonzero((files[:-1] == files[1:]) & (stops[:-1] > starts[1:]))
    if len(shared):
        first, second = (labels[tensor_of_piece[order[at]]] for at in (shared[0], shared[0] + 1))
        raise ValueError(f"{first} and {second} must not share bytes of a file")


def _value(plain: Mapping[str, Any], key: str, kind: type) -> Any:
    """The value of a key; ValueError where it is missing or of another type."""
    value = plain.get(key)
    if not isinstance(value, kind):
        raise ValueError(f"{key} must be a JSON {_JSON_TYPES[kind]}")
    return value


def _count(plain: Mapping[str, Any], key: str) -> int:
    values = [plain.get(key)]
    if not is_counts(values):
        raise ValueError(f"{key} ({values[0]!r}) must be a whole number")
    return values[0]


Numbers: TypeAlias = npt.NDArray[np.int64]
_COMPARED_AT_ONCE = 2**22  # pairs of a box and a piece that are compared at once: a few megabytes of flags


@dataclass(frozen=True)
class PieceEntry:
    """A box of a tensor, contiguous and row-major from byte `offset` of file number `file`."""

    file: int
    offset: int
    box: Box


class Pieces:
    """Pieces as a table of numbers, which become entries when they are asked for.

    Args:
        table: `[pieces, 2 + 2·dims]`: file, offset, start of the box, size of the box.
    """

    def __init__(self, table: Numbers) -> None:
        self.table = table

    @staticmethod
    def of(pieces: Pieces | Sequence[PieceEntry], dims: int) -> Pieces:
        if isinstance(pieces, Pieces):
            return pieces
        return Pieces.of_rows([(piece.file, piece.offset, *piece.box.start, *piece.box.size) for piece in pieces], dims)

    @staticmethod
    def of_rows(rows: Sequence[Sequence[int]], dims: int) -> Pieces:
        return Pieces(np.array(rows, dtype=np.int64).reshape(len(rows), 2 + 2 * dims))

    @staticmethod
    def of_json(entries: list[Any], dims: int) -> Pieces | None:
        """Pieces from JSON lists `[file, offset, start, size]`; None where one has anything but such whole numbers.

        A large model has a million pieces: all of them are looked at together.
        """
        if not entries:
            return Pieces.of_rows((), dims)
        if set(map(type, entries)) != {list} or set(map(len, entries)) != {4}:
            return None
        files, offsets, starts, sizes = zip(*entries, strict=True)
        boxes = (*starts, *sizes)
        if set(map(type, boxes)) != {list} or set(map(len, boxes)) != {dims}:
            return None
        numbers = [*files, *offsets, *itertools.chain.from_iterable(boxes)]
        # A bool is no whole number, and Python counts it as an int: so types are compared.
        if set(map(type, numbers)) != {int}:
            return None
        try:
            flat = np.array(numbers, dtype=np.int64)
        except OverflowError:
            return None
        if flat.min() < 0:
            return None
        # `flat` has all files, all offsets, the starts of all boxes and the sizes of all boxes, one after the other.
        files_and_offsets, box_numbers = np.split(flat, [2 * len(entries)])
        columns = (files_and_offsets.reshape(2, -1).T, *box_numbers.reshape(2, len(entries), dims))
        return Pieces(np.concatenate(columns, axis=1))

    def __len__(self) -> int:
        return len(self.table)

    def __eq__(self, pieces: object) -> bool:
        return isinstance(pieces, Pieces | Sequence) and list(self) == list(pieces)

    __hash__ = None  # type: ignore[assignment]  # as a list has none: the table can be large

    def __getitem__(self, index: int) -> PieceEntry:
        return _entry(self.table[index].tolist())

    def __iter__(self) -> Iterator[PieceEntry]:
        return map(_entry, self.table.tolist())

    @property
    def files(self) -> Numbers:
        return self.table[:, 0]

    @property
    def offsets(self) -> Numbers:
        return self.table[:, 1]

    @property
    def starts(self) -> Numbers:
        """`[pieces, dims]`."""
        return self.table[:, 2 : 2 + self._dims]

    @property
    def sizes(self) -> Numbers:
        """`[pieces, dims]`."""
        return self.table[:, 2 + self._dims :]

    @property
    def _dims(self) -> int:
        return int(self.table.shape[1]) // 2 - 1

    def meeting(self, boxes: Numbers) -> tuple[Numbers, Numbers]:
        """Pairs of a box and a piece that share elements, by box and then by piece.

        All are compared with all, some millions at a time: a thousand boxes in a thousand pieces take milliseconds.

        Args:
            boxes: `[boxes, 2, dims]`: start and size.

        Returns:
            the boxes' numbers and the pieces' numbers, one of each for a pair.
        """
        box_numbers = [np.empty(0, np.int64)]
        piece_numbers = [np.empty(0, np.int64)]
        at_once = max(1, _COMPARED_AT_ONCE // max(1, len(self)))
        for first in range(0, len(boxes), at_once):
            starts = boxes[first : first + at_once, 0, :, None]
            stops = starts + boxes[first : first + at_once, 1, :, None]
            meets = np.ones((len(starts), len(self)), dtype=np.bool_)
            for dim, (piece_starts, piece_stops) in enumerate(self._spans):
                meets &= (piece_starts < stops[:, dim]) & (piece_stops > starts[:, dim])
            numbers, pieces = meets.nonzero()
            box_numbers.append(numbers + first)
            piece_numbers.append(pieces)
        return np.concatenate(box_numbers), np.concatenate(piece_numbers)

    @functools.cached_property
    def _spans(self) -> list[tuple[Numbers, Numbers]]:
        """For each dim the starts and stops of the pieces, contiguous, which numpy compares fastest."""
        return [(start.copy(), start + size) for start, size in zip(self.starts.T, self.sizes.T, strict=True)]


def _entry(row: list[int]) -> PieceEntry:
    file, offset, *box = row
    dims = len(box) // 2
    return PieceEntry(file, offset, Box(tuple(box[:dims]), tuple(box[dims:])))


_PAIRS_AT_ONCE = 2**20  # pairs of boxes that are compared at once: some tens of megabytes of indices


def untiled_tensors(tensors: Mapping[str, Mapping[str, TensorEntry]]) -> list[str]:
    """The tensors of a manifest whose pieces do not tile them, with the reason."""
    return [
        f"the pieces of {state}/{name} {problem}"
        for state, named in tensors.items()
        for name, tensor in named.items()
        if (problem := _tiling_problem(tensor.shape, tensor.table))
    ]


def _tiling_problem(shape: tuple[int, ...], pieces: Pieces) -> str | None:
    """The reason why the stored pieces of a tensor, each inside its shape, do not tile it.

    None where every element is in exactly one of them: they do not overlap, and have as many elements as the shape.
    """
    numels = pieces.sizes.prod(axis=1)
    starts = pieces.starts[numels > 0]
    sizes = pieces.sizes[numels > 0]
    if len(starts) > 1:
        if not shape:
            return "overlap: it has one element"
        pair = _overlap(starts, starts + sizes)
        if pair is not None:
            first, second = (
                ", ".join(f"{a}:{a + n}" for a, n in zip(starts[at].tolist(), sizes[at].tolist(), strict=True))
                for at in pair
            )
            return f"overlap: [{first}] and [{second}]"
    covered = int(numels.sum())
    total = math.prod(shape)
    return None if covered == total else f"leave a gap: they cover {covered:,} of its {total:,} elements"


def _overlap(starts: Numbers, stops: Numbers) -> tuple[int, int] | None:
    """The numbers of two boxes that share an element; none of them is empty. `starts`, `stops`: `[boxes, dims]`.

    Along the dim with the most different starts, only boxes that overlap in it are compared, a million pairs at a time.
    """
    dim = max(range(starts.shape[1]), key=lambda i: len(np.unique(starts[:, i])))
    order = np.argsort(starts[:, dim], kind="stable")
    starts = starts[order]
    stops = stops[order]
    boxes = np.arange(len(starts))
    # Of the boxes behind a box in this order, the first `candidates` begin before it ends: these alone may overlap it.
    candidates = np.searchsorted(starts[:, dim], stops[:, dim]) - boxes - 1
    for block in np.split(boxes, np.flatnonzero(np.diff(np.cumsum(candidates) // _PAIRS_AT_ONCE)) + 1):
        # For box b with c candidates, the pairs (b, b + 1), (b, b + 2), ..., (b, b + c).
        count = candidates[block]
        first = np.repeat(block, count)
        pairs_before = np.repeat(np.cumsum(count) - count, count)
        second = first + 1 + np.arange(len(first)) - pairs_before
        shared = np.flatnonzero(((starts[second] < stops[first]) & (starts[first] < stops[second])).all(axis=1))
        if len(shared):
            # The pair whose later box comes first.
            pair = shared[np.lexsort((first[shared], second[shared]))[0]]
            return int(order[first[pair]]), int(order[second[pair]])
    return None
