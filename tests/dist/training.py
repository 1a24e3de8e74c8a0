"""What the parity tests run on every rank: a few optimizer steps of a tiny model, by the trainer itself."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from shardwise.config import Config, config_from_sections
from shardwise.data.formats.prepared_data import random_tokens as make_data
from shardwise.data.samples.batch import IGNORE, Batch
from shardwise.train.build import build_trainer
from shardwise.verify.canonical_values import canonical_gradients, canonical_weights
from tests.dist.dense import mesh as shared_mesh

MODEL: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 131,  # odd: the vocabulary is padded at every degree
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # fewer than 4 ranks: copied K/V heads
    "initializer_range": 0.05,
}
Sections = dict[str, dict[str, Any]]
"""Of a configuration, by name."""
MODELS: dict[str, Sections] = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
FAMILIES, FACTS, SPARSE = MODELS["families"], MODELS["facts"], MODELS["sparse"]
_CASES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))


def cases(test: str) -> Any:
    """The cases of a test: values by name, or tuples of values."""
    found = _CASES[test]
    return [tuple(case) if isinstance(case, list) else case for case in found] if isinstance(found, list) else found


def named(test: str, *often: str) -> list[Any]:
    """Parameters of the cases of a test, whose names are the ids; those that are not among `often` are slow."""
    slow = pytest.mark.slow
    return [pytest.param(*case, id=name, marks=() if name in often else slow) for name, case in cases(test).items()]


def sizes(
    vocabulary: int = 131,  # odd: the vocabulary is padded at every degree
    hidden: int = 64,
    feed_forward: int = 96,
    layers: int = 2,
    heads: int = 8,
    positions: int = 16,
    spread: float = 0.02,
) -> dict[str, Any]:
    """The sizes in a `model` section, which every family has; `spread`: standard deviation of the initial weights."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "initializer_range": spread,
    }


SMALL_MODELS = {name: sizes(61, 32, 48, heads=4, positions=24) | own for name, own in MODELS["small"].items()}


def make_config(**sections: dict[str, Any]) -> Config:
    """A tiny float32 configuration; `sections` update the defaults, or replace the model where they name a family."""
    base: dict[str, dict[str, Any]] = {
        "model": dict(MODEL),
        "parallel": {},
        "train": {"steps": 20, "global_batch": 8, "micro_batch": 2, "sequence_length": 16, "seed": 7},
        "optimizer": {"lr": 1e-3, "warmup_steps": 3, "bucket_mib": 0.05},
        "precision": {"mode": "float32"},
        "log": {"drift_every": 5},
    }
    for section, values in sections.items():
        if "family" in values:
            base[section] = {}
        base.setdefault(section, {}).update(values)
    return config_from_sections(base)


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    before: tuple[float, float]
    evaluation: tuple[float, float]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def train(config: Config, steps: int = 4, uneven: bool = False, bodies: bool = True) -> Outcome:
    """Run on this rank; the outcome holds the weights at step 0 and the gradients of step 1, in canonical form.

    Of each pipeline rank one has them, of its stages: those of `whole` are the model's.
    """
    mesh = shared_mesh(config.parallel.tensor, config.parallel.pipeline)
    data = make_data(config.model.vocab_size, pairs="nsp" in config.model.objectives)
    trainer = build_trainer(config, mesh, data)
    if uneven:
        uncount(trainer.feed.batches)
    before = trainer.evaluator.held_out()
    weights = {n: t.clone() for n, t in canonical_weights(trainer.model, optimizer=trainer.optimizer).items()}
    micro_batches = trainer.feed.at(0)
    trainer.passes.run(micro_batches, step=1)
    gradients = canonical_gradients(trainer.model, trainer.optimizer)
    trainer.optimizer.zero_grad()
    records = [trainer.step() for _ in range(steps)]
    outcome = Outcome([r.loss for r in records], [r.grad_norm for r in records], before, trainer.evaluator.held_out())
    if mesh.dp.rank == mesh.tp.rank == 0 and bodies:
        outcome.weights, outcome.gradients = weights, gradients
    return outcome


def whole(outcomes: list[Outcome]) -> Outcome:
    """All stages' weights and gradients; what two of them hold (a tied weight) is equal there."""
    first = outcomes[0]
    for other in outcomes[1:]:
        for mine, theirs in ((first.weights, other.weights), (first.gradients, other.gradients)):
            for name in mine.keys() & theirs.keys():
                assert torch.equal(mine[name], theirs[name]), f"{name} differs between two pipeline stages"
            mine |= theirs
    return first


def uncount(batches: Any) -> None:
    """Ignore a number of targets that depends on the sample, so that micro-batches count differently."""
    plain = batches.collate

    def collate(indices: Any, epochs: Any, samples: Any) -> Batch:
        batch = plain(indices, epochs, samples)
        targets = batch.inputs["targets_SB"]
        for column, sample in enumerate(np.asarray(indices).tolist()):
            targets[: sample % 13, column] = IGNORE
        return replace(batch, counts=np.array([np.count_nonzero(targets != IGNORE)]))

    batches.collate = collate
