"""`manifest.json`: what a checkpoint holds, where each tensor is in its files, and the checksums of the files.

The manifest is written last: a folder without one is no checkpoint. It is canonical JSON (sorted keys, no spaces,
ASCII) with a digest of itself, so that a changed bit is found before any value is used. No value is trusted: names must
be inside the folder, offsets inside the files, boxes inside the tensors.
"""

from __future__ import annotations

import base64
import binascii
import gc
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import xxhash

from shardwise.boxes import Box
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
class PieceEntry:
    """A box of a tensor, contiguous and row-major from byte `offset` of file number `file`."""

    file: int
    offset: int
    box: Box


@dataclass(frozen=True)
class TensorEntry:
    """A canonical tensor in canonical orientation; its pieces tile it."""

    shape: tuple[int, ...]
    dtype: str
    pieces: Sequence[PieceEntry]

    def nbytes(self, piece: PieceEntry) -> int:
        return piece.box.numel * DTYPES[self.dtype].itemsize


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
        """Canonical JSON with its digest; floats in the mappings must be finite."""
        plain = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            **{field_.name: getattr(self, field_.name) for field_ in fields(self)[:-2]},
            "files": [{**vars(file), "checksums": base64.b64encode(file.checksums).decode()} for file in self.files],
            "tensors": {
                state: {name: _plain(tensor) for name, tensor in tensors.items()}
                for state, tensors in self.tensors.items()
            },
        }
        digest = xxhash.xxh3_128_hexdigest(_canonical(plain).encode())
        return _canonical({**plain, "digest": f"xxh3_128:{digest}"}) + "\n"

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
    digest = xxhash.xxh3_128(text[: match.start()].encode())
    digest.update(text[match.end() : -1].encode())
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


def _plain(tensor: TensorEntry) -> dict[str, Any]:
    pieces = [[piece.file, piece.offset, list(piece.box.start), list(piece.box.size)] for piece in tensor.pieces]
    return {"shape": list(tensor.shape), "dtype": tensor.dtype, "pieces": pieces}


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
    paths = [file.path for file in files]
    if len(set(paths)) < len(paths):
        raise ValueError("files must name each file once")
    tensors: dict[str, dict[str, TensorEntry]] = {}
    for state in (stored := _of(plain, "tensors", dict)):
        named = _of(stored, state, dict)
        tensors[state] = {name: _tensor(f"{state}/{name}", named[name], files) for name in named}
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


def _tensor(name: str, plain: object, files: tuple[FileEntry, ...]) -> TensorEntry:
    fields, dtype, shape = tensor_fields(name, plain)
    tensor = TensorEntry(shape, dtype, [])
    pieces = []
    # A large model has a million pieces: no text is made before something is wrong.
    for entry in _of(fields, "pieces", list):
        right = isinstance(entry, list) and len(entry) == 4 and is_counts(entry[:2])
        if not (right and is_counts(entry[2]) and is_counts(entry[3])) or not (
            len(entry[2]) == len(entry[3]) == len(shape)
        ):
            numbers = f"start and size with {len(shape)} numbers"
            raise ValueError(f"a piece of {name} must be [file, offset, start, size], {numbers}")
        file, offset, start, size = entry
        if not all(a + n <= whole for a, n, whole in zip(start, size, shape, strict=True)):
            raise ValueError(f"a piece of {name} (start {start}, size {size}) must lie in its shape ({list(shape)})")
        piece = PieceEntry(file, offset, Box(tuple(start), tuple(size)))
        if file >= len(files):
            raise ValueError(f"a piece of {name} must be in a file that is listed")
        end, total = offset + tensor.nbytes(piece), files[file].bytes
        if end > total:
            raise ValueError(f"a piece of {name} (to byte {end}) must lie in its file ({total} bytes)")
        pieces.append(piece)
    return replace(tensor, pieces=tuple(pieces))


def _require_disjoint(tensors: Mapping[str, Mapping[str, TensorEntry]]) -> None:
    """No two tensors share a byte: to read all tensors is to read no more than the files hold."""
    spans = sorted(
        (piece.file, piece.offset, piece.offset + tensor.nbytes(piece), f"{state}/{name}")
        for state, named in tensors.items()
        for name, tensor in named.items()
        for piece in tensor.pieces
    )
    for (file, _, stop, name), (next_file, start, _, next_name) in itertools.pairwise(spans):
        if file == next_file and stop > start:
            raise ValueError(f"{name} and {next_name} must not share bytes of a file")


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
