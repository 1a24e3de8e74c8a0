"""What the checkpoint tests run on every rank: training, saving and restoring by the parts that the command uses."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.restore import read_manifest, restore_checkpoint
from shardwise.checkpoint.save import SavedCheckpoint, Saver
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Mesh
from shardwise.optim.state import state_slices, state_tensors
from shardwise.train.build import build_trainer
from shardwise.train.trainer import Trainer
from shardwise.verify.canonical_values import canonical_weights
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_data

State = dict[str, dict[str, torch.Tensor]]
PLACE: dict[str, Any] = {"samples": 0, "position": 0, "tokens": 0, "schedule": {}, "rng": {}}


@dataclass
class Result:
    """What `run` found on a rank.

    Attributes:
        losses: of all steps.
        state: on rank 0, that which was saved.
        at_end: on rank 0, the state after the last step, where the training began with none.
        saved: what became of the saves.
        bytes_read: by this rank, to restore.
    """

    losses: list[float] = field(default_factory=list)
    state: State = field(default_factory=dict)
    at_end: State = field(default_factory=dict)
    saved: list[SavedCheckpoint] = field(default_factory=list)
    bytes_read: int = 0


def make_trainer(config: Config) -> Trainer:
    mesh = shared_mesh(config.parallel.tensor, config.parallel.pipeline)
    data = make_data(config.model.vocab_size, pairs="nsp" in config.model.objectives)
    return build_trainer(config, mesh, data)


def make_saver(trainer: Trainer, root: str, **options: Any) -> Saver:
    described = {"layout": {"ranks": trainer.mesh.world.size}, "data": {}, "versions": {}}
    group = trainer.mesh.host_group("checkpoint")
    parts = (trainer.model, trainer.optimizer, trainer.config, trainer.mesh)
    return Saver(Root.of(root), *parts, group, described=described, **options)


def save(trainer: Trainer, root: str, **options: Any) -> list[SavedCheckpoint]:
    saver = make_saver(trainer, root, **options)
    progress = trainer.progress
    place = {"samples": progress.samples, "position": progress.position, "tokens": progress.tokens}
    saver.save(progress.step, PLACE | place)
    saver.wait()
    return saver.finished()


def load(trainer: Trainer, folder: str, **options: Any) -> int:
    where = Root.of(folder)
    manifest = read_manifest(where, trainer.mesh.world)
    restored = restore_checkpoint(where, manifest, trainer.model, trainer.optimizer, trainer.mesh, **options)
    trainer.progress.step, trainer.progress.position = manifest.step, manifest.position
    trainer.progress.samples, trainer.progress.tokens = manifest.samples, manifest.tokens
    return restored.bytes_read


def canonical_state(trainer: Trainer) -> State:
    """Weights and optimizer state by canonical name, whole, on every rank."""
    mesh: Mesh = trainer.mesh
    weights = {
        name: tensor.cpu()
        for name, tensor in canonical_weights(trainer.model, mesh.pp, optimizer=trainer.optimizer).items()
    }
    found: State = {"model": weights}
    slices = [s for s in state_slices(trainer.model, trainer.optimizer) if s.piece.copies.rank == 0]
    for name, flats in state_tensors(trainer.optimizer).items():
        whole = {n: torch.zeros(t.shape, dtype=torch.float32) for n, t in weights.items()}
        for each in (part for part in slices if part.bucket in flats):
            whole[each.piece.name][each.box.slices] = each.of(flats[each.bucket])
        found[name] = whole
    # One collective for all: each alone takes milliseconds between ranks that share a core.
    tensors = [tensor for name, state in found.items() if name != "model" for tensor in state.values()]
    if tensors:
        flat = collectives.all_reduce_(torch.cat([tensor.view(-1) for tensor in tensors]).to(mesh.device), mesh.world)
        for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.view(-1).copy_(values)
    return found


def run(config: Config, before: int, after: int, source: str | None, target: str | None, **options: Any) -> Result:
    """Restore from `source`, train `before` steps, save to `target`, train `after` steps."""
    trainer = make_trainer(config)
    result = Result()
    if source is not None:
        result.bytes_read = load(trainer, source)
    result.losses += [trainer.step().loss for _ in range(before)]
    state = canonical_state(trainer)
    if target is not None:
        result.saved = save(trainer, target, **options)
        assert not any(each.problem for each in result.saved), result.saved
    result.losses += [trainer.step().loss for _ in range(after)]
    at_end = canonical_state(trainer) if after and source is None else state
    if trainer.mesh.world.rank == 0:
        result.state, result.at_end = state, at_end
    return result


def step_folder(root: Path | str, step: int) -> str:
    return str(Path(root) / f"step-{step:08d}")
