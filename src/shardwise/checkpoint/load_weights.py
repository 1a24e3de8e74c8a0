"""Weights of a Hugging Face folder or of a checkpoint into a model of any layout."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from shardwise.base.errors import ConfigError, DamageError, StoreError, listing, see
from shardwise.base.tensor_box import box_segments
from shardwise.checkpoint.collective_reading import CheckpointReader, ReadRequest, read_tensors
from shardwise.checkpoint.format.manifest import MODEL
from shardwise.checkpoint.format.model_files import model_differences
from shardwise.checkpoint.format.stored_tensors import StoredTensors, differing_tied_copies, find_sources
from shardwise.checkpoint.format.weight_files import check_weights
from shardwise.checkpoint.format.writing import STREAM_BYTES
from shardwise.checkpoint.restore import facts_of_all_tensors, local_pieces, read_manifest, tied_ends
from shardwise.checkpoint.storage.root import Root
from shardwise.checkpoint.weight_writers import TORCH_DTYPES
from shardwise.config import ModelConfig
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group, Mesh
from shardwise.distributed.placement import placements
from shardwise.optim.state import MASTER, weight_slices
from shardwise.optim.zero import ZeroRedundancyOptimizer

_SHOWN = 5


def require_model_weights(config: ModelConfig, folder: Root, group: Group) -> None:
    """Raise, on every rank of the group, why the weights of a folder are not the model's, where any rank finds it."""
    try:
        problems = list(model_differences(config, folder).problems)
    except ConfigError as error:
        problems = error.problems
    collectives.raise_on_all_ranks(problems, group)


def load_hugging_face(
    model: nn.Module, config: ModelConfig, mesh: Mesh, folder: Path, optimizer: ZeroRedundancyOptimizer | None = None
) -> None:
    """Set the model's weights to those of a Hugging Face folder; collective over the world.

    Each rank reads the rows that it needs, cast to the dtype of the parameter; padding stays 0. Names may be spelled as
    `config/hugging_face_names.py` says. An `optimizer` gets masters of these weights; with ZeRO-3 only its parts of the
    weights are read.

    Raises:
        ConfigError: every mismatch that any rank found, raised on every rank: names that are missing or unknown,
        shapes, copies of a tied weight that differ, fields of `config.json`, files that cannot be read, weights that
        are not finite. The model then keeps the weights that it had, except in the last case, or where a file could not
        be read to its end.
    """
    # Every step that can fail on one rank is followed by an agreement: no rank waits for one that has raised.
    tensors, config_problems = _open_hugging_face(config, mesh.world, folder)
    where = f"checkpoint.load ({folder})"
    stored = tensors.states[MODEL]
    sources, problems = find_sources(where, config.family, canonical_tensor_shapes(model, mesh), stored, tensors.files)
    # Weights of another configuration have other shapes: its keys tell why.
    collectives.raise_on_all_ranks(config_problems or problems, mesh.world)
    requests: list[ReadRequest] = []
    for piece, piece_box, target, _ in weight_slices(model, optimizer):
        request = ReadRequest(MODEL, piece.name, piece_box, target)
        # A stored value has at most 8 bytes.
        requests += [request.part(box) for box in box_segments(piece_box.size, STREAM_BYTES // 8)]
    try:
        boxes = [(request.name, request.box) for request in requests]
        problems = differing_tied_copies(where, tensors, sources, boxes)
        if not problems:
            for request in requests:
                name = sources[request.name][0]
                values = torch.from_numpy(tensors.read(MODEL, name, request.box))
                request.target.copy_(values.view(TORCH_DTYPES[stored[name].dtype]))
    except StoreError as error:
        problems = [f"checkpoint.load: {error}"]
    collectives.raise_on_all_ranks(problems, mesh.world)
    for bucket in [] if optimizer is None else optimizer.buckets:
        bucket.adopt_values()
    require_finite_weights(model, mesh, folder, optimizer)


def _open_hugging_face(config: ModelConfig, world: Group, folder: Path) -> tuple[StoredTensors, list[str]]:
    """The tensors of a folder, and how its `config.json` differs from the model; all ranks raise, or none does."""
    root = Root.of(folder)
    tensors: StoredTensors | None = None
    config_problems: list[str] = []
    problems: list[str] = []
    try:
        check_weights(folder)
        config_problems = list(model_differences(config, root).problems)
        tensors = StoredTensors.of(root)
    except ConfigError as error:
        problems = error.problems
    except DamageError as error:
        problems = [f"{error}: fetch or copy it again"]
    except StoreError as error:
        problems = [str(error)]
    collectives.raise_on_all_ranks(problems, world)
    assert tensors is not None
    return tensors, config_problems


def load_checkpoint_weights(model: nn.Module, family: str, mesh: Mesh, folder: Root) -> None:
    """Set the model's weights to those of a checkpoint, every chunk that is read verified; collective over the world.

    Names may be spelled as `config/hugging_face_names.py` says for the `family`; another has its own names alone.

    A weight in float32 comes from the stored master where there is one, so that no rounding is added. Where the ranks
    of data parallelism, or both ends of a pipeline, hold the same values, each of them reads an equal part.

    Raises:
        ConfigError: every mismatch of names, shapes and dtypes that any rank found, or weights that are not finite;
        raised on every rank. DamageError, StoreError: as `collective_reading.read`; the model is then not to be used.
    """
    manifest = read_manifest(folder, mesh.world)
    stored = manifest.tensors.get(MODEL, {})
    _, problems = find_sources(f"checkpoint.load ({folder})", family, canonical_tensor_shapes(model, mesh), stored)
    collectives.raise_on_all_ranks(problems, mesh.world)
    masters = manifest.tensors.get(MASTER, {})
    requests: list[ReadRequest] = []
    for piece, target in local_pieces(model):
        # A target in a shorter dtype gains nothing from the master, which has twice the bytes to read.
        state = MODEL
        master = masters.get(piece.name)
        if master is not None and target.dtype == torch.float32:
            is_usable = master.shape == piece.shape and master.dtype in TORCH_DTYPES
            state = MASTER if is_usable else MODEL
        copies = (piece.replicas or mesh.replicas, tied_ends(piece, mesh))
        requests.append(ReadRequest(state, piece.name, piece.box, target, copies))
    read_tensors(CheckpointReader(folder, manifest), requests, mesh)
    require_finite_weights(model, mesh, folder)


def require_finite_weights(
    model: nn.Module, mesh: Mesh, folder: Path | Root, optimizer: ZeroRedundancyOptimizer | None = None
) -> None:
    """Refuse loaded weights, on every rank, where those of a folder have values that are NaN or infinite."""
    local = [
        (str(folder), piece.name)
        for piece, _, values, _ in weight_slices(model, optimizer)
        if not bool(torch.isfinite(values).all())
    ]
    union = collectives.union(local, mesh.world)
    if union:
        # Machines may have folders of their own: one that has such values is shown.
        names = listing(dict.fromkeys(name for _, name in union), most=_SHOWN)
        raise ConfigError(
            f"checkpoint.load ({union[0][0]}) must have finite weights, and it has values that are NaN or infinite in "
            f"{names}{see('checkpoints#weights-not-finite')}"
        )


def canonical_tensor_shapes(model: nn.Module, mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape of all tensors of the model; collective over the ranks that have others."""
    shapes = {piece.name: piece.shape for _, _, record in placements(model) for piece in record.pieces}
    return facts_of_all_tensors(shapes, mesh)
