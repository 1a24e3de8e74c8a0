"""The quickstart of this tree beside that of another tree: time, and what each has learned of all held-out stories.

`BENCH_BESIDE` names the other tree, which has an environment in `.venv`. The trees take turns, for each seed once.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import median
from report import ROOT, Report, Table, target

TEXT = ("data.packing=cut", "train.sequence_length=256", "precision.mode=float32", "--part", "eval", "--json")
"""Both models predict the same tokens from the same tokens before them."""
FIGURES = ("perplexity", "bits_per_byte", "steps_seconds", "seconds")


def train(tree: Path, folder: Path, seed: int) -> dict[str, Any]:
    """Figures of a training with the recipe's own layout, and of its model on all held-out stories."""
    command = [str(tree / ".venv/bin/shardwise"), "train", "quickstart", f"train.seed={seed}", f"--run-dir={folder}"]
    # Each tree's launcher divides the CPUs among its ranks.
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    before, start = os.times(), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=variables)
    seconds, after = time.monotonic() - start, os.times()
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [event["step_seconds"] for event in events if event["event"] == "step"]
    evaluate = [command[0], "evaluate", str(folder), "--nproc", "1", "parallel.tensor=1", *TEXT]
    done = subprocess.run(evaluate, check=True, capture_output=True, text=True, env=variables)
    return json.loads(done.stdout) | {
        "seconds": seconds,
        "steps": len(steps),
        "steps_seconds": sum(steps),
        "processor_seconds": sum(after[2:4]) - sum(before[2:4]),
    }


def run(rounds: int) -> Report:
    """Trainings of so many seeds: `--rounds 1` takes the time of one."""
    trees = {"here": ROOT} | ({"there": Path(named)} if (named := os.environ.get("BENCH_BESIDE")) else {})
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in trees}
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        for seed in range(1, rounds + 1):
            for arm, tree in [*trees.items()][:: 1 if seed % 2 else -1]:
                print(f"  seed {seed}: {arm}", flush=True)
                found[arm].append(train(tree, Path(folder, f"{arm}-{seed}"), seed))
    rows = [
        [
            f"{arm}, seed {seed}",
            *(f"{one[name]:,}" for name in ("steps", "tokens")),
            *(f"{one[name]:.4f}" for name in FIGURES[:2]),
            *(f"{one[name]:.1f}" for name in (*FIGURES[2:], "processor_seconds")),
        ]
        for arm, runs in found.items()
        for seed, one in enumerate(runs, 1)
    ]
    columns = ("", "steps", "held-out tokens", "perplexity", "bits a byte", "seconds of steps", "of the command")
    notes = [
        "`shardwise train quickstart` from the command to its end, and `shardwise evaluate` of its last checkpoint in "
        "float32 on all held-out stories, in blocks of 256 tokens. Processor seconds: of all processes."
    ]
    targets = []
    if "there" in found:
        describe = ["git", "-C", str(trees["there"]), "describe", "--always", "--dirty", "--exclude", "*"]
        beside = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
        notes.append(f"There: commit {beside}. Ratios are of pairs of one seed.")
        for name, limit in zip(FIGURES, (1.0, 1.0, 0.5, 0.5), strict=True):
            ratios = [here[name] / there[name] for here, there in zip(found["here"], found["there"], strict=True)]
            # What is learned holds for each seed; times are medians.
            ratio = (max if limit == 1.0 else median)(ratios)
            targets.append(target(f"{name.replace('_', ' ')}, beside there", ratio, limit, at_least=False))
    return Report(
        "quickstart",
        "The quickstart: time, and what the model has learned",
        [Table((*columns, "processor seconds"), rows)],
        found,
        targets,
        notes,
    )
