"""Weights of a Hugging Face folder or of a checkpoint into a model of any layout."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from torch import nn

from shardwise.base.errors import ConfigError, see
from shardwise.checkpoint.format.manifest import MODEL
from shardwise.checkpoint.format.model_file import differences
from shardwise.checkpoint.format.tensors import StoredTensors, differing_copies, find_sources, segments
from shardwise.checkpoint.format.verify import non_finite_text
from shardwise.checkpoint.format.writing import STREAM_BYTES
from shardwise.checkpoint.reading import TORCH_DTYPES, CheckpointReader, Want, other_ends, read
from shardwise.checkpoint.restore import held_pieces, read_manifest
from shardwise.checkpoint.storage.root import DamageError, Root, StoreError
from shardwise.config import ModelConfig
from shardwise.data.hub import check_weights
from shardwise.distributed import collectives
from shardwise.distributed.agreement import agree
from shardwise.distributed.mesh import Group, Mesh
from shardwise.distributed.placement import placements
from shardwise.optim.state import MASTER


def load_hugging_face(model: nn.Module, config: ModelConfig, mesh: Mesh, folder: Path) -> None:
    """Set the model's weights to those of a Hugging Face folder; collective over the world.

    Each rank reads the rows that it needs, cast to the parameter's dtype; padding stays 0. Call it before an optimizer
    is made, which may keep copies. Names may be spelled as `config/weight_names.py` says.

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
        tensors, disagreements = StoredTensors.of(root), list(differences(config, root).problems)
    except ConfigError as error:
        problems = error.problems
    except StoreError as error:
        problems = [f"{error}: fetch or copy it again" if isinstance(error, DamageError) else str(error)]
    agree(problems, world)
    assert tensors is not None
    where = f"checkpoint.load ({folder})"
    stored = tensors.states[MODEL]
    sources, problems = find_sources(where, config.family, tensor_shapes(model, mesh.pp), stored)
    agree(disagreements + problems, world)
    wants = [Want(MODEL, piece.name, piece.box, target) for _, piece, target in held_pieces(model)]
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


def load_checkpoint(model: nn.Module, family: str, mesh: Mesh, folder: Root) -> None:
    """Set the model's weights to those of a checkpoint, every chunk that is read verified; collective over the world.

    Names may be spelled as `config/weight_names.py` says for the `family`; another has its own names alone.

    A weight in float32 comes from the stored master where there is one, so that no rounding is added. Where the ranks
    of data parallelism, or both ends of a pipeline, hold the same values, each of them reads an equal part.

    Raises:
        ConfigError: on every rank, with every mismatch of names, shapes and dtypes that any rank found, or weights that
        are not finite. DamageError, StoreError: as `reading.read`; the model is then not to be used.
    """
    manifest = read_manifest(folder, mesh.world)
    stored = manifest.tensors.get(MODEL, {})
    _, problems = find_sources(f"checkpoint.load ({folder})", family, tensor_shapes(model, mesh.pp), stored)
    agree(problems, mesh.world)
    masters = manifest.tensors.get(MASTER, {})
    wants = []
    for _, piece, target in held_pieces(model):
        master = masters.get(piece.name)
        is_usable = master is not None and master.shape == piece.shape and master.dtype in TORCH_DTYPES
        state = MASTER if is_usable and target.dtype == torch.float32 else MODEL
        wants.append(Want(state, piece.name, piece.box, target, (mesh.dp, other_ends(piece, mesh))))
    read(CheckpointReader(folder, manifest), wants, mesh)
    require_finite(model, mesh, folder)


def require_finite(model: nn.Module, mesh: Mesh, folder: Path | Root) -> None:
    """ConfigError, on every rank, where a weight that came from a folder has values that are NaN or infinite."""
    here = {
        (piece.name, piece.box): count
        for _, piece, values in held_pieces(model)
        if (count := int((~torch.isfinite(values)).sum()))
    }
    if not collectives.any_rank(bool(here), mesh.world):
        return
    everywhere = collectives.all_gather_objects((str(folder), here), mesh.world)
    not_finite: Counter[str] = Counter()
    for (name, _), count in {box: count for _, counts in everywhere for box, count in counts.items()}.items():
        not_finite[name] += count
    where = next(where for where, counts in everywhere if counts)  # machines may have folders of their own
    text = non_finite_text(not_finite)
    raise ConfigError(
        f"checkpoint.load ({where}) must have finite weights, and it has {text}{see('checkpoints#weights-not-finite')}"
    )


def tensor_shapes(model: nn.Module, pipeline: Group) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape of the tensors of all stages; collective over the pipeline."""
    here = {piece.name: piece.shape for _, _, record in placements(model) for piece in record.pieces}
    return {
        name: shape for of_rank in collectives.all_gather_objects(here, pipeline) for name, shape in of_rank.items()
    }
