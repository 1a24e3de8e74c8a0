"""AdamW and Muon on llama-small, each at five learning rates: Muon has 0.8 of AdamW's steps."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from report import ROOT, Report, Table, target

STEPS = {"adamw": 240, "muon": 192}
RATES = {"adamw": ("5e-4", "1e-3", "2e-3", "4e-3", "8e-3"), "muon": ("1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2")}
PICTURE = ROOT / "docs/images/optimizers.svg"
KEYS = ("parallel.tensor=1", "train.eval_every=48", "log.tensorboard=false", "log.sample_tokens=0")
_SMOOTHED = 10


def run(rounds: int) -> Report:
    """One training of one process for each optimizer and rate: the loss is the same at every layout."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        for name, steps in STEPS.items():
            for rate in RATES[name]:
                keys = [*KEYS, f"optimizer.name={name}", f"optimizer.lr={rate}", f"train.steps={steps}"]
                command = [sys.executable, "-m", "shardwise", "train", "llama-small", *keys, "--nproc", "1"]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                run_folder = str(Path(folder) / f"{name}-{rate}")
                subprocess.run([*command, "--run-dir", run_folder], env=environment, check=True, capture_output=True)
        return report(Path(folder))


def report(folder: Path) -> Report:
    """The evaluation losses at the end, and a picture of the best training of each optimizer."""
    from shardwise import Run

    final: dict[str, dict[str, float]] = {}
    curves: dict[str, list[tuple[int, float]]] = {}
    for name in STEPS:
        runs = {rate: Run(folder / f"{name}-{rate}") for rate in RATES[name]}
        final[name] = {rate: trained.results()["final_eval_loss"] for rate, trained in runs.items()}
        best_rate = min(final[name], key=final[name].__getitem__)
        events = runs[best_rate].metrics("step")
        curves[f"{name}, lr {best_rate}"] = [(event["step"], event["loss"]) for event in events]
    draw(curves)
    rows = [
        [rate, *(f"{losses[rate]:.4f}" if rate in losses else "" for losses in final.values())]
        for rate in sorted({*RATES["adamw"], *RATES["muon"]}, key=float)
    ]
    best = {name: min(losses.values()) for name, losses in final.items()}
    return Report(
        "optimizers",
        "AdamW and Muon on llama-small",
        [Table(("learning rate", *(f"{name}, {steps} steps" for name, steps in STEPS.items())), rows)],
        {"final_eval_loss": final},
        [target("Muon's best loss after 0.8 of AdamW's steps, nats", best["muon"], best["adamw"], at_least=False)],
        [
            "Evaluation losses at the end of each training, by one process in float32. Both optimizers have the "
            "recipe's schedule over their own steps, and Muon has the same rate for matrices and for all others."
        ],
    )


def draw(curves: dict[str, list[tuple[int, float]]]) -> None:
    """Draw the training losses, each the mean of ten steps."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "shardwise"}):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.subplots()
        for label, points in curves.items():
            means: list[tuple[int, float]] = []
            for stop in range(_SMOOTHED, len(points) + 1, _SMOOTHED):
                group = points[stop - _SMOOTHED : stop]
                means.append((group[-1][0], sum(loss for _, loss in group) / _SMOOTHED))
            axes.plot(*zip(*means, strict=True), label=label)
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
        axes.grid(alpha=0.25)
        axes.legend()
        figure.savefig(PICTURE, metadata={"Date": None})
