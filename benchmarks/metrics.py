"""What it costs to measure and record every step: full metrics against none, from step to step."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ranks
from measure import median
from report import Report, Table, target

RECIPES = {"llama2-tiny": 1, "gpt3-tiny": 2}
"""By recipe, its ranks, of which two split the tensors."""
STEPS, WARM_UP = 60, 10
LIMIT = 1.01


def run(rounds: int) -> Report:
    figures: dict[str, Any] = {}
    rows, targets = [], []
    for recipe, size in RECIPES.items():
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for full, found in seconds.items():
                with tempfile.TemporaryDirectory() as folder:
                    found.append(
                        median(ranks.run("metrics", "stepped", size, recipe=recipe, full=full, folder=folder)[0])
                    )
        ratio = median([b / a for a, b in zip(seconds[False], seconds[True], strict=True)])
        figures[recipe] = {"none": seconds[False], "full": seconds[True], "ratio": ratio}
        names = [f"{median(seconds[full]) * 1e3:.2f} ms" for full in (False, True)]
        rows.append([recipe, str(size), *names, f"{ratio:.4f}×"])
        targets.append(target(f"a step of {recipe} with full metrics over one without", ratio, LIMIT, at_least=False))
    return Report(
        "metrics",
        "What it costs to measure and record every step",
        [Table(["recipe", "ranks", "none", "full", "full over none"], rows)],
        figures,
        targets,
        [
            f"Seconds from one step to the next, medians of {STEPS - WARM_UP} steps and {rounds} runs by turns. Full: "
            "every step is split, recorded for each rank and written to TensorBoard. None: nothing is measured or "
            "recorded."
        ],
    )


def stepped(recipe: str, full: bool, folder: str) -> list[float]:
    """Seconds from each step to the next, on this rank; the run is written to `folder`."""
    from shardwise.config import load_config
    from shardwise.train import run as training
    from shardwise.train.report import Reporter
    from shardwise.train.split import StepClock
    from shardwise.train.trainer import Trainer

    keys = ["train.eval_every=0", "log.sample_tokens=0", "log.drift_every=0", "checkpoint.every_minutes=null"]
    keys += [f"train.steps={STEPS}", "log.every=1", f"log.tensorboard={str(full).lower()}"]
    size = int(os.environ["WORLD_SIZE"])
    keys += [f"parallel.tensor={size}", "parallel.pipeline=1", "parallel.schedule=1f1b"]
    began: list[float] = []
    step = Trainer.step

    def noted(self: Trainer, *arguments: Any) -> Any:
        began.append(time.perf_counter())
        return step(self, *arguments)

    patches = [patch.object(Trainer, "step", noted)]
    if not full:
        patches += [
            patch.object(Reporter, "is_logged", lambda *_: False),
            patch.object(StepClock, "begin", lambda *_, **__: None),
            patch.object(StepClock, "read", lambda *_: None),
            patch.object(StepClock, "split", lambda *_: {}),
        ]
    for one in patches:
        one.start()
    os.chdir(folder)
    training.run(load_config(recipe, keys), Path("runs/measured"), recipe)
    return [b - a for a, b in zip(began[WARM_UP:], began[WARM_UP + 1 :], strict=False)]
