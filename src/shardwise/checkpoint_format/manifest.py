"""`manifest.json`: what a checkpoint holds, where each tensor is in its files, and the checksums of the files.

The manifest is written last: a folder without one is no checkpoint. It is canonical JSON (sorted keys, no spaces,
ASCII) with a digest of itself, so that a changed bit is found before any value is used. No value is trusted: names must
be inside the folder, offsets inside the files, boxes inside the tensors.
"""

from __future__ import annotations

import base64
import binascii
import gc
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

import numpy as np
import xxhash

from shardwise.boxes import Box
from shardwise.checkpoint_format.pieces import Numbers, PieceEntry, Pieces
from shardwise.checkpoint_format.safetensors import DTYPES, is_counts, tensor_fields
from shardwise.names import name_problem
from shardwise.storage.chunks import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, FileEntry
from shardwise.storage.root import DamageError, Root, StoreError
from shardwise.units import size as size_text

MANIFEST = "manifest.json"
MODEL = "model"
"""The state whose tensors are the weights, each whole in a file under its own name."""
FORMAT = "shardwise-checkpoint"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES, MAX_MANIFEST_VALUES = 2**30, 2**25
"""About ten times the manifest of a 20 B-parameter model on 1,024 ranks. A parsed value takes up to 240 bytes,
so a manifest from an unknown source takes at most 8 GB of memory; the limit on its length alone would allow 32 GB."""
_KINDS: dict[type, str] = {dict: "object", list: "array", str: "string"}
_DIGEST = re.compile(r'"digest":"xxh3_128:([0-9a-f]{32})",(?="files":)')


class ManifestError(StoreError):
    """A manifest is intact, and this version cannot use it."""


@dataclass(frozen=True)
class TensorEntry:
    """A canonical tensor in canonical orientation; its pieces tile it."""

    shape: tuple[int, ...]
    dtype: str
    pieces: Sequence[PieceEntry]

    def nbytes(self, piece: PieceEntry) -> int:
        return piece.box.numel * DTYPES[self.dtype].itemsize

    @property
    def table(self) -> Pieces:
        """The pieces as a table, which they are where they were read."""
        return Pieces.of(self.pieces, len(self.shape))


@dataclass(frozen=True)
class Manifest:
    """What the checkpoint of one step holds.

    Attributes:
        step: updates done.
        samples: samples that were trained on.
        position: next sample of the data order; skipped samples count.
        tokens: tokens that were trained on.
        config: as it was resolved.
        layout: degrees of parallelism of the run that wrote it.
        schedule: state of the learning rate's schedule.
        data: identity of the data, and the run's id.
        rng: state of the random number generators.
        versions: of the programs that wrote it.
        created: date and time, in ISO 8601.
        optimizer: name, steps and names of its states; None where the checkpoint has weights alone.
        losses: of the last steps, whose mean a run shows.
        files: every file of the folder but the manifest.
        tensors: state (`model`, `exp_avg`, …) → canonical name → tensor.
    """

    step: int
    samples: int
    position: int
    tokens: int
    config: Mapping[str, Any]
    layout: Mapping[str, Any]
    schedule: Mapping[str, Any]
    data: Mapping[str, Any]
    rng: Mapping[str, Any]
    versions: Mapping[str, Any]
    created: str
    optimizer: Mapping[str, Any] | None
    losses: tuple[float, ...] = field(default=(), kw_only=True)
    files: tuple[FileEntry, ...] = field(repr=False)
    tensors: Mapping[str, Mapping[str, TensorEntry]] = field(repr=False)

    def to_json(self) -> str:
        """Canonical JSON with its digest; floats in the mappings must be finite.

        Rank 0 writes it alone, and a large model by many ranks has a million pieces and hundreds of megabytes of
        checksums: each text is made once, and they are joined once, at the end.
        """
        plain = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            **{field_.name: getattr(self, field_.name) for field_ in fields(self)[:-2]},
        }
        states = {
            state: _object({name: [_tensor_text(tensor)] for name, tensor in tensors.items()})
            for state, tensors in self.tensors.items()
        }
        members = {key: [_canonical(value)] for key, value in plain.items()} | {
            "files": ["[", *(f"{',' * (i > 0)}{_file_text(file)}" for i, file in enumerate(self.files)), "]"],
            "tensors": _object(states),
        }
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
            plain = json.loads(text)
        except (ValueError, RecursionError):
            raise DamageError(f"{where} is damaged: it is no JSON") from None
        if not isinstance(plain, dict) or plain.get("format") != FORMAT:
            raise DamageError(f"{where} is damaged: its format must be {FORMAT}")
        _require_version(plain, where)
        if not _matches_digest(text):
            raise DamageError(f"{where} is damaged: it does not match its digest")
        try:
            return _manifest(plain)
        except ValueError as error:
            raise ManifestError(f"{where} cannot be used: {error}") from None

    @staticmethod
    def read(folder: Root) -> Manifest:
        """The manifest of a checkpoint's folder.

        Raises:
            StoreError: there is none (`missing`), or it cannot be read. DamageError, ManifestError: as `from_json`.
        """
        file = folder / MANIFEST
        if problem := _too_long(file.size()):
            raise DamageError(f"{file} is damaged: {problem}")
        try:
            text = file.read().decode("ascii")
        except UnicodeDecodeError:
            raise DamageError(f"{file} is damaged: it has bytes that are not ASCII") from None
        if problem := too_large(text):
            raise DamageError(f"{file} is damaged: {problem}")
        # The garbage collector would take half of the time: it searches a million small objects again and again.
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            return Manifest.from_json(text, str(file))
        finally:
            if is_collecting:
                gc.enable()


