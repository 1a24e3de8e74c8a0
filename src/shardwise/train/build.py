"""From a configuration to a trainer: the only place that knows all the parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardwise import comm
from shardwise import device as devices
from shardwise.checkpoint import load_hugging_face
from shardwise.checkpoint.agreement import require_model
from shardwise.checkpoint.load import require_finite
from shardwise.checkpoint.restore import read_manifest, restore
from shardwise.checkpoint_format.folders import is_damage
from shardwise.checkpoint_format.manifest import MANIFEST, ManifestError
from shardwise.config import Config, Precision, check_layout
from shardwise.data import PreparedData, make_batches
from shardwise.errors import ConfigError, DataError
from shardwise.mesh import Mesh
from shardwise.models import build_stages
from shardwise.optim import LAMB, ZeroRedundancyOptimizer
from shardwise.placement import of_or_whole
from shardwise.storage.root import Root, StoreError
from shardwise.train.execution import make_execution
from shardwise.train.record import Progress
from shardwise.train.report import Reporter
from shardwise.train.trainer import Trainer


def build_trainer(
    config: Config,
    mesh: Mesh,
    data: PreparedData,
    reporter: Reporter | None = None,
    progress: Progress | None = None,
    weights: Root | None = None,
) -> Trainer:
    """The trainer of this rank: model shard, optimizer, batches. Collective over the mesh.

    `weights`: a checkpoint, of which masters are read where it has them, or a Hugging Face folder; None draws them.
    """
    layout, precision = check_layout(config, mesh.world.size), config.precision.resolved(mesh.device.type != "cpu")
    batches = make_batches(config, data, "train")
    if batches is None:
        raise DataError(f"the training data hold less than one sample of {config.train.sequence_length} tokens")
    dtype = torch_dtype(precision.parameter)
    model = build_stages(config, layout, mesh, dtype=dtype)
    is_checkpoint = weights is not None and comm.broadcast_object((weights / MANIFEST).exists(), mesh.world)
    if weights is not None and not is_checkpoint:
        load_hugging_face(model, config.model, mesh, weights.local())
    optimizer = build_optimizer(config, precision, model, mesh)
    if weights is not None and is_checkpoint:
        require_model(config.model, weights, mesh.world)
        try:
            restore(weights, read_manifest(weights, mesh.world), model, optimizer, mesh, weights_only=True)
        except StoreError as error:
            if is_damage(error) or isinstance(error, ManifestError):
                raise ConfigError(f"checkpoint.load: {error}") from None
            raise  # the store gave no answer: the configuration may well be right
        require_finite(model, mesh, weights)
    return Trainer(
        config=config,
        layout=layout,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        batches=batches,
        evaluation=make_batches(config, data, "eval"),
        reporter=reporter,
        progress=progress,
        execution=make_execution(config, layout, mesh, model, dtype),
    )


def build_optimizer(config: Config, precision: Precision, model: nn.Module, mesh: Mesh) -> ZeroRedundancyOptimizer:
    """AdamW or LAMB over data parallelism, its state cut or whole.

    Gradients are summed: the loss is already a global mean.
    """
    o = config.optimizer
    is_lamb = o.name == "lamb"
    options: dict[str, Any] = {} if is_lamb else {"fused": devices.has_fused_adamw(mesh.device)}
    return ZeroRedundancyOptimizer(
        decay_groups(model.parameters(), o.weight_decay),
        LAMB if is_lamb else torch.optim.AdamW,
        mesh=mesh,
        shard=o.zero == 1,
        average=False,
        max_norm=o.max_norm,
        bucket_mib=o.bucket_mib,
        optimizer_dtype=torch_dtype(precision.optimizer),
        gradient_dtype=torch_dtype(precision.gradient),
        reduce_dtype=torch_dtype(precision.reduce),
        lr=o.lr,
        betas=o.betas,
        eps=o.eps,
        **options,
    )


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; vectors (biases and norms, by their canonical shape) do not."""
    everything = list(parameters)
    matrices = [p for p in everything if len(of_or_whole(p).pieces[0].shape) > 1]
    chosen = {id(p) for p in matrices}
    vectors = [p for p in everything if id(p) not in chosen]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a configuration's dtype name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype
