"""Copies of the state in memory: what one in every step costs, and how soon a killed training goes on from them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import median
from report import Report, Table

from shardwise.train.memory_copies import MEMORY

RECIPE, RANKS, STEPS, WARM_UP = "llama2-tiny", 2, 40, 5
KEYS = ("train.eval_every=0", "log.tensorboard=false", "log.sample_tokens=0", "log.every=1", "checkpoint.every=10")
LOADING, MOST_SECONDS = 2.0, 20.0


def train(folder: Path, run: str, every: int, steps: int = STEPS) -> subprocess.Popen[bytes]:
    keys = (*KEYS, f"parallel.tensor={RANKS}", f"checkpoint.memory_every={every}", f"train.steps={steps}")
    command = [sys.executable, "-m", "shardwise", "train", RECIPE, *keys, "--nproc", str(RANKS), "--run-dir", run]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if f'"event": "{kind}"' in line]


def step_seconds(folder: Path, run: str, every: int) -> tuple[float, float]:
    """Of a whole training: the median step, without copies, and what training waited for each copy."""
    job = train(folder, run, every)
    output, _ = job.communicate()
    assert job.returncode == 0, output
    waited = re.search(rb"training waited ([\d.]+) ms", output)
    steps = [event["step_seconds"] for event in events(folder / run / "metrics.jsonl", "step")[WARM_UP:]]
    return median(steps), float(waited[1]) / 1e3 if waited else 0.0


def recovery(folder: Path, run: str, *, keep: bool) -> tuple[float, float, int]:
    """Kill a training; seconds of loading, seconds from its next start to its next step, and steps done again."""
    metrics = folder / run / "metrics.jsonl"
    job = train(folder, run, 1, 100_000)
    while len(events(metrics, "step")) < 15:
        time.sleep(0.05)
    job.send_signal(signal.SIGKILL)
    job.communicate()
    time.sleep(1)  # its ranks end with it
    if not keep:
        identity = json.loads((folder / run / "run.json").read_text())["id"]
        for copies in MEMORY.glob(f"shardwise-{os.getuid()}-{identity}-*"):
            shutil.rmtree(copies)
    done = len(events(metrics, "step"))
    start = time.perf_counter()
    job = train(folder, run, 1, 100_000)
    while len(events(metrics, "step")) <= done:
        time.sleep(0.02)
    seconds = time.perf_counter() - start
    job.send_signal(signal.SIGINT)
    job.communicate()
    (resumed,) = events(metrics, "resume")
    steps = [event["step"] for event in events(metrics, "step")]
    return resumed["load_seconds"], seconds, steps[done - 1] - resumed["step"]


def run(rounds: int) -> Report:
    seconds: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    recovered: dict[bool, list[tuple[float, float, int]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for turn in range(rounds):
            for every, found in seconds.items():
                found.append(step_seconds(folder, f"every-{every}-{turn}", every))
            for keep, found_ in recovered.items():
                found_.append(recovery(folder, f"killed-{keep}-{turn}", keep=keep))
    step, alone = (median([one[0] for one in seconds[every]]) for every in (1, 0))
    copy = median([one[1] for one in seconds[1]])
    ratio = median([(b + wait) / a for (a, _), (b, wait) in zip(seconds[0], seconds[1], strict=True)])
    cost = [
        ["none", f"{alone * 1e3:.1f} ms", "", ""],
        ["after each step", f"{step * 1e3:.1f} ms", f"{copy * 1e3:.1f} ms", f"{ratio:.3f}×"],
    ]
    names = {True: "memory", False: "disk, checkpoint.every=10"}
    rows = [
        [
            names[keep],
            f"{median([one[0] for one in found]):.2f} s",
            f"{median([one[1] for one in found]):.1f} s",
            ", ".join(str(one[2]) for one in found),
        ]
        for keep, found in recovered.items()
    ]
    loading = max(one[0] for one in recovered[True])
    again, lost = max(one[1] for one in recovered[True]), max(one[2] for one in recovered[True])
    reached = loading < LOADING and again < MOST_SECONDS and lost <= 1
    return Report(
        "memory_copies",
        "Copies of the state in memory",
        [
            Table(("copies", "a step", "a copy", "step and copy over a step without"), cost),
            Table(("state from", "loading", "start to next step", "steps done again"), rows),
        ],
        {"step_seconds": {str(every): found for every, found in seconds.items()}, "ratio": ratio, "recovered": rows},
        targets=[
            f"a killed training goes on within {MOST_SECONDS:.0f} s, loads within {LOADING:.0f} s and does one step "
            f"again at most: {'reached' if reached else 'missed'} ({again:.1f} s, {loading:.2f} s, {lost})"
        ],
        notes=[
            f"{RECIPE} on {RANKS} ranks with OMP_NUM_THREADS=1, {STEPS} steps; medians of {rounds} runs by turns. The "
            "start includes Python, torch and the model."
        ],
    )