def label(state: str, name: str, shape: tuple[int, ...], box: Box) -> str:
    """The name of a box of a tensor in its file: a weight has its own name, others STATE/NAME@START."""
    if state == MODEL and box == Box.whole(shape):
        return name
    return f"{state}/{name}@{','.join(map(str, box.start))}"


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _matches_digest(text: str) -> bool:
    """Whether the digest in a manifest is that of the text around it: to write the text again would take seconds."""
    match = _DIGEST.search(text)
    if match is None or not text.endswith("\n"):
        return False
    data = memoryview(text.encode())  # of hundreds of megabytes, so no slice of it is copied
    digest = xxhash.xxh3_128(data[: match.start()])
    digest.update(data[match.end() : -1])
    return digest.hexdigest() == match[1]


def too_large(text: str) -> str | None:
    """Why reading a manifest would take too much memory or time, or None."""
    if (values := text.count(",") + 1) > MAX_MANIFEST_VALUES:
        return f"it must have at most {MAX_MANIFEST_VALUES:,} values, and it has about {values:,}"
    return _too_long(len(text))


def _too_long(length: int) -> str | None:
    if length <= MAX_MANIFEST_BYTES:
        return None
    return f"its length ({size_text(length)}) must be at most {size_text(MAX_MANIFEST_BYTES)}"


def _object(members: Mapping[str, Sequence[str]]) -> list[str]:
    """The canonical object of members whose values are texts in parts already; in parts too."""
    texts = ["{"]
    for number, name in enumerate(sorted(members)):
        texts += [f"{',' if number else ''}{_canonical(name)}:", *members[name]]
    return [*texts, "}"]


def _file_text(file: FileEntry) -> str:
    checksums = base64.b64encode(file.checksums).decode()  # no character of which JSON has to escape
    path = _canonical(file.path)
    return f'{{"bytes":{file.bytes},"checksums":"{checksums}","chunk_bytes":{file.chunk_bytes},"path":{path}}}'


def _tensor_text(tensor: TensorEntry) -> str:
    box = ",".join(["%d"] * len(tensor.shape))
    rows = ",".join([f"[%d,%d,[{box}],[{box}]]"] * len(tensor.pieces))
    numbers = f"[{rows % tuple(tensor.table.table.ravel().tolist())}]"
    return f'{{"dtype":{_canonical(tensor.dtype)},"pieces":{numbers},"shape":{_canonical(tensor.shape)}}}'


