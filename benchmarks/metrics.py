"""What it costs to measure and record every step: full metrics against none, step by step in one run."""

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
STEPS, WARM_UP = 130, 10
LIMIT = 1.01


def run(rounds: int) -> Report:
    figures: dict[str, Any] = {}
    rows, targets = [], []
    for recipe, size in RECIPES.items():
        found = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                found.append(ranks.run("metrics", "stepped", size, recipe=recipe, folder=folder)[0])
        none, full = (median([median(one[kind]) for one in found]) for kind in ("none", "full"))
        ratio = median([median(one["full"]) / median(one["none"]) for one in found])
        figures[recipe] = {"none": none, "full": full, "ratio": ratio}
        rows.append([recipe, str(size), f"{none * 1e3:.2f} ms", f"{full * 1e3:.2f} ms", f"{ratio:.4f}×"])
        targets.append(target(f"a step of {recipe} with full metrics over one without", ratio, LIMIT, at_least=False))
    return Report(
        "metrics",
        "What it costs to measure and record every step",
        [Table(["recipe", "ranks", "none", "full", "full over none"], rows)],
        figures,
        targets,
        [
            f"Seconds from one step to the next: medians of {STEPS - WARM_UP} steps, of which every other one is "
            f"measured, in each of {rounds} runs. Full: the step is split, recorded for each rank and written to "
            "TensorBoard. None: nothing is measured or recorded."
        ],
    )


def stepped(recipe: str, folder: str) -> dict[str, list[float]]:
    """Seconds from each step to the next on this rank, of steps with no metrics and with full ones."""
    from shardwise.config import load_config
    from shardwise.train import run as training
    from shardwise.train.step_meters import StepMeter
    from shardwise.train.trainer import Trainer

    keys = ["train.eval_every=0", "log.sample_tokens=0", "log.drift_every=0", "checkpoint.every_minutes=null"]
    size = int(os.environ["WORLD_SIZE"])
    keys += [f"train.steps={STEPS}", "log.every=1", f"parallel.tensor={size}", "parallel.pipeline=1"]
    began: list[float] = []
    step, begin = Trainer.step, StepMeter.begin

    def is_full() -> bool:
        return len(began) % 2 == 0

    def noted(self: Trainer, *arguments: Any) -> Any:
        began.append(time.perf_counter())
        return step(self, *arguments)

    def begin_if_full(self: StepMeter, *, measures: bool) -> None:
        if is_full():
            begin(self, measures=measures)
        else:
            self._measures = False

    os.chdir(folder)
    with (
        patch.object(Trainer, "step", noted),
        patch.object(StepMeter, "begin", begin_if_full),
        patch.object(Trainer, "is_logged", lambda *_: is_full()),
    ):
        training.run(load_config(recipe, [*keys, "parallel.schedule=1f1b"]), Path("runs/measured"), recipe)
    seconds = [b - a for a, b in zip(began[WARM_UP:], began[WARM_UP + 1 :], strict=False)]
    assert WARM_UP % 2 == 0  # the first of them has number WARM_UP + 1
    return {"none": seconds[::2], "full": seconds[1::2]}
