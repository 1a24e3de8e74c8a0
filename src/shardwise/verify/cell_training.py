"""A training of the miniature at a cell's layout, and its differences from the training in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from shardwise.base.errors import RunError, listing
from shardwise.checkpoint.restore import read_manifest, restore_checkpoint
from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.storage.checkpoint_folders import step_name
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config
from shardwise.data import random_tokens
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group, Mesh
from shardwise.optim.state_digest import StateHash, digests_by_tensor
from shardwise.optim.state_hash import StateSums
from shardwise.train.build import build_trainer
from shardwise.train.model_checks import check_replicas
from shardwise.train.step_record import StepRecord
from shardwise.train.trainer import Trainer
from shardwise.verify.canonical_values import canonical_weights, gradient_errors, step_with_gradients
from shardwise.verify.layouts import Cell
from shardwise.verify.miniature import miniature_at_cell
from shardwise.verify.recorded_choices import Recorded, RecordedChoices, train_with_choices
from shardwise.verify.tolerance import LayoutDifferences, Tolerance

_SAMPLES = 256  # samples of the random text; longer trainings read them again
_PROGRESS_KEYS = ("samples", "position", "tokens")
"""Keys of a manifest, and attributes of a training's progress, that say how far it is."""
_REFERENCE_FILE = "reference.pt"


@dataclass(frozen=True)
class ReferenceTraining:
    """The training in one process, with which each cell's is compared."""

    losses: Sequence[float]
    weights: Mapping[str, Tensor]  # initial weights by canonical name
    gradients: Mapping[str, Tensor]  # gradients of the first step by canonical name
    # Texts of the training's state after its middle and after its end (`_state_texts`).
    states: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    # Experts that routers chose; empty for a dense model, and in bit-equal training.
    choices: Recorded = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        values = (self.losses, self.weights, self.gradients, self.states, self.choices)
        torch.save(values, folder / _REFERENCE_FILE)

    # Cached: the ranks of many cells compare with the same one.
    @staticmethod
    @cache
    def load(folder: Path) -> ReferenceTraining:
        return ReferenceTraining(*torch.load(folder / _REFERENCE_FILE, weights_only=True))


@cache
def _mesh(device: str, ranks: int, degrees: tuple[tuple[str, int], ...], grains: tuple[tuple[str, int], ...]) -> Mesh:
    """Return the only mesh of all cells with these degrees: gloo keeps threads for each group that was ever made."""
    device_of_mesh = "cpu" if device == "cpu" else None
    mesh = Mesh(**dict(degrees), device=device_of_mesh, grains=dict(grains))
    assert mesh.world.size == ranks
    return mesh


def make_trainer(config: Config, cell: Cell, choices: RecordedChoices | None = None) -> Trainer:
    """Build the trainer of this rank at a cell's layout, on random text; `choices` follow its routers."""
    model = config.model
    train = config.train
    samples = min(_SAMPLES, train.steps * train.global_batch)
    text = random_tokens(model.vocab_size, samples + 1, train.sequence_length, pairs="nsp" in model.objectives)
    config = miniature_at_cell(config, cell)
    mesh = _mesh(cell.device, cell.ranks, tuple(config.parallel.degrees.items()), tuple(config.grains.items()))
    trainer = build_trainer(config, mesh, text)
    if choices is not None and not config.is_bit_equal:
        choices.follow(trainer.model, train.sequence_length)
    return trainer


def _save_checkpoint(trainer: Trainer, root: Path) -> Path:
    """Save a checkpoint in `root`, and return its folder; RunError if that failed. Collective."""
    progress = trainer.progress
    mesh = trainer.mesh
    saver = Saver(
        Root.of(str(root)),
        trainer.model,
        trainer.optimizer,
        trainer.config,
        mesh,
        mesh.host_group("checkpoint"),
        described={"layout": {"ranks": mesh.world.size}, "data": {}, "versions": {}},
    )
    saver.save(progress.step, {"schedule": {}, "rng": {}} | {key: getattr(progress, key) for key in _PROGRESS_KEYS})
    saver.wait()
    for saved in saver.finished():
        if saved.problem is not None:
            raise RunError(f"the checkpoint could not be saved: {saved.problem}")
    return root / step_name(progress.step)


