"""Weights of a Hugging Face folder or of a checkpoint into a model, however it is cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise.checkpoint.agreement import agree, config_problems
from shardwise.checkpoint.dtypes import TORCH_DTYPES
from shardwise.checkpoint.reading import Source, Want, gather_parts, other_ends, parts, read
from shardwise.checkpoint.restore import read_manifest
from shardwise.checkpoint_format.comparison import differing_copies, find_sources
from shardwise.checkpoint_format.manifest import MODEL, TensorEntry
from shardwise.checkpoint_format.tensors import StoredTensors, segments
from shardwise.checkpoint_format.verify import non_finite_text
from shardwise.checkpoint_format.writing import STREAM_BYTES
from shardwise.config import ModelConfig
from shardwise.errors import ConfigError
from shardwise.hub import check_weights
from shardwise.mesh import Group, Mesh
from shardwise.optim.state import MASTER
from shardwise.placement import Box, Piece, placements
from shardwise.storage.root import DamageError, Root, StoreError


def load_hugging_face(model: nn.Module, config: ModelConfig, mesh: Mesh, folder: Path) -> None:
    """Set the model's weights to those of a Hugging Face folder; collective over the world.

    Each rank reads the rows of which it holds a part, cast to the parameter's dtype; padding stays 0. To be called
    before an optimizer is made, which may keep copies. Names may be spelled as `checkpoint_format/spelling.py` says.

    Raises:
        ConfigError: on every rank, with every mismatch that any rank found: names that are missing or unknown,
        shapes, copies of a tied weight that differ, fields of `config.json`, files that cannot be read, weights that
        are not finite. The model then keeps the weights that it had, except in the last case, or where a file could not
        be read to its end.
    """
    world, root = mesh.world, Root.of(folder)
    tensors, disagreements, problems = None, [], []
    try:
        check_weights(folder)
        tensors, disagreements = StoredTensors.of(root), config_problems(config, root)
    except ConfigError as error:
        problems = error.problems
    except DamageError as error:
        problems = [f"{error}: fetch or copy it again"]
    except StoreError as error:
        problems = [str(error)]
    agree(problems, world)
    assert tensors is not None
    where = f"checkpoint.load ({folder})"
    stored = tensors.states[MODEL]
    sources, problems = find_sources(where, config.family, _shapes(model, mesh.pp), stored)
    agree(disagreements + problems, world)
    wants = [Want(MODEL, piece.name, piece.box, target) for piece, target in _held(model)]
    wants = [want.part(box) for want in wants for box in segments(want.box.size, STREAM_BYTES // 8)]
    try:
        problems = differing_copies(where, tensors, sources, [(want.name, want.box) for want in wants])
        if not problems:
            for want in wants:
                name = sources[want.name][0]
                values = torch.from_numpy(tensors.read(MODEL, name, want.box))
                want.target.copy_(values.view(TORCH_DTYPES[stored[name].dtype]))
    except StoreError as error:
        problems = [f"checkpoint.load: {error}"]
    agree(problems, world)
    require_finite(model, mesh, folder)


def load_checkpoint(model: nn.Module, config: ModelConfig, mesh: Mesh, folder: Root) -> None:
    """Set the model's weights to those of a checkpoint, every chunk that is read verified; collective over the world.

    A weight in float32 comes from the stored master where there is one, so that no rounding is added. Where the ranks
    of data parallelism, or both ends of a pipeline, hold the same values, each of them reads an equal part.

    Raises:
        ConfigError: on every rank, with every mismatch of names, shapes and dtypes that any rank found, or weights that
        are not finite. DamageError, StoreError: as `reading.read`; the model is then not to be used.
    """
    manifest = read_manifest(folder, mesh.world)
    stored = manifest.tensors.get(MODEL, {})
    _, problems = find_sources(f"checkpoint.load ({folder})", config.family, _shapes(model, mesh.pp), stored)
    agree(problems, mesh.world)
    masters = manifest.tensors.get(MASTER, {})
    once: list[Want] = []
    tied: list[Want] = []
    ends = Group()
    for piece, target in _held(model):
        state = MASTER if target.dtype == torch.float32 and _is_usable(masters, piece) else MODEL
        ranks = other_ends(piece, mesh)
        ends = ranks if ranks.size > 1 else ends
        (tied if ranks.size > 1 else once).append(Want(state, piece.name, piece.box, target))
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
    return entry is not None and entry.shape == piece.shape and entry.dtype in TORCH_DTYPES


def _held(model: nn.Module) -> list[tuple[Piece, Tensor]]:
    """Each piece of the model with elements, and where its values belong: a view of shape `piece.box.size`."""
    return [
        (piece, piece.of(parameter.detach()))
        for _, parameter, record in placements(model)
        for piece in record.pieces
        if piece.box.numel
    ]


def _shapes(model: nn.Module, pipeline: Group) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape of the tensors of all stages; collective over the pipeline."""
    here = {piece.name: piece.shape for _, _, record in placements(model) for piece in record.pieces}
    return {name: shape for each in comm.all_gather_objects(here, pipeline) for name, shape in each.items()}
