"""Compiles all graphs of a training ahead of it into the cache, each in a process of its own, several at once.

`shardwise compile` starts `worker.py` once for each graph; a `GraphJob` passes between them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.base import files
from shardwise.base.hardware import cpu_count
from shardwise.config import Config, Layout
from shardwise.train.compile.graph_cache import CachedGraph, Facts, GraphCache, not_written
from shardwise.train.compile.graph_facts import graph_facts, planned_graphs
from shardwise.train.compile.run_graphs import WorkFolder, compiled_files, remove_left_over
from shardwise.train.compile.units import HEAD, check_backend

_SHOWN = 3
"""Lines of a failure's output that the user reads at once; its log has all."""


@dataclass(frozen=True)
class CompilationPlan:
    """The graphs of a training, and the settings of their compilation.

    Attributes:
        device: kind of the device.
        threads: threads that each rank of the training computes with; the code of a graph depends on them.
        facts: facts of each graph, as the training's ranks will find it.
        only_capture: trace the graphs and compile none.
    """

    config: Config
    layout: Layout
    device: str
    threads: int
    facts: Sequence[Facts]
    only_capture: bool

    @staticmethod
    def make(config: Config, layout: Layout, device: str, threads: int, *, only_capture: bool) -> CompilationPlan:
        """The plan of a configuration.

        Raises:
            ConfigError: there is no C++ compiler, where one is needed, or torch has no such backend or option.
        """
        torch.set_num_threads(threads)
        torch_device = torch.device(device)
        check_backend(config.compile, torch_device)
        facts = [graph_facts(config, layout, torch_device, unit, training) for unit, training in planned_graphs(config)]
        return CompilationPlan(config, layout, device, threads, facts, only_capture)


@dataclass(frozen=True)
class GraphOutcome:
    """The result for one graph.

    Attributes:
        seconds: time of the compilation.
        entry: graph in the cache; None where it was only captured, or failed.
        problem: reason of the failure; None without one.
        log: file with the output of a compilation that failed.
    """

    facts: Facts
    seconds: float
    entry: CachedGraph | None = None
    problem: str | None = None
    log: Path | None = None


def compile_graphs(
    plan: CompilationPlan, facts: Sequence[Facts], cache: GraphCache, workers: int
) -> Iterator[GraphOutcome]:
    """Compile graphs of a plan, `workers` at once; yields each as soon as it is done."""
    remove_left_over()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="compile")
    try:
        futures = [pool.submit(_compile, plan, each_facts, cache, workers) for each_facts in facts]
        for future in as_completed(futures):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _compile(plan: CompilationPlan, facts: Facts, cache: GraphCache, workers: int) -> GraphOutcome:
    layout = plan.layout
    start = time.perf_counter()
    one_model = replace(layout, world=layout.ranks_of_one_model)
    # Blocks are on each stage; the head is on the last one alone.
    stage = layout.pipeline - 1 if facts["unit"] == HEAD else 0
    folder = WorkFolder()
    try:
        job = GraphJob(
            config=plan.config.model_dump(mode="json"),
            unit=facts["unit"],
            training=facts["training"],
            rank=one_model.ranks_at(stage)[0],
            world=one_model.world,
            device=plan.device,
            folder=str(folder.path),
            only_capture=plan.only_capture,
        )
        # A number of the compiler's threads that the user has set takes precedence.
        environment = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cpu_count() // workers)),
            **os.environ,
            "OMP_NUM_THREADS": str(plan.threads),
        }
        process = subprocess.run(
            [sys.executable, "-P", "-m", "shardwise.train.compile.worker"],
            input=job.dump(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            check=False,
        )
        seconds = time.perf_counter() - start
        if process.returncode:
            lines = [line for line in process.stdout.strip().splitlines() if line.strip()]
            problem = " ".join(lines[-_SHOWN:]) if lines else "it said nothing"
            if process.returncode < 0:
                problem = f"its process was killed by signal {-process.returncode}; {problem}"
            return GraphOutcome(facts, seconds, problem=problem, log=_log(facts, cache, process.stdout))
        if plan.only_capture:
            return GraphOutcome(facts, seconds)
        compiled = compiled_files(folder.path)
        if not _can_be_shared(compiled, str(facts["compile.backend"])):
            problem = f"compile.backend ({facts['compile.backend']}) keeps nothing of it that another process can use"
            return GraphOutcome(facts, seconds, problem=problem, log=_log(facts, cache, process.stdout))
        try:
            return GraphOutcome(facts, seconds, cache.store(facts, folder.path, compiled))
        except OSError as error:
            return GraphOutcome(facts, seconds, problem=not_written(cache.root, error))
    finally:
        folder.remove()


def _can_be_shared(compiled: Iterable[Path], backend: str) -> bool:
    """Return whether the files of a backend hold a whole graph: `inductor` may write kernels alone."""
    return any(backend != "inductor" or "aotautograd" in path.parts for path in compiled)


def _log(facts: Facts, cache: GraphCache, text: str) -> Path | None:
    """Keep the output of a compilation that failed, where the cache can be written."""
    log = cache.log_of(facts)
    with contextlib.suppress(OSError):
        files.make_folder(log.parent)
        files.write_atomic(log, text)
        return log
    return None


@dataclass(frozen=True)
class GraphJob:
    """One graph that is to be captured, and compiled unless `only_capture`.

    Attributes:
        config: resolved configuration.
        unit: unit that the graph computes.
        training: the graph has a backward pass.
        rank: rank whose part is played: one that has the unit.
        world: ranks of a job with one data-parallel rank.
        device: kind of the device.
        folder: folder that the compiler works in.
        only_capture: trace the graph from tensors without data.
    """

    config: Mapping[str, Any]
    unit: str
    training: bool
    rank: int
    world: int
    device: str
    folder: str
    only_capture: bool

    def dump(self) -> str:
        """The job as a text that `load` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> GraphJob:
        """The job of a text."""
        return GraphJob(**json.loads(text))
