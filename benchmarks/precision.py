"""llama-small in every precision, by the command line: the evaluation loss at the end."""

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
    "bfloat16": ["precision.mode=bfloat16"],
    "bfloat16, nearest": ["precision.mode=bfloat16", "precision.rounding=nearest"],
}


def train(mode: str, folder: Path, extra: list[str]) -> dict[str, Any]:
    """Losses of one run."""
    run_dir = folder / mode
    command = [sys.executable, "-m", "shardwise", "train", "llama-small", *MODES[mode]]
    start = time.monotonic()
    subprocess.run(
        [*command, "log.tensorboard=false", "log.sample_tokens=0", *extra, "--run-dir", str(run_dir)],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "eval"]
    steps = [event for event in events if event["event"] == "step"]
    return {
        "first": losses[0],
        "last": losses[-1],
        "steps": len(steps),
        "tokens": steps[-1]["tokens"],
        "seconds": time.monotonic() - start,
    }


def run(rounds: int, steps: int | None = None) -> Report:
    extra = [] if steps is None else [f"train.stop_after={steps}"]
    figures = {}
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        for mode in MODES:
            print(f"  {mode}", flush=True)
            figures[mode] = train(mode, Path(folder), extra)
    reference = figures["float32"]["last"]
    rows = [
        [mode, f"{f['first']:.4f}", f"{f['last']:.4f}", f"{f['last'] / reference - 1:+.2%}", f"{f['seconds']:.0f} s"]
        for mode, f in figures.items()
    ]
    taken, tokens = figures["float32"]["steps"], figures["float32"]["tokens"]
    return Report(
        "precision",
        "Precision: llama-small's evaluation loss",
        [Table(("", "before", f"after {taken} steps", "against float32", "run"), rows)],
        figures,
        [
            target(
                f"{mode}'s evaluation loss off float32's by",
                abs(figures[mode]["last"] / reference - 1),
                0.02,
                at_least=False,
            )
            for mode in ("mixed", "bfloat16")
        ]
        + [
            target(
                "bfloat16's evaluation loss off mixed's by",
                abs(figures["bfloat16"]["last"] / figures["mixed"]["last"] - 1),
                0.01,
                at_least=False,
            )
        ],
        [f"`shardwise train llama-small` on two CPU ranks, {tokens:,} tokens; the data are this Python's own sources."],
    )
