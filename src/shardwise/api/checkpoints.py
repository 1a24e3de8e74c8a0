"""Checkpoints from Python: those of a training loop of the user's own, and exports."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardwise.api.arguments import require_path
from shardwise.base.errors import ConfigError, RunError, keys_renamed, renamed_error_text, see
from shardwise.checkpoint.storage.checkpoint_folders import weights_folder
from shardwise.checkpoint.storage.root import Root

if TYPE_CHECKING:
    from torch import nn

    from shardwise.config import Config
    from shardwise.distributed.mesh import Mesh
    from shardwise.optim.zero import ZeroRedundancyOptimizer

_ARGUMENTS = {
    "set checkpoint.path or --run-dir": "give it as folder",
    "checkpoint.load": "folder",
    "make room, or lower checkpoint.keep": "make room",
    "--max-shard-size": "max_shard_size",
}
"""Keys and options in messages of the rooms below → the text that a call has in their place."""


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    *,
    step: int,
    mesh: Mesh | None = None,
    config: Config | None = None,
) -> str:
    """Save a model and its optimizer from any number of ranks; collective. It returns when everything is on the disk.

    The checkpoint does not depend on the layout: `load_checkpoint` reads it on any number of ranks. It is either
    complete or does not exist, and every byte has a checksum.

    Args:
        folder: the folder of the loop's checkpoints; a path that all ranks share, or a URL.
        model: plain modules, or layers of shardwise. Its parameters are saved, so it may have no persistent buffers,
            such as the running statistics of a BatchNorm.
        optimizer: an optimizer that holds all the model's parameters.
        step: updates done, the same on all ranks; the checkpoint is `FOLDER/step-0000STEP`, and replaces an earlier
            checkpoint of that name.
        mesh: the mesh with which the model and the optimizer were made; None: data parallelism alone.
        config: description of the model for `config.json` and the manifest; `export_checkpoint` needs it. Names and
            shapes must be the model's; those of a class that `model.family` names are not compared.

    Returns:
        the path or URL of the checkpoint.

    Raises:
        ConfigError: an argument is none of those, or a checkpoint of it could not be read again; nothing was written.
        RunError: it could not be written, or ranks' copies of a parameter differ. Both are raised on every rank.
    """
    from shardwise.api import checkpoint_arguments as arguments
    from shardwise.checkpoint.restore import on_first_rank
    from shardwise.checkpoint.save import Saver
    from shardwise.config import Layout
    from shardwise.train.model_checks import check_replicas
    from shardwise.train.rank_agreement import package_versions, raised_on_every_rank

    mesh = arguments.mesh_of(mesh)
    with raised_on_every_rank(mesh.world):
        root = Root.of(require_path("folder", folder))
        arguments.require_saveable(model, optimizer, step, config, mesh)
    arguments.require_one_save(root, int(step), model, mesh)
    arguments.require_one_model(model, None if config is None else config.shapes, mesh)
    # The weights of the last step may still be on their way from the ranks that updated them.
    optimizer.gathers.wait()
    check_replicas(model, mesh, int(step), optimizer)
    on_first_rank(root.make, mesh.world)
    layout = Layout(mesh.world.size, mesh.tp.size, pipeline=mesh.pp.size, context=mesh.cp.size).recorded()
    described = {"layout": layout, "data": {}, "versions": package_versions()}
    saver = Saver(root, model, optimizer, config, mesh, mesh.host_group("checkpoint"), described=described)
    saver.save(int(step), {"samples": 0, "position": 0, "tokens": 0, "schedule": {}, "rng": {}})
    saver.wait()
    # The thread that writes raises nothing: a problem is a part of its result.
    (saved,) = saver.finished()
    if saved.problem is not None:
        problem = renamed_error_text(saved.problem, _ARGUMENTS)
        raise RunError(f"the checkpoint of step {step:,} could not be saved: {problem}{see('checkpoints#not-saved')}")
    return saved.folder


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer | None = None,
    *,
    mesh: Mesh | None = None,
) -> int:
    """Set a model, and an optimizer's state, to those of a checkpoint that any layout saved; collective.

    Each rank reads what it holds, and every byte that is read is verified.

    Args:
        folder: a checkpoint, or a folder of checkpoints or a run's folder (its newest intact one); a path or a URL.
        model: a model with the canonical names and shapes that were saved, in any dtype, without persistent buffers.
        optimizer: an optimizer that holds all the model's parameters and keeps the same state as the saved optimizer,
            such as one of the same class with the same options; None: weights alone, before an optimizer is made.
        mesh: as in `save_checkpoint`.

    Returns:
        the number of updates that were done, from which the loop continues; the loop itself restores learning-rate
        schedules.

    Raises:
        ConfigError: an argument is none of those, there is no checkpoint, or it is of another model or optimizer: every
            mismatch. Nothing was changed, unless it says that the weights are not finite. Raised on every rank.
        DamageError: bytes do not match their checksums. Do not use the model then.
    """
    from shardwise.api import checkpoint_arguments as arguments
    from shardwise.checkpoint.load_weights import load_checkpoint_weights
    from shardwise.checkpoint.restore import on_first_rank, read_manifest, restore_checkpoint
    from shardwise.train.rank_agreement import raised_on_every_rank, require_equal

    mesh = arguments.mesh_of(mesh)
    with raised_on_every_rank(mesh.world):
        location = require_path("folder", folder)
        arguments.require_loadable(model, optimizer, mesh)
    require_equal({"optimizer": None if optimizer is None else type(optimizer).__name__}, mesh.world)
    root = Root.of(on_first_rank(lambda: _checkpoint_location(location), mesh.world))
    manifest = read_manifest(root, mesh.world)
    with keys_renamed(_ARGUMENTS):
        if optimizer is None:
            family = str(manifest.config.get("model", {}).get("family", ""))
            load_checkpoint_weights(model, family, mesh, root)
        else:
            restore_checkpoint(root, manifest, model, optimizer, mesh)
    return manifest.step


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_size: str | int = "5GB",
) -> str:
    """Write a checkpoint as a plain Hugging Face folder, as `shardwise checkpoint export` does; not collective.

    The folder has weights, `config.json`, tokenizer and model card, and nothing that only training needs;
    `transformers` opens it.

    Args:
        checkpoint: as in `load_checkpoint`.
        dest: the folder to write, which must not exist; a path or a URL.
        dtype: format of the weights: `float32`, `bfloat16` or `float16`; None: as they are stored.
        max_shard_size: largest size of a file with weights in bytes, or a text such as `500MB`; a larger tensor gets a
            separate file.

    Returns:
        the path or URL of the folder.

    Raises:
        ConfigError: an argument is none of those, there is no checkpoint, it does not describe its model, or `dest`
        exists. DamageError: bytes do not match their checksums. RunError: a value is beyond the range of float16.
    """
    from shardwise.checkpoint.format.export_checkpoint import Export
    from shardwise.checkpoint.format.safetensors import FLOATS
    from shardwise.cli.checkpoint.export import parent_and_name, shard_bytes

    source = require_path("checkpoint", checkpoint)
    target = require_path("dest", dest)
    if dtype is not None and dtype not in FLOATS:
        raise ConfigError(f"dtype ({dtype!r}) must be {', '.join(FLOATS)} or None")
    if isinstance(max_shard_size, bool) or not isinstance(max_shard_size, str | int):
        raise ConfigError(f"max_shard_size ({max_shard_size!r}) must be a number of bytes, or a text such as '500MB'")
    with keys_renamed(_ARGUMENTS):
        max_shard_bytes = shard_bytes(str(max_shard_size))
    parent, name = parent_and_name(target)
    export = Export(weights_folder(source, None).root, dtype)
    return str(export.write(parent, name, max_shard_bytes).folder)


def _checkpoint_location(location: str) -> str:
    folder = weights_folder(location, None)
    if not folder.is_checkpoint:
        raise ConfigError(f"{folder.root} must be a checkpoint of shardwise: it is a folder of weights")
    return folder.location
