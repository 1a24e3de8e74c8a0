"""Compiles all graphs of a training ahead of it into the cache, each in a process of its own, several at once.

`shardwise compile` starts `worker.py` once for each graph.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardwise.base.errors import ConfigError
from shardwise.base.hardware import cpu_count
from shardwise.config import Config, Layout
from shardwise.train.compile.compiled_units import HEAD, check_compiler_backend
from shardwise.train.compile.graph_cache import CachedGraph, Facts, GraphCache
from shardwise.train.compile.graph_facts import graph_facts, planned_graphs
from shardwise.train.compile.run_graphs import FOLDER_VARIABLE, compiled_files, compiler_folder

_SHOWN = 20  # last lines of a failure's output that the user reads


@dataclass(frozen=True)
class CompilationPlan:
    """The graphs of a training, and the settings of their compilation."""

    config: Config
    layout: Layout
    device: str
    threads: int  # threads that each rank of the training computes with; the code of a graph depends on them
    facts: Sequence[Facts]  # facts of each graph, as the training's ranks will find it
    only_capture: bool  # trace the graphs and compile none

    @staticmethod
    def make(config: Config, layout: Layout, device: str, threads: int, *, only_capture: bool) -> CompilationPlan:
        """The plan of a configuration.

        Raises:
            ConfigError: there is no C++ compiler, where one is needed, or torch has no such backend or option.
        """
        torch.set_num_threads(threads)
        torch_device = torch.device(device)
        check_compiler_backend(config.compile, torch_device)
        graphs = planned_graphs(config.model, config.train)
        facts = [graph_facts(config, layout, torch_device, *graph) for graph in graphs]
        return CompilationPlan(config, layout, device, threads, facts, only_capture)


@dataclass(frozen=True)
class GraphOutcome:
    """The result of compiling one graph."""

    facts: Facts
    seconds: float
    entry: CachedGraph | None = None  # graph in the cache; None where it was only captured, or failed
    problem: str | None = None  # reason of the failure; None without one


def compile_graphs(
    graphs: Iterable[tuple[CompilationPlan, Facts]], cache: GraphCache, workers: int
) -> Iterator[GraphOutcome]:
    """Compile graphs of plans, `workers` at once; yields each as soon as it is done."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="compile")
    try:
        futures = [pool.submit(_compile, plan, facts, cache, workers) for plan, facts in graphs]
        for future in as_completed(futures):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _compile(plan: CompilationPlan, facts: Facts, cache: GraphCache, workers: int) -> GraphOutcome:
    start = time.perf_counter()
    one_model = replace(plan.layout, world=plan.layout.ranks_of_one_model)
    # Blocks are on each stage; the head is on the last one alone.
    stage = plan.layout.pipeline - 1 if facts["unit"] == HEAD else 0
    job = {
        "config": plan.config.model_dump(mode="json"),
        "unit": facts["unit"],
        "training": facts["training"],
        "rank": one_model.ranks_at(stage)[0],
        "world": one_model.world,
        "device": plan.device,
        "only_capture": plan.only_capture,
    }
    with compiler_folder() as folder:
        # A number of the compiler's threads that the user has set takes precedence.
        environment = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cpu_count() // workers)),
            **os.environ,
            "OMP_NUM_THREADS": str(plan.threads),
            FOLDER_VARIABLE: folder,
        }
        process = subprocess.run(
            [sys.executable, "-P", "-m", "shardwise.train.compile.worker"],
            input=json.dumps(job),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            check=False,
        )
        outcome = GraphOutcome(facts, time.perf_counter() - start)
        if process.returncode:
            lines = [line for line in process.stdout.splitlines() if line.strip()]
            problem = "\n".join(lines[-_SHOWN:]) or "it said nothing"
            if process.returncode < 0:
                problem = f"its process was killed by signal {-process.returncode}\n{problem}"
            return replace(outcome, problem=problem)
        if plan.only_capture:
            return outcome
        compiled = compiled_files(Path(folder))
        backend = facts["compile.backend"]
        # Inductor may write kernels alone, without a whole graph.
        complete = [path for path in compiled if "aotautograd" in path.parts or path.suffix == ".traced"]
        if not compiled or (backend == "inductor" and not complete):
            problem = f"compile.backend ({backend}) keeps nothing of it that another process can use"
            return replace(outcome, problem=problem)
        try:
            return replace(outcome, entry=cache.store(facts, Path(folder), compiled))
        except ConfigError as error:
            return replace(outcome, problem=str(error))