def _require_version(plain: Mapping[str, Any], where: str) -> None:
    version = plain.get("version")
    if type(version) is not int or version < 1:
        raise DamageError(f"{where} is damaged: its version ({version!r}) must be a whole number from 1 on")
    if version > FORMAT_VERSION:
        versions = plain.get("versions")
        writer = versions.get("shardwise") if isinstance(versions, dict) else None
        is_known = isinstance(writer, str) and writer.isprintable()
        release = f"shardwise ≥ {writer}, which wrote it" if is_known else "a newer one"
        raise ManifestError(
            f"the format version of {where} ({version}) must be at most the one that this shardwise reads "
            f"({FORMAT_VERSION}): it is read by {release}"
        )


# ---- from JSON values to entries: every value is checked before it is used, and ValueError says what is wrong


def _manifest(plain: Mapping[str, Any]) -> Manifest:
    optimizer = plain.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, dict):
        raise ValueError("optimizer must be an object or null")
    files = tuple(_file(entry) for entry in _of(plain, "files", list))
    totals = np.array([file.bytes for file in files], dtype=np.int64)
    paths = [file.path for file in files]
    if len(set(paths)) < len(paths):
        raise ValueError("files must name each file once")
    tensors: dict[str, dict[str, TensorEntry]] = {}
    for state in (stored := _of(plain, "tensors", dict)):
        named = _of(stored, state, dict)
        tensors[state] = {name: _tensor(f"{state}/{name}", named[name], files, totals) for name in named}
    _require_disjoint(tensors)
    counts: dict[str, Any] = {key: _count(plain, key) for key in ("step", "samples", "position", "tokens")}
    objects = {key: _of(plain, key, dict) for key in ("config", "layout", "schedule", "data", "rng", "versions")}
    created = _of(plain, "created", str)
    losses = _losses(plain, objects["schedule"])
    return Manifest(
        **counts, **objects, created=created, optimizer=optimizer, files=files, tensors=tensors, losses=losses
    )


def _losses(plain: Mapping[str, Any], schedule: dict[str, Any]) -> tuple[float, ...]:
    """The last losses. Older checkpoints have none, or have them in `schedule`, from which they are taken."""
    earlier = schedule.pop("recent_losses", [])
    losses = plain.get("losses", earlier)
    if not isinstance(losses, list) or not all(type(loss) in (int, float) for loss in losses):
        raise ValueError("losses must be a JSON array of numbers")
    return tuple(losses)


def _file(plain: object) -> FileEntry:
    if not isinstance(plain, dict):
        raise ValueError("files must be JSON objects")
    path, packed = _of(plain, "path", str), _of(plain, "checksums", str)
    total, chunk = _count(plain, "bytes"), _count(plain, "chunk_bytes")
    if name_problem(path, nested=True) is not None or not path.isprintable() or path == MANIFEST:
        raise ValueError(f"the path of a file ({path!r}) must be a plain name in the checkpoint's folder")
    if not MIN_CHUNK_BYTES <= chunk <= MAX_CHUNK_BYTES or chunk.bit_count() != 1:
        limits = f"{size_text(MIN_CHUNK_BYTES)} to {size_text(MAX_CHUNK_BYTES)}"
        raise ValueError(f"chunk_bytes of {path} ({chunk}) must be a power of two from {limits}")
    try:
        checksums = base64.b64decode(packed, validate=True)
    except (binascii.Error, ValueError):
        checksums = b"none"
    file = FileEntry(path, total, chunk, checksums)
    if len(checksums) != 8 * file.chunks:
        raise ValueError(f"{path} must have {file.chunks} checksums of 8 bytes")
    return file


