"""Compiles all graphs of a training in processes of their own, several at once, into the cache.

What passes between `shardwise compile` and the processes that it starts: one graph each.
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
from shardwise.train.compile.graph_cache import Entry, Facts, GraphCache, not_written
from shardwise.train.compile.graph_facts import graph_facts, planned_graphs
from shardwise.train.compile.run_graphs import WorkFolder, compiled_files, remove_left_over
from shardwise.train.compile.units import HEAD, check_backend

_SHOWN = 3
"""Lines of a failure's output that the user reads at once; its log has all."""


@dataclass(frozen=True)
class Plan:
    """The graphs of a training, and how they are compiled.

    Attributes:
        facts: of each graph, as the training's ranks will find it.
        threads: that each rank of the training computes with, which is a part of its code.
        only_capture: trace the graphs and compile none.
    """

    config: Config
    layout: Layout
    device: str
    threads: int
    facts: Sequence[Facts]
    only_capture: bool

    @staticmethod
    def make(config: Config, layout: Layout, device: str, threads: int, *, only_capture: bool) -> Plan:
        """The plan of a configuration.

        Raises:
            ConfigError: there is no C++ compiler, where one is needed, or torch has no such backend or option.
        """
        torch.set_num_threads(threads)
        where = torch.device(device)
        check_backend(config.compile, where)
        facts = [graph_facts(config, layout, where, unit, training) for unit, training in planned_graphs(config)]
        return Plan(config, layout, device, threads, facts, only_capture)


@dataclass(frozen=True)
class Outcome:
    """What became of one graph.

    Attributes:
        entry: in the cache; None where it was only captured, or failed.
        problem: why it failed; None: it did not.
        log: the output of one that failed.
    """

    facts: Facts
    seconds: float
    entry: Entry | None = None
    problem: str | None = None
    log: Path | None = None


def compile_graphs(plan: Plan, facts: Sequence[Facts], cache: GraphCache, workers: int) -> Iterator[Outcome]:
    """Compile some graphs of a plan, `workers` at once; yields each as soon as it is done."""
    remove_left_over()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="compile")
    try:
        for done in as_completed([pool.submit(_compile, plan, one, cache, workers) for one in facts]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _compile(plan: Plan, facts: Facts, cache: GraphCache, workers: int) -> Outcome:
    layout, start = plan.layout, time.perf_counter()
    one_model = replace(layout, world=layout.ranks_of_one_model)
    stage = layout.pipeline - 1 if facts["unit"] == HEAD else 0
    folder = WorkFolder()
    try:
        job = Job(
            config=plan.config.model_dump(mode="json"),
            unit=facts["unit"],
            training=facts["training"],
            rank=one_model.ranks_at(stage)[0],
            world=one_model.world,
            device=plan.device,
            folder=str(folder.path),
            only_capture=plan.only_capture,
        )
        environment = {  # the user's own number of the compiler's threads takes precedence
            "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cpu_count() // workers)),
            **os.environ,
            "OMP_NUM_THREADS": str(plan.threads),
        }
        done = subprocess.run(
            [sys.executable, "-P", "-m", "shardwise.train.compile.worker"],
            input=job.dump(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            check=False,
        )
        seconds = time.perf_counter() - start
        if done.returncode:
            lines = [line for line in done.stdout.strip().splitlines() if line.strip()]
            said = " ".join(lines[-_SHOWN:]) if lines else "it said nothing"
            if done.returncode < 0:
                said = f"its process was killed by signal {-done.returncode}; {said}"
            return Outcome(facts, seconds, problem=said, log=_log(facts, cache, done.stdout))
        if plan.only_capture:
            return Outcome(facts, seconds)
        compiled = compiled_files(folder.path)
        if not _can_be_shared(compiled, str(facts["compile.backend"])):
            said = f"compile.backend ({facts['compile.backend']}) keeps nothing of it that another process can use"
            return Outcome(facts, seconds, problem=said, log=_log(facts, cache, done.stdout))
        try:
            return Outcome(facts, seconds, cache.store(facts, folder.path, compiled))
        except OSError as error:
            return Outcome(facts, seconds, problem=not_written(cache.root, error))
    finally:
        folder.remove()


def _can_be_shared(compiled: Iterable[Path], backend: str) -> bool:
    """Whether what a backend has written holds a whole graph: `inductor` may write kernels alone."""
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
class Job:
    """One graph that is to be captured, and compiled unless `only_capture`.

    Attributes:
        config: resolved.
        unit, training: the graph.
        rank, world: of the role that is played: a rank with that unit, in a job with one data-parallel rank.
        device: its kind.
        folder: where the compiler works.
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
    def load(text: str) -> Job:
        """The job of a text."""
        return Job(**json.loads(text))
