"""One training of the miniature on the ranks that run it, and its differences from the training in one process."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.base.errors import RunError, listing
from shardwise.checkpoint.restore import read_manifest, restore
from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.storage.root import Root
from shardwise.checkpoint.storage.step_folders import step_name
from shardwise.config import Config
from shardwise.data.random_text import random_text
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Mesh
from shardwise.train.build import build_trainer
from shardwise.train.replica_check import check_replicas
from shardwise.train.trainer import Trainer
from shardwise.verify.layouts import Cell
from shardwise.verify.miniature import at
from shardwise.verify.testing.canonical import canonical_weights, gradient_errors, step_with_gradients
from shardwise.verify.tolerance import Differences

_SAMPLES = 256
"""Of the random text; longer trainings read them again."""
_PLACE = ("samples", "position", "tokens")
"""How far a training is, as a manifest has it."""
_WEIGHT, _GRADIENT = "weight ", "gradient "


@dataclass(frozen=True)
class Reference:
    """The training in one process.

    Attributes:
        losses: of all steps.
        weights, gradients: initial ones, and those of the first step, by canonical name.
    """

    losses: Sequence[float]
    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]

    def save(self, folder: Path) -> None:
        named = {_WEIGHT + name: tensor.cpu().contiguous() for name, tensor in self.weights.items()}
        named |= {_GRADIENT + name: tensor.cpu().contiguous() for name, tensor in self.gradients.items()}
        save_file(named, folder / "reference.safetensors")
        (folder / "reference.json").write_text(json.dumps(self.losses), encoding="utf-8")

    @staticmethod
    @cache
    def load(folder: Path) -> Reference:
        named = load_file(folder / "reference.safetensors")
        weights, gradients = (
            {name.removeprefix(kind): tensor for name, tensor in named.items() if name.startswith(kind)}
            for kind in (_WEIGHT, _GRADIENT)
        )
        return Reference(json.loads((folder / "reference.json").read_text(encoding="utf-8")), weights, gradients)


@cache
def _mesh(device: str, ranks: int, tensor: int, pipeline: int) -> Mesh:
    """One mesh for all cells with these degrees: gloo keeps threads for each group that was ever made."""
    mesh = Mesh(tensor=tensor, pipeline=pipeline, device="cpu" if device == "cpu" else None)
    assert mesh.world.size == ranks
    return mesh


def make_trainer(config: Config, cell: Cell) -> Trainer:
    """The trainer of this rank at a cell's layout, on random text."""
    model, train = config.model, config.train
    samples = min(_SAMPLES, train.steps * train.global_batch)
    text = random_text(model.vocab_size, samples + 1, train.sequence_length, pairs="nsp" in model.objectives)
    return build_trainer(at(config, cell), _mesh(cell.device, cell.ranks, cell.tensor, cell.pipeline), text)


def save(trainer: Trainer, root: Path) -> Path:
    """Save a checkpoint in `root`, and return its folder. Collective.

    Raises:
        RunError: it could not be saved.
    """
    progress, mesh = trainer.progress, trainer.mesh
    saver = Saver(
        Root.of(str(root)),
        trainer.model,
        trainer.optimizer,
        trainer.config,
        mesh,
        mesh.host_group("checkpoint"),
        described={"layout": {"ranks": mesh.world.size}, "data": {}, "versions": {}},
    )
    saver.save(progress.step, {"schedule": {}, "rng": {}} | {key: getattr(progress, key) for key in _PLACE})
    saver.wait()
    for saved in saver.finished():
        if saved.problem is not None:
            raise RunError(f"the checkpoint could not be saved: {saved.problem}")
    return root / step_name(progress.step)


def resume(config: Config, cell: Cell, folder: Path) -> Trainer:
    """A new trainer that continues from a checkpoint. Collective."""
    trainer, where = make_trainer(config, cell), Root.of(str(folder))
    manifest = read_manifest(where, trainer.mesh.world)
    restore(where, manifest, trainer.model, trainer.optimizer, trainer.mesh)
    for key in ("step", *_PLACE):
        setattr(trainer.progress, key, getattr(manifest, key))
    return trainer