def _tensor(name: str, plain: object, files: tuple[FileEntry, ...], totals: Numbers) -> TensorEntry:
    """`totals`: the length of each file."""
    fields, dtype, shape = tensor_fields(name, plain)
    entries = _of(fields, "pieces", list)
    pieces, tensor = Pieces.of_json(entries, len(shape)), TensorEntry(shape, dtype, ())
    if pieces is None or not _fit(pieces, tensor, totals):
        _refuse(name, entries, tensor, files)
    return replace(tensor, pieces=pieces)


def _fit(pieces: Pieces, tensor: TensorEntry, totals: Numbers) -> bool:
    """Whether each piece lies in the tensor, and in a file that is listed. No sum or product here can overflow."""
    if (
        not (pieces.files < len(totals)).all()
        or not (pieces.starts <= np.array(tensor.shape, dtype=np.int64) - pieces.sizes).all()
    ):
        return False
    # No file is as long as a product that is not exact: its checksums would not fit in a manifest.
    nbytes = pieces.sizes.prod(axis=1, dtype=np.float64) * DTYPES[tensor.dtype].itemsize
    return bool((pieces.offsets <= totals[pieces.files] - nbytes).all())


def _refuse(name: str, entries: list[Any], tensor: TensorEntry, files: tuple[FileEntry, ...]) -> NoReturn:
    """Raise ValueError with what is wrong with the first piece that does not fit."""
    shape = tensor.shape
    for entry in entries:
        right = isinstance(entry, list) and len(entry) == 4 and is_counts(entry[:2])
        if not (right and is_counts(entry[2]) and is_counts(entry[3])) or not (
            len(entry[2]) == len(entry[3]) == len(shape)
        ):
            numbers = f"start and size with {len(shape)} numbers"
            raise ValueError(f"a piece of {name} must be [file, offset, start, size], {numbers}")
        file, offset, start, size = entry
        if not all(a + n <= whole for a, n, whole in zip(start, size, shape, strict=True)):
            raise ValueError(f"a piece of {name} (start {start}, size {size}) must lie in its shape ({list(shape)})")
        if file >= len(files):
            raise ValueError(f"a piece of {name} must be in a file that is listed")
        piece = PieceEntry(file, offset, Box(tuple(start), tuple(size)))
        end, total = offset + tensor.nbytes(piece), files[file].bytes
        if end > total:
            raise ValueError(f"a piece of {name} (to byte {end}) must lie in its file ({total} bytes)")
    raise AssertionError("one of the pieces does not fit")


def _require_disjoint(tensors: Mapping[str, Mapping[str, TensorEntry]]) -> None:
    """No two tensors share a byte: to read all tensors is to read no more than the files hold."""
    labelled = [(f"{state}/{name}", tensor) for state, named in tensors.items() for name, tensor in named.items()]
    entries = sorted(labelled, key=lambda item: item[0])
    if not entries:
        return
    tables = [tensor.table for _, tensor in entries]
    owners = np.repeat(np.arange(len(entries)), [len(table) for table in tables])
    files, starts = (np.concatenate(columns) for columns in zip(*((t.files, t.offsets) for t in tables), strict=True))
    widths = [DTYPES[tensor.dtype].itemsize for _, tensor in entries]
    stops = starts + np.concatenate([t.sizes.prod(axis=1) * width for t, width in zip(tables, widths, strict=True)])
    order = np.lexsort((stops, starts, files))
    files, starts, stops, owners = files[order], starts[order], stops[order], owners[order]
    shared = np.flatnonzero((files[:-1] == files[1:]) & (stops[:-1] > starts[1:]))
    if len(shared):
        one, other = (entries[owners[at]][0] for at in (shared[0], shared[0] + 1))
        raise ValueError(f"{one} and {other} must not share bytes of a file")


def _of(plain: Mapping[str, Any], key: str, kind: type) -> Any:
    value = plain.get(key)
    if not isinstance(value, kind):
        raise ValueError(f"{key} must be a JSON {_KINDS[kind]}")
    return value


def _count(plain: Mapping[str, Any], key: str) -> int:
    values = [plain.get(key)]
    if not is_counts(values):
        raise ValueError(f"{key} ({values[0]!r}) must be a whole number")
    return values[0]
