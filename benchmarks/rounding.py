"""Training in bfloat16 without float32 masters: what rounding to nearest loses, and what stochastic rounding takes."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import ranks
from measure import median
from report import Report, Table, target

WAYS: dict[str, dict[str, str]] = {
    "mixed": {"mode": "mixed"},
    "bfloat16, nearest": {"mode": "bfloat16", "rounding": "nearest"},
    "bfloat16, stochastic": {"mode": "bfloat16", "rounding": "stochastic"},
}
RECIPES: dict[str, list[str]] = {"llama2-tiny": [], "llama-small": ["parallel.tensor=1"]}
STEPS = 40


def train(recipe: str, cache: str, mode: str, rounding: str | None = None) -> Any:
    """On one process: at each turn the seconds of a step; after the last the evaluation loss."""
    from pathlib import Path

    import torch

    from shardwise.config import load_config
    from shardwise.data.open_data import prepare_data
    from shardwise.distributed.mesh import Mesh
    from shardwise.train.build import build_trainer

    torch.set_num_threads(1)
    keys = [
        *RECIPES[recipe],
        "optimizer.lr=2e-5",
        "optimizer.min_lr=0",
        f"train.steps={STEPS}",
        "data.split=95,5,0",
        "train.eval_batches=4",
    ]
    keys += [f"precision.mode={mode}", *([f"precision.rounding={rounding}"] if rounding else [])]
    config = load_config(recipe, keys)
    trainer = build_trainer(config, Mesh(device="cpu"), prepare_data(config, Path(cache)))
    yield 0.0
    for _ in range(STEPS):
        start = time.perf_counter()
        trainer.step()
        yield time.perf_counter() - start
    yield trainer.evaluator.held_out()[0]


def run(rounds: int) -> Report:
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as cache:
        return _run(cache)


def _run(cache: str) -> Report:
    figures: dict[str, Any] = {}
    rows, targets = [], []
    for recipe in RECIPES:
        jobs = {
            way: ranks.Job("rounding", "train", 1, recipe=recipe, cache=cache, **options)
            for way, options in WAYS.items()
        }
        times: dict[str, list[float]] = {way: [] for way in jobs}
        try:
            for job in jobs.values():
                job.receive()
            for _ in range(STEPS):
                for way, job in jobs.items():
                    times[way].append(job.go_on()[0])
            losses = {way: job.go_on()[0] for way, job in jobs.items()}
        finally:
            for job in jobs.values():
                job.__exit__()
        against = times["bfloat16, nearest"]
        for way in jobs:
            ratio = median([one / other for one, other in zip(times[way][2:], against[2:], strict=True)])
            off = losses[way] / losses["mixed"] - 1
            figures[f"{recipe}: {way}"] = {"loss": losses[way], "seconds": median(times[way][2:]), "ratio": ratio}
            rows.append([recipe, way, f"{losses[way]:.4f}", f"{off:+.2%}", f"{ratio:.2f}"])
        stochastic = figures[f"{recipe}: bfloat16, stochastic"]
        targets += [
            target(
                f"{recipe}: loss off mixed's by", abs(stochastic["loss"] / losses["mixed"] - 1), 0.01, at_least=False
            ),
            target(f"{recipe}: step time, times nearest's", stochastic["ratio"], 1.1, at_least=False),
        ]
    return Report(
        "rounding",
        "Stochastic rounding",
        [Table(("recipe", "precision", f"loss after {STEPS} steps", "against mixed", "step time, × nearest"), rows)],
        figures,
        targets,
        ["A learning rate of 2e-5: most updates are smaller than half the distance of neighbouring bfloat16 numbers."],
    )
