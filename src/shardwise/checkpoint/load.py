"""Weights of a Hugging Face folder or of a checkpoint into a model, however it is cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shardwise import comm
from shardwise.checkpoint.agreement import agree, config_problems, mismatch_texts
from shardwise.checkpoint.reading import DTYPES, Source, Want, gather_parts, other_ends, parts, read
from shardwise.checkpoint.restore import read_manifest
from shardwise.checkpoint.spelling import spelling
from shardwise.checkpoint_format.manifest import TensorEntry
from shardwise.checkpoint_format.verify import MODEL, non_finite_text
from shardwise.config import ModelConfig
from shardwise.errors import ConfigError
from shardwise.hub import weight_files
from shardwise.mesh import Group, Mesh
from shardwise.optim.state import MASTER
from shardwise.placement import Box, Piece, placements
from shardwise.storage.root import Root

_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class _Described:
    """What is known of a stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Stored(_Described):
    """A tensor in a file, not yet read."""

    slices: Any

    def read(self, box: Box) -> Tensor:
        part: Tensor = self.slices[box.slices]
        return part


_AnyStored = TypeVar("_AnyStored", bound=_Described)


def load_hugging_face(model: nn.Module, config: ModelConfig, mesh: Mesh, folder: Path) -> None:
    """Set the model's weights to those of a Hugging Face folder; collective over the world.

    Each rank reads the boxes that it holds and no more, cast to the parameter's dtype; padding stays 0. To be called
    before an optimizer is made: that one may keep copies. Names may be spelled as `checkpoint/spelling.py` says.

    Raises:
        ConfigError: on every rank, with every mismatch that any rank found: names that are missing or of no use,
        shapes, copies of a tied weight that differ, fields of `config.json`, files that cannot be read, weights that
        are not finite. Unless it is the last, the model's
        weights are then those that it had, unless a file broke off while it was read.
    """
    world = mesh.world
    with ExitStack() as opened:
        stored, disagreements, problems = [], [], []
        try:
            stored, disagreements = list(_stored(folder, opened)), config_problems(config, Root.of(folder))
        except ConfigError as error:
            problems = error.problems
        agree(problems, world)
        pieces, sources, problems = _survey(model, config.family, mesh.pp, folder, stored)
        agree(disagreements + problems, world)
        problems = []
        try:
            problems = _differing(pieces, sources, folder)
            if not problems:
                _copy(model, sources)
        except (OSError, SafetensorError) as error:
            problems = [f"checkpoint.load ({folder}) cannot be read: {error}"]
        agree(problems, world)
    require_finite(model, mesh, folder)


def load_checkpoint(model: nn.Module, config: ModelConfig, mesh: Mesh, folder: Root) -> None:
    """Set the model's weights to those of a checkpoint, every chunk that is read verified; collective over the world.

    A weight in float32 comes from the stored master where there is one, so that no rounding is added. Of what data
    parallelism or the ends of a pipeline hold alike each rank reads an equal part.

    Raises:
        ConfigError: on every rank, with every mismatch of names, shapes and dtypes that any rank found, or weights that
        are not finite. DamageError, StoreError: as `reading.read`; the model is then not to be used.
    """
    manifest = read_manifest(folder, mesh.world)
    stored = [_Described(name, entry.shape, entry.dtype) for name, entry in manifest.tensors.get(MODEL, {}).items()]
    _, _, problems = _survey(model, config.family, mesh.pp, folder, stored)
    agree(problems, mesh.world)
    masters = manifest.tensors.get(MASTER, {})
    once: list[Want] = []
    tied: list[Want] = []
    ends = Group()
    for _, parameter, placement in placements(model):
        for piece in placement.pieces:
            if piece.box.numel:
                state = MASTER if parameter.dtype == torch.float32 and _is_usable(masters, piece) else MODEL
                ranks = other_ends(piece, mesh)
                ends = ranks if ranks.size > 1 else ends
                (tied if ranks.size > 1 else once).append(
                    Want(state, piece.name, piece.box, piece.of(parameter.detach()))
                )
    both = list(parts(tied, mesh.dp))
    read(Source(folder, manifest), [*parts(once, mesh.dp), *parts(both, ends)], mesh)
    gather_parts(both, ends)
    gather_parts([*once, *tied], mesh.dp)
    require_finite(model, mesh, folder)


