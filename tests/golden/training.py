"""What every rank of a golden run does: a shipped recipe's own steps, by the trainer itself."""

from pathlib import Path

import torch

from shardwise.config import load_config
from shardwise.data.open_data import prepare_data
from shardwise.train.build import build_trainer
from tests.dist.dense import mesh as shared_mesh

Curve = dict[str, list[float]]


def train(recipe: str, overrides: list[str], cache: Path, steps: int | None = None) -> Curve:
    """Loss and gradient norm of the first steps, or of all, on this rank, by the names of metrics.jsonl."""
    torch.set_num_threads(1)
    config = load_config(recipe, overrides)
    mesh = shared_mesh(config.parallel.tensor, expert=config.parallel.expert)
    trainer = build_trainer(config, mesh, prepare_data(config, cache))
    records = [trainer.step() for _ in range(steps or config.train.steps)]
    return {"loss": [record.loss for record in records], "grad_norm": [record.grad_norm for record in records]}


def fingerprint(recipe: str, cache: Path) -> str:
    """Of the recipe's data, tokens included."""
    return prepare_data(load_config(recipe, []), cache).fingerprint