def _resumed_trainer(config: Config, cell: Cell, folder: Path, choices: RecordedChoices | None = None) -> Trainer:
    """Build a trainer that continues from a checkpoint. Collective."""
    trainer = make_trainer(config, cell, choices)
    checkpoint = Root.of(str(folder))
    manifest = read_manifest(checkpoint, trainer.mesh.world)
    restore_checkpoint(checkpoint, manifest, trainer.model, trainer.optimizer, trainer.mesh)
    for key in ("step", *_PROGRESS_KEYS):
        setattr(trainer.progress, key, getattr(manifest, key))
    return trainer


def _state_texts(trainer: Trainer, records: Sequence[StepRecord]) -> dict[str, str]:
    """Return what must have equal bits beside the losses, by name; nothing without bit-equal training. Collective.

    It is the gradient norm of each step, and of the present state the digest of each tensor.
    """
    if not trainer.config.is_bit_equal:
        return {}
    texts = {f"the gradient norm of step {record.step}": record.grad_norm.hex() for record in records}
    state = StateHash({}, StateSums(trainer.model, trainer.optimizer, trainer.mesh).measure())
    return texts | digests_by_tensor(state.digests(), state.names())


def _train_first_half(trainer: Trainer, target: Path) -> tuple[ReferenceTraining, Path]:
    """Train to the middle and save there. Collective.

    Return what a reference has, of this rank's stages, on the host, with the state of the middle; and the checkpoint.
    """
    weights = {
        name: tensor.cpu() for name, tensor in canonical_weights(trainer.model, optimizer=trainer.optimizer).items()
    }
    record, device_gradients = step_with_gradients(trainer)
    gradients = {name: tensor.cpu() for name, tensor in device_gradients.items()}
    records = [record, *(trainer.step() for _ in range(trainer.config.train.steps // 2 - 1))]
    states = (_state_texts(trainer, records), dict[str, str]())
    checkpoint = _save_checkpoint(trainer, target)
    trainer.feed.close()
    return ReferenceTraining([record.loss for record in records], weights, gradients, states), checkpoint


def train_reference(config: Config, cell: Cell, folder: Path) -> Path:
    """Train in this process without a stop, save the reference, and return the folder of the middle's checkpoint."""
    choices = RecordedChoices()
    trainer = make_trainer(config, cell, choices)
    begin, checkpoint = _train_first_half(trainer, folder / "one-process")
    records = [trainer.step() for _ in range(config.train.steps - config.train.steps // 2)]
    trainer.feed.close()
    losses = [*begin.losses, *(record.loss for record in records)]
    states = (begin.states[0], _state_texts(trainer, records))
    replace(begin, losses=losses, states=states, choices=choices.recorded).save(folder)
    return checkpoint


def continue_in_one_process(config: Config, cell: Cell, folder: Path, source: Path) -> LayoutDifferences:
    """Let one process continue from the checkpoint `source` of another layout; return its differences."""
    reference = ReferenceTraining.load(folder)

    def train(choices: RecordedChoices) -> tuple[list[float], dict[str, str]]:
        return _train_to_last_step(config, cell, source, choices)

    tolerance = Tolerance.of(config).gradients
    (losses, state), choices = train_with_choices(train, reference.choices, tolerance, Group())
    resumed = _loss_difference(losses, reference.losses)
    resumed_state = _first_difference(state, reference.states[1])
    return LayoutDifferences(0.0, 0.0, 0.0, resumed, resumed_state=resumed_state, choices=choices)


def _train_to_last_step(
    config: Config, cell: Cell, folder: Path, choices: RecordedChoices
) -> tuple[list[float], dict[str, str]]:
    """Train on from a checkpoint to the last step; return the losses and the texts of the state. Collective."""
    trainer = _resumed_trainer(config, cell, folder, choices)
    records = [trainer.step() for _ in range(config.train.steps - config.train.steps // 2)]
    check_replicas(trainer.model, trainer.mesh, config.train.steps, trainer.optimizer)
    trainer.feed.close()
    return [record.loss for record in records], _state_texts(trainer, records)


def train_cell(config: Config, cell: Cell, folder: Path, source: Path, target: Path) -> tuple[LayoutDifferences, Path]:
    """Train one cell on this rank: from the start, then from the checkpoint `source` of another one. Collective.

    Args:
        folder: folder of the reference.
        source: folder of the checkpoint of another layout.
        target: folder for this cell's own checkpoint, whose place is returned.
    """
    reference = ReferenceTraining.load(folder)

    def train(choices: RecordedChoices) -> tuple[ReferenceTraining, Path, list[float], dict[str, str]]:
        trainer = make_trainer(config, cell, choices)
        place = target / "replayed" if choices.replays else target
        begin, checkpoint = _train_first_half(trainer, place)
        # This makes a new trainer: nothing of the first one helps it to resume.
        return begin, checkpoint, *_train_to_last_step(config, cell, source, choices)

    world = Group.world()
    tolerance = Tolerance.of(config).gradients
    (begin, checkpoint, later_losses, later_state), choices = train_with_choices(
        train, reference.choices, tolerance, world
    )
    _require_same_names(set(begin.weights), set(reference.weights), world)
    by_rank = collectives.all_gather_objects(_tensor_differences(begin.weights, begin.gradients, reference), world)
    weight_difference, weight = max(weight for weight, _ in by_rank)
    gradient_difference, gradient = max(gradient for _, gradient in by_rank)
    differences = LayoutDifferences(
        weights=weight_difference,
        losses=_loss_difference(begin.losses, reference.losses[: len(begin.losses)]),
        gradients=gradient_difference,
        resumed=_loss_difference(later_losses, reference.losses),
        weight=weight,
        gradient=gradient,
        state=_first_difference(begin.states[0], reference.states[0]),
        resumed_state=_first_difference(later_state, reference.states[1]),
        choices=choices,
    )
    return differences, checkpoint


def _first_difference(texts: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Return the first name, of either, whose texts differ; empty if there is none."""
    return next((name for name in {**expected, **texts} if texts.get(name) != expected.get(name)), "")


def _require_same_names(rank_names: set[str], reference_names: set[str], world: Group) -> None:
    """Raise RunError on every rank unless the tensors of all ranks are those of the reference. Collective."""
    names = set[str]().union(*collectives.all_gather_objects(rank_names, world))
    if names != reference_names:
        problems = []
        if lacked := sorted(reference_names - names):
            problems.append(f"lack {listing(lacked, most=3)}")
        if surplus := sorted(names - reference_names):
            problems.append(f"have {listing(surplus, most=3)}")
        raise RunError(f"the tensors of the model must be those of one process: they {' and '.join(problems)}")


def _tensor_differences(
    weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], reference: ReferenceTraining
) -> tuple[tuple[float, str], tuple[float, str]]:
    """Return the largest difference of this rank's weights, and of its gradients, each with the name of the tensor."""
    by_name = {name: _difference(tensor, reference.weights[name]) for name, tensor in weights.items()}
    # In place of the gradients of other stages stand those of the reference: the scale is that of the whole model.
    errors = gradient_errors({**reference.gradients, **gradients}, dict(reference.gradients))
    return _largest(by_name), _largest({name: errors[name] for name in gradients})


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of an element, relative to the largest element; 0 only for equal tensors."""
    if torch.equal(actual, expected):
        return 0.0
    largest_difference = (actual.double() - expected.double()).abs().max()
    return float(largest_difference / expected.double().abs().max().clamp_min(1e-30))


def _largest(by_name: Mapping[str, float]) -> tuple[float, str]:
    """Return the largest value, and its name; NaN counts as infinite."""
    values = [(math.inf if math.isnan(value) else value, name) for name, value in by_name.items()]
    return max(values, default=(0.0, ""))


def _loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    expected_losses = reference[len(reference) - len(losses) :]
    differences = {
        str(step): abs(loss - expected) / abs(expected)
        for step, (loss, expected) in enumerate(zip(losses, expected_losses, strict=True))
    }
    return _largest(differences)[0]