def require_finite(model: nn.Module, mesh: Mesh, folder: Path | Root) -> None:
    """ConfigError, on every rank, where a weight that came from a folder has values that are NaN or infinite."""
    here: dict[tuple[str, Box], int] = {}
    for _, parameter, placement in placements(model):
        if not torch.isfinite(parameter).all():
            for piece in placement.pieces:
                if count := int((~torch.isfinite(piece.of(parameter))).sum()):
                    here[piece.name, piece.box] = count
    everywhere = comm.all_gather_objects((str(folder), here), mesh.world)
    found: Counter[str] = Counter()
    for (name, _), count in {box: count for _, each in everywhere for box, count in each.items()}.items():
        found[name] += count
    if found:
        where = next(where for where, each in everywhere if each)  # machines may have folders of their own
        raise ConfigError(f"checkpoint.load ({where}) must have finite weights, and it has {non_finite_text(found)}")


def _is_usable(masters: Mapping[str, TensorEntry], piece: Piece) -> bool:
    entry = masters.get(piece.name)
    return entry is not None and entry.shape == piece.shape and entry.dtype in DTYPES


def _stored(folder: Path, opened: ExitStack) -> Iterator[_Stored]:
    problems = []
    for path in weight_files(folder):
        try:
            file = opened.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            problems.append(_unreadable(path, error))
            continue
        for name in file.keys():  # noqa: SIM118  it is no mapping
            slices = file.get_slice(name)
            yield _Stored(name, tuple(slices.get_shape()), slices.get_dtype(), slices)
    if problems:
        raise ConfigError(problems)


def _unreadable(path: Path, error: Exception) -> str:
    try:
        with path.open("rb") as file:
            pointer = file.read(len(_POINTER)) == _POINTER
    except OSError as failure:
        return f"{path} cannot be read: {failure.strerror or failure}"
    if pointer:
        return f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its repository"
    return f"{path} is truncated or no safetensors file ({error}): fetch or copy it again"


def _survey(
    model: nn.Module, family: str, pipeline: Group, folder: Path | Root, stored: Sequence[_AnyStored]
) -> tuple[list[Piece], dict[str, list[_AnyStored]], list[str]]:
    """This rank's pieces, where each of its canonical tensors is stored (the first is read), and every mismatch.

    Mismatches are those of all stages of a pipeline.
    """
    pieces = [piece for _, _, placement in placements(model) for piece in placement.pieces]
    here = {piece.name: piece.shape for piece in pieces}
    shapes = {name: shape for each in comm.all_gather_objects(here, pipeline) for name, shape in each.items()}
    canonical = spelling(family).canonical([entry.name for entry in stored], set(shapes))
    sources: dict[str, list[_AnyStored]] = {name: [] for name in shapes}
    unknown, misshapen, strange = [], [], []
    for entry in stored:
        name = canonical.get(entry.name)
        if name is None:
            continue
        if name not in shapes:
            unknown.append((entry.name, f"{list(entry.shape)}"))
            continue
        sources[name].append(entry)
        if entry.shape != shapes[name]:
            misshapen.append((entry.name, f"{list(entry.shape)} must be {list(shapes[name])}"))
        if entry.dtype not in DTYPES:
            strange.append((entry.name, entry.dtype))
    for name, entries in sources.items():
        entries.sort(key=lambda entry: entry.name != name)  # the canonical spelling first
    missing = [
        (name, f"{list(shapes[name])}") for name, entries in sources.items() if not entries and 0 not in shapes[name]
    ]
    problems = mismatch_texts(
        f"checkpoint.load ({folder})", missing=missing, unknown=unknown, misshapen=misshapen, strange=strange
    )
    return pieces, sources, problems


def _differing(pieces: list[Piece], sources: dict[str, list[_Stored]], folder: Path) -> list[str]:
    """Second copies of a tensor that are not equal to the first, in what this rank holds of it."""
    problems = []
    where = f"checkpoint.load ({folder})"
    for piece in pieces:
        if not piece.box.numel:
            continue
        first, *copies = sources[piece.name]
        for copy in copies:
            held = first.read(piece.box)
            if not torch.equal(held, copy.read(piece.box).to(held.dtype)):
                problems.append(f"{where}: {copy.name} must equal {first.name}: the model has one weight for both")
    return problems


@torch.no_grad()
def _copy(model: nn.Module, sources: dict[str, list[_Stored]]) -> None:
    for _, parameter, placement in placements(model):
        for piece in placement.pieces:
            if piece.box.numel:
                piece.of(parameter).copy_(sources[piece.name][0].read(piece.box))
