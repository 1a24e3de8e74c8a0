"""The time to the first step with and without `shardwise compile`, and two of its workers against one."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure import median
from report import Report, Table, target

LAYOUT = ["llama2-tiny", "parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true", "train.eval_every=1"]
"""Four ranks with training and evaluation."""
SETS = [LAYOUT, [*LAYOUT, "model.family=smollm3"]]
"""Recipes whose graphs are compiled by one worker and by two: ten in all."""
LARGE, EVALUATED = "gpt3-175b", ("train.eval_every=1", "data.split=99,1")
SHARDWISE = [sys.executable, "-m", "shardwise"]


def command(*arguments: str, **variables: str) -> list[str]:
    """Run a command; the lines that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [*SHARDWISE, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout)
    return done.stdout.splitlines()


def compile_seconds(cache: Path, *arguments: str, **variables: str) -> tuple[float, int]:
    """Seconds of `shardwise compile`, and the number of graphs."""
    start = time.perf_counter()
    lines = command("compile", *arguments, "--cache-dir", str(cache), **variables)
    total = next(int(line.split()[-1]) for line in lines if line.startswith("Total graphs: "))
    return time.perf_counter() - start, total


def seconds_to_first_step(folder: Path, *overrides: str) -> tuple[float, float, str]:
    """From the command to the line of its first step; processor time of all its processes; the line on graphs."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    quiet = ["log.sample_tokens=0", "log.tensorboard=false", "train.steps=1", "optimizer.warmup_steps=1"]
    start, said, before = time.perf_counter(), "", _processor_seconds()
    with subprocess.Popen(
        [*SHARDWISE, "train", *LAYOUT, *quiet, *overrides, "--run-dir", str(run)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as training:
        assert training.stdout is not None
        seconds, lines = None, []
        for line in training.stdout:
            lines.append(line)
            if line.startswith("compile: ") and "graphs" in line:
                said = line.removeprefix("compile: ").strip()
            if seconds is None and re.match(r"step +1/", line):
                seconds = time.perf_counter() - start
    if seconds is None or training.returncode:
        raise RuntimeError("".join(lines))
    return seconds, _processor_seconds() - before, said


def _processor_seconds() -> float:
    """Of all processes that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(rounds: int) -> Report:
    first: dict[str, list[float]] = {"eager": [], "cold": [], "after shardwise compile": [], "warm": []}
    processor: dict[str, list[float]] = {name: [] for name in first}
    said: dict[str, str] = {}
    workers: dict[int, list[float]] = {1: [], 2: []}
    graphs = 0
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as temporary:
        folder = Path(temporary)
        for number in range(rounds):
            print(f"  round {number + 1}/{rounds}", flush=True)
            own, prepared = folder / f"own-{number}", folder / f"prepared-{number}"
            for arm in (1, 2) if number % 2 else (2, 1):
                caches = [prepared if arm == 2 else folder / f"one-{number}", folder / f"other-{number}-{arm}"]
                timed = [
                    compile_seconds(cache, *recipe, "--workers", str(arm), TORCHINDUCTOR_COMPILE_THREADS="1")
                    for cache, recipe in zip(caches, SETS, strict=True)
                ]
                workers[arm].append(sum(seconds for seconds, _ in timed))
                graphs = sum(count for _, count in timed)
            arms = {
                "eager": [],
                "cold": ["compile.enabled=true", f"compile.cache_dir={own}"],
                "after shardwise compile": ["compile.enabled=true", f"compile.cache_dir={prepared}"],
                "warm": ["compile.enabled=true", f"compile.cache_dir={own}"],
            }
            for name, overrides in arms.items():
                seconds, used, said[name] = seconds_to_first_step(folder, *overrides)
                first[name].append(seconds)
                processor[name].append(used)
        print(f"  {LARGE}", flush=True)
        seconds, captured = compile_seconds(folder / "large", LARGE, *EVALUATED, "--capture-only")
    # Of the largest process that was waited for: those that captured are its children.
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return report(first, processor, said, workers, graphs, {"seconds": seconds, "graphs": captured, "gib": memory})


def report(
    first: Mapping[str, list[float]],
    processor: Mapping[str, list[float]],
    said: Mapping[str, str],
    workers: Mapping[int, list[float]],
    graphs: int,
    large: Mapping[str, Any],
) -> Report:
    prepared, cold, warm = (median(first[name]) for name in ("after shardwise compile", "cold", "warm"))
    speed = median(workers[1]) / median(workers[2])
    first_rows = [
        [name, f"{median(found):.1f} s", f"{median(processor[name]):.1f} s", said[name]]
        for name, found in first.items()
    ]
    took = f"{large['seconds']:.1f} s"
    figures = {
        "first_step": dict(first),
        "processor": dict(processor),
        "workers": {str(number): found for number, found in workers.items()},
    }
    worker_rows = [[str(number), f"{median(found):.1f} s"] for number, found in workers.items()]
    return Report(
        "compiling",
        "What compiling costs",
        [
            Table(
                ("to the first step", "seconds", "processor", "graphs"),
                first_rows,
                "llama2-tiny, TP 2 × PP 2 + SP, four ranks",
            ),
            Table(("workers", "seconds"), worker_rows, f"shardwise compile, {graphs} graphs"),
            Table(
                ("", "graphs", "seconds", "most memory of a process"),
                [[f"{LARGE}, TP 32 × PP 8", str(large["graphs"]), took, f"{large['gib']:.2f} GiB"]],
                "shardwise compile --capture-only",
            ),
        ],
        figures | {"graphs": graphs, "large": dict(large)},
        targets=[
            target("first step after shardwise compile over warm", prepared / warm, 1.3, at_least=False),
            target("first step after shardwise compile over cold", prepared / cold, 0.5, at_least=False),
            target("one worker's seconds over two workers'", speed, 1.6, at_least=True),
            target(f"seconds to capture all graphs of {LARGE}", large["seconds"], 300, at_least=False),
            target("GiB of the largest process then", large["gib"], 12, at_least=False),
        ],
        notes=[
            "From the command to the line of its first step, with an evaluation before it; one thread a rank. Cold: an "
            "empty cache; warm: the cache that the cold run has filled; eager: not compiled. Processor: time "
            "of all processes, to the end of the run.",
            "The compilers of a worker run one after another in both arms (TORCHINDUCTOR_COMPILE_THREADS=1). Medians "
            "over the rounds, in which the two arms take turns to be first.",
            "Memory: of the largest of all processes that this benchmark started.",
        ],
    )