def first_half(trainer: Trainer, target: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], Path]:
    """Train to the middle and save there; the initial weights, the first gradients, losses and the checkpoint's folder.

    Collective. The tensors are those of this rank's stages, on the host.
    """
    weights = {name: tensor.cpu() for name, tensor in canonical_weights(trainer.model).items()}
    record, found = step_with_gradients(trainer)
    gradients = {name: tensor.cpu() for name, tensor in found.items()}
    losses = [record.loss, *(trainer.step().loss for _ in range(half(trainer.config) - 1))]
    checkpoint = save(trainer, target)
    trainer.feed.close()
    return weights, gradients, losses, checkpoint


def train_reference(config: Config, cell: Cell, folder: Path) -> Path:
    """Train in this process without a stop, and keep what others are compared with; returns the checkpoint's folder.

    The checkpoint is that of the middle of the training.
    """
    trainer = make_trainer(config, cell)
    weights, gradients, losses, checkpoint = first_half(trainer, folder / "one-process")
    losses += [trainer.step().loss for _ in range(config.train.steps - half(config))]
    trainer.feed.close()
    Reference(losses, weights, gradients).save(folder)
    return checkpoint


def half(config: Config) -> int:
    """The step after which checkpoints change hands."""
    return config.train.steps // 2


def continued(config: Config, cell: Cell, folder: Path) -> list[float]:
    """The losses of a new training that goes on from a checkpoint to the last step. Collective."""
    trainer = resume(config, cell, folder)
    losses = [trainer.step().loss for _ in range(config.train.steps - half(config))]
    check_replicas(trainer.model, trainer.mesh, config.train.steps)
    trainer.feed.close()
    return losses


def measure(config: Config, cell: Cell, folder: Path, source: Path, target: Path) -> tuple[Differences, Path]:
    """Train one cell on this rank: from the start, then from the checkpoint `source` of another one. Collective.

    Args:
        folder: with the reference.
        target: a folder for this cell's own checkpoint, whose place is returned.
    """
    reference, trainer = Reference.load(folder), make_trainer(config, cell)
    weights, gradients, losses, checkpoint = first_half(trainer, target)
    later = continued(config, cell, source)
    _require_same_names(set(weights), set(reference.weights), trainer.mesh)
    every = collectives.all_gather_objects(_of_tensors(weights, gradients, reference), trainer.mesh.world)
    (of_weights, weight), (of_gradients, gradient) = (max(each[kind] for each in every) for kind in range(2))
    early = loss_difference(losses, reference.losses[: len(losses)])
    late = loss_difference(later, reference.losses)
    return Differences(of_weights, early, of_gradients, late, weight, gradient), checkpoint


def _require_same_names(here: set[str], wanted: set[str], mesh: Mesh) -> None:
    """Raise RunError on every rank unless the tensors of all ranks are those of the reference. Collective."""
    found = set[str]().union(*collectives.all_gather_objects(here, mesh.world))
    if found != wanted:
        differing = [("lack", sorted(wanted - found)), ("have", sorted(found - wanted))]
        told = " and ".join(f"{verb} {listing(names, most=3)}" for verb, names in differing if names)
        raise RunError(f"the tensors of the model must be those of one process: they {told}")


def _of_tensors(
    weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], reference: Reference
) -> list[tuple[float, str]]:
    """The largest difference of this rank's weights, and of its gradients, each with the name of the tensor."""
    by_name = {name: _difference(tensor, reference.weights[name]) for name, tensor in weights.items()}
    errors = gradient_errors({**reference.gradients, **gradients}, dict(reference.gradients))
    return [_largest(by_name), _largest({name: errors[name] for name in gradients})]


def _difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of an element, relative to the largest element; 0 only of equal tensors."""
    if torch.equal(found, wanted):
        return 0.0
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-30))


def _largest(by_name: Mapping[str, float]) -> tuple[float, str]:
    """The largest value, and its name; what is not a number is larger than all."""
    return max(((math.inf if math.isnan(value) else value, name) for name, value in by_name.items()), default=(0.0, ""))


def loss_difference(found: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference from the last losses of `reference`."""
    wanted = reference[len(reference) - len(found) :]
    return _largest({str(i): abs(a - b) / abs(b) for i, (a, b) in enumerate(zip(found, wanted, strict=True))})[0]
