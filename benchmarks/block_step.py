"""One block's forward and backward pass by torch's dispatcher: operators, bytes moved and bytes held.

`BENCH_BESIDE` names the other tree of this package, which has an environment in `.venv`; the trees take turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import median
from report import ROOT, Report, Table, target

CELLS = [(ranks, recompute) for ranks in (8, 1) for recompute in ("none", "selective")]
TOKENS = {"meta": 4096, "strict": 1024}
LIMIT, MOST_OPERATORS = 0.9, 140
TRAINING = ("llama2-tiny", "train.steps=25", "train.eval_every=0", "log.tensorboard=false", "log.sample_tokens=0")


def measure(tree: Path, ranks: int, recompute: str, device: str = "meta") -> dict[str, Any]:
    """Figures of a block in a tree."""
    python = sys.executable if tree == ROOT else str(tree / ".venv/bin/python")
    arguments = [recompute, device, str(TOKENS[device]), str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        variables |= {} if tree == ROOT else {"STRICT_BUILD": folder}  # nothing is written into the other tree
        program = Path(__file__).with_name("block_rank.py")
        done = subprocess.run(
            [python, program, *arguments], env=variables, check=True, stdout=subprocess.PIPE, cwd=folder
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def step_seconds(tree: Path) -> float:
    """The median step of a short training in a tree, on the CPU."""
    python = sys.executable if tree == ROOT else str(tree / ".venv/bin/python")
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "shardwise", "train", *TRAINING, "--nproc", "1", "--run-dir", "run"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, env=variables, check=True, stdout=subprocess.DEVNULL)
        lines = map(json.loads, (Path(folder) / "run/metrics.jsonl").read_text().splitlines())
        return median([line["step_seconds"] for line in lines if line["event"] == "step"][5:])


def run(rounds: int) -> Report:
    trees = {"here": ROOT} | ({"there": Path(named)} if (named := os.environ.get("BENCH_BESIDE")) else {})
    figures: dict[str, Any] = {}
    rows, shares, targets = [], [], []
    for ranks, recompute in CELLS:
        found = {name: [measure(tree, ranks, recompute) for _ in range(rounds)] for name, tree in trees.items()}
        first = {name: results[0] for name, results in found.items()}
        for name, results in found.items():
            first[name]["host_ms"] = median([result["host_ms"] for result in results])
        if ranks == 8:
            for name, tree in trees.items():
                first[name]["strict_live"] = measure(tree, ranks, recompute, "strict")["live"]
        cell = f"TP {ranks}{' + SP' if ranks > 1 else ''}, {recompute}"
        figures[cell] = first
        here = first["here"]
        for key, form, divisor in UNITS:
            values = [first[name].get(key) for name in trees]
            if values[0] is None:
                continue
            ratio = f"{values[0] / values[-1]:.3f}×" if len(values) > 1 else ""
            rows.append([cell, NAMES[key], *(form.format(value / divisor) for value in values), ratio])
            if len(values) > 1 and key in ("live", "moved"):
                targets.append(target(f"{cell}: {NAMES[key]}", values[0] / values[-1], LIMIT, at_least=False))
        if ranks == 8:
            operators = here["dispatches"]
            targets.append(target(f"{cell}: operators", operators, MOST_OPERATORS, at_least=False))
            fixed = sum(here["moved_by"].get(name, 0) for name in FIXED)
            shares.append([cell, f"{fixed / 1e6:.0f}", f"{(here['moved'] - fixed) / 1e6:.0f}"])
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    for _ in range(rounds):
        for name, tree in trees.items():
            seconds[name].append(step_seconds(tree))
    medians = {name: median(found) for name, found in seconds.items()}
    figures["cpu_step_seconds"] = seconds
    ratio = f"{medians['here'] / medians['there']:.3f}×" if "there" in medians else ""
    columns = ["one block of Llama 2 7B", "", *trees, *(["here / there"] if len(trees) > 1 else [])]
    return Report(
        "block_step",
        "One block, forward and backward, by what torch is asked to do",
        [
            Table(columns, rows if len(trees) > 1 else [row[:-1] for row in rows]),
            Table(
                ("MB moved by a block here", "products, collectives, attention, norms", "all else"),
                shares,
            ),
            Table(
                ("a step of llama2-tiny on the CPU", *trees, "here / there"),
                [["float32, one rank", *(f"{value * 1e3:.0f} ms" for value in medians.values()), ratio]],
            ),
        ],
        figures,
        targets=targets,
        notes=[
            "Rank 0 of a job that is not there, in bfloat16 with gradients in float32, on the device `meta`: a row of "
            f"{TOKENS['meta']:,} tokens, on the strict device {TOKENS['strict']:,}. Norms, attention and products that "
            "add to a gradient are one operator each, as on CUDA; collectives are torch's fake ones.",
            "Products, collectives, attention and norms move 1,252 MB at TP 8 in both trees. Else, one pass for a "
            "function would move 182 MB, 0.896× of the whole: it takes kernels of one's own, as compiled blocks have. "
            "`parallel.sequence_regather=true` with selective recompute: 123.3 MB live (0.72×), 1,739 MB moved, 151 "
            "operators.",
            "Live: the most bytes that somebody holds, without weights, their gradients, and the block's input. Moved: "
            "operands and results of all operators but views. Host: time to start all operators of both passes; the "
            f"median of {rounds} processes.",
        ],
    )


NAMES = {
    "dispatches": "operators",
    "live": "live bytes at most, MB",
    "strict_live": "the same on the strict device",
    "saved": "live between the passes, MB",
    "moved": "bytes moved, MB",
    "host_ms": "host, ms",
}
UNITS = [("dispatches", "{:.0f}", 1), *((key, "{:.1f}", 1e6) for key in ("live", "strict_live", "saved", "moved"))]
UNITS.append(("host_ms", "{:.2f}", 1))
FIXED = ["mm", "add_product", "_allgather_base_", "_reduce_scatter_base_", "norm", "norm_backward"]
FIXED += ["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"]
