"""A small Llama's losses with products in fp8 beside those of mixed precision and of float32, by the command line.

The stories and the tokenizer are the quickstart's; the model has four blocks, and AdamW trains it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import Report, Table, target

MODES = {
    "float32": ["precision.mode=float32"],
    "mixed": ["precision.mode=mixed"],
    "mixed, fp8 products": ["precision.mode=mixed", "precision.matmul=fp8"],
}
RECIPE = (
    *("parallel.tensor=1", "parallel.sequence=false", "model.hidden_size=192", "model.intermediate_size=512"),
    *("model.num_hidden_layers=4", "model.num_attention_heads=8", "model.num_key_value_heads=4"),
    *("model.tie_word_embeddings=false", "model.initializer_range=0.02", "train.steps=300"),
    *("optimizer={name: adamw, lr: 2e-3, min_lr: 2e-4, warmup_steps: 24, weight_decay: 0.1, betas: [0.9, 0.95]}",),
)
"""What differs from the quickstart's recipe."""
STEPS = 150
EVERY = 50
"""Steps between evaluations."""


def train(mode: str, folder: Path, steps: int) -> dict[str, Any]:
    """The evaluation losses of a run of one process, and its seconds."""
    run_dir = folder / mode
    keys = [*RECIPE, f"train.eval_every={EVERY}", f"train.stop_after={steps}"]
    command = [sys.executable, "-m", "shardwise", "train", "quickstart", *keys, *MODES[mode]]
    start = time.monotonic()
    subprocess.run(
        [*command, "log.tensorboard=false", "log.sample_tokens=0", "--run-dir", str(run_dir)],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "eval" and event["step"]}
    return {"losses": losses, "seconds": time.monotonic() - start}


def run(rounds: int, steps: int | None = None) -> Report:
    figures = {}
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        for mode in MODES:
            print(f"  {mode}", flush=True)
            figures[mode] = train(mode, Path(folder), steps or STEPS)
    reference = figures["mixed"]["losses"]
    rows = []
    for mode, measured in figures.items():
        losses = measured["losses"]
        off = max((losses[step] / reference[step] - 1 for step in reference), key=abs)
        rows.append([mode, *(f"{loss:.4f}" for loss in losses.values()), f"{off:+.2%}"])
    last = max(reference)
    off = figures["mixed, fp8 products"]["losses"][last] / reference[last] - 1
    return Report(
        "fp8",
        "Products in fp8: a small Llama's evaluation loss",
        [Table(("", *(f"step {step}" for step in reference), "most off mixed"), rows)],
        figures,
        [target("the loss with fp8 products off mixed's by", abs(off), 0.02, at_least=False)],
        [
            f"`shardwise train quickstart {' '.join(RECIPE)}` in one process on a CPU, which multiplies the same "
            "rounded numbers as a GPU does."
        ],
    )
