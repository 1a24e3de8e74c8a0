"""What people wait for apart from the steps of a training, beside another tree of this package and other launchers.

`BENCH_BESIDE` names the other tree, which has an environment in `.venv`; the commands of both trees take turns.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import waiting_peers
from compiling import LAYOUT
from measure import median
from report import ROOT, Report, Table, target

STEP = ("train", "llama2-tiny", "train.stop_after=1", "--nproc")
CUT = ("train", *LAYOUT, "train.stop_after=1")
GPT3 = ("plan", "gpt3-175b", "--device", "h100:8", "--nodes")
FIRST, SECOND = r"step +1/", r"step +2/"


class Wait(NamedTuple):
    """A command, the line for which its user waits (None: its end), the folder of its run, and the ratio to reach."""

    command: Sequence[str]
    limit: float
    line: str | None = None
    run: str = ""
    times: int = 1


WAITS = {
    "first step, 1 rank": Wait((*STEP, "1"), 0.7, FIRST, "1"),
    "first step, 2 ranks": Wait((*STEP, "2"), 0.5, FIRST, "2"),
    "first step, 4 ranks": Wait((*STEP, "4"), 0.45, FIRST, "4"),
    "first new step, resumed on 4 ranks": Wait((*STEP, "4"), 0.5, SECOND, "4"),
    "first step, TP 2 × PP 2": Wait(CUT, 0.45, FIRST, "cut"),
    "first step, TP 2 × PP 2, warm compiled": Wait((*CUT, "compile.enabled=true"), 0.5, FIRST, "compiled"),
    "plan gpt3-175b on 16 nodes": Wait((*GPT3, "16"), 0.4),
    "plan gpt3-175b on 8, 16 and 32 nodes": Wait((*GPT3, "8,16,32"), 0.4),
    "verify llama2-tiny": Wait(("verify", "llama2-tiny"), 0.5),
    "doctor": Wait(("doctor",), 0.5),
    "plan llama2-tiny": Wait(("plan", "llama2-tiny", "--device", "cpu:4"), 1.0, times=5),
    "--help": Wait(("--help",), 1.0, times=5),
}
PEERS = {2: 0.6, 4: 0.35}  # ranks → the ratio to reach
PHASES = {
    "cli.train:_config": "recipe",
    "cli.run_preparation:prepare_run": "folder and data, before ranks start",
    "train.run:join": "process group",
    "train.run:open_run": "folder and data, on a rank",
    "train.run:build_run_trainer": "model and optimizer",
    "train.run:_begin": "report of the start",
    "train.run:build_checkpoints": "saver of checkpoints",
    "train.run:_train": "step, and its checkpoint begun",
    "train.run:_end_stage": "end of the checkpoint, sample",
}
TIMELINE = """
import importlib, json, sys, time
phases = {}
def timed(name, function):
    def call(*arguments, **options):
        start = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            phases[name] = time.perf_counter() - start
    return call
for module in ("shardwise.cli.train", "torch", "shardwise.train.run"):
    timed("import " + module, importlib.import_module)(module)
for place, name in json.loads(sys.argv.pop(1)).items():
    module, _, function = ("shardwise." + place).partition(":")
    module = importlib.import_module(module)
    setattr(module, function, timed(name, getattr(module, function)))
timed("all of it", sys.modules["shardwise.cli.train"].run)
import shardwise.cli, atexit
atexit.register(lambda: print("phases", json.dumps(phases), flush=True))
shardwise.cli.main()
"""
Result = tuple[float, float, float]


def timed(command: Sequence[str | Path], line: str | None = None) -> Result:
    """Wall seconds to a line that matches `line`, or to the end; processor seconds to the end; GiB at the line."""
    before, start, seconds, memory, lines = os.times(), time.perf_counter(), None, 0.0, []
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **output) as process:
        for printed in process.stdout:
            lines.append(printed)
            if seconds is None and line is not None and re.match(line, printed):
                seconds = time.perf_counter() - start
                memory = shared_memory(process.pid)
    end, after = time.perf_counter() - start, os.times()
    if process.returncode or (seconds is None and line is not None):
        raise RuntimeError("".join(lines))
    return end if seconds is None else seconds, sum(after[2:4]) - sum(before[2:4]), memory


def shared_memory(pid: int) -> float:
    """PSS of a process and its descendants in GiB: each page by its share. They are halted meanwhile."""
    processes = [root := psutil.Process(pid), *root.children(recursive=True)]
    for one in processes:
        one.suspend()
    total = sum(one.memory_full_info().pss for one in processes)
    for one in reversed(processes):
        one.resume()
    return float(total / 2**30)


def run(rounds: int) -> Report:
    trees = {"here": ROOT} | ({"there": Path(named)} if (named := os.environ.get("BENCH_BESIDE")) else {})
    found: dict[str, dict[str, list[Result]]] = {name: {} for name in WAITS}
    starts = []
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as temporary:
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": f"{temporary}/bytecode"}
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        # Turn 0 fills caches, of bytecode and of compiled graphs, and is not counted.
        for turn in range(1 + rounds):
            print(f"  turn {turn}/{rounds}", flush=True)
            for name, wait in WAITS.items():
                for arm, tree in [*trees.items()][:: -1 if turn % 2 else 1] if turn or wait.line else ():
                    folder = Path(temporary, arm, wait.run)
                    if wait.line == FIRST:
                        shutil.rmtree(folder, ignore_errors=True)
                    options = [f"compile.cache_dir={folder}.graphs", f"--run-dir={folder}"] if wait.line else []
                    command = [tree / ".venv/bin/shardwise", *wait.command, *options]
                    results = [timed(command, wait.line) for _ in range(wait.times)]
                    found[name].setdefault(arm, []).extend(results if turn else [])
            if turn:
                command = [sys.executable, "-c", TIMELINE, json.dumps(PHASES), *STEP, "1"]
                done = subprocess.run([*command, f"--run-dir={temporary}/{turn}"], capture_output=True, check=True)
                starts.append(json.loads(done.stdout.rpartition(b"phases")[2]))
            for ranks in PEERS if turn else ():
                for peer, result in waiting_peers.rows(ranks, timed).items():
                    found[f"first step, {ranks} ranks"].setdefault(peer, []).append(result)
    return report(found, starts, trees)


def report(
    found: dict[str, dict[str, list[Result]]], starts: Sequence[dict[str, float]], trees: dict[str, Path]
) -> Report:
    def middle(name: str, arm: str, number: int = 0) -> float:
        return median([result[number] for result in found[name][arm]])

    def row(title: str, name: str, arm: str, limit: float, number: int = 0) -> list[str]:
        here, there = middle(name, "here", number), middle(name, arm, number)
        targets.append(target(f"{title}, of {arm}", here / there, limit, at_least=False))
        processor = [f"{middle(name, one, 1):.2f}" for one in ("here", arm)] if number == 0 else ["", ""]
        return [title, f"{here:.2f}", f"{there:.2f}", f"{here / there:.2f}", *processor]

    targets: list[str] = []
    others = [arm for arm in trees if arm != "here"]
    rows = [row(name, name, arm, wait.limit) for name, wait in WAITS.items() for arm in others]
    rows += [row("GiB of 4 ranks", "first step, 4 ranks", arm, 0.6, 2) for arm in others]
    names = {f"first step, {ranks} ranks": limit for ranks, limit in PEERS.items()}
    peers = [row(f"{name} / {arm}", name, arm, names[name]) for name in names for arm in {*found[name]} - {*trees}]
    phases = [[name, f"{median([start[name] for start in starts]):.2f}"] for name in starts[0]]
    ratio = middle("first step, TP 2 × PP 2, warm compiled", "here") / middle("first step, TP 2 × PP 2", "here")
    columns = ("", "seconds here", "there", "ratio", "processor seconds here", "there")
    describe = ["git", "-C", trees.get("there", ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    beside = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    return Report(
        "waiting",
        "What people wait for",
        [
            Table(columns, rows, f"beside commit {beside}"),
            Table(columns, peers, "beside other launchers"),
            Table(("a start of one rank", "seconds"), phases),
        ],
        {"found": found, "starts": starts},
        targets,
        [
            "Medians of commands that take turns, OMP_NUM_THREADS=1. First step: from the command to the line of its "
            "step; all others to their end. Processor seconds: of all processes, to the end. GiB: PSS of the launcher "
            "and its ranks at the first step.",
            f"A warm compiled start takes {ratio:.2f} of an eager one's time.",
        ],
    )
