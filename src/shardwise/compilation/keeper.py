"""A run's graphs between the shared cache and the folder on each machine that the compiler works in.

The compiler has a folder of its own for each job and machine, where all ranks of the machine share what one of them
compiles. Before the first step the graphs of the cache are unpacked there. What was compiled in spite of that is added
to the cache after the first step, and after the first evaluation.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise import comm
from shardwise.checkpoint.agreement import agree
from shardwise.compilation.facts import graph_facts, planned_graphs
from shardwise.compilation.units import Compilation, Graph
from shardwise.config import Config, Layout
from shardwise.errors import ConfigError
from shardwise.files import cache_root, reason_of
from shardwise.graph_cache import Facts, GraphCache
from shardwise.mesh import Mesh

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_PREFIX = f"shardwise-graphs-{os.getuid()}-"


def new_folder() -> Path:
    """A folder for the compiler, among temporary files; its name tells this process, for `remove_left_over`."""
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))


def cache_of(config: Config) -> GraphCache:
    """The cache that the configuration names."""
    return GraphCache(config.compile.cache_dir or cache_root() / "compile")


@dataclass(frozen=True)
class Settled:
    """What a run captured since it was asked last, on all ranks.

    Attributes:
        graphs: of all ranks; each rank captures its own.
        problem: why what was compiled could not be kept; None: it was, or there was nothing.
    """

    graphs: list[Graph]
    problem: str | None


class Keeper:
    """The graphs of one run, on one rank. All methods are collective.

    Args:
        announce: shows the user a line; called on the first rank.

    Raises:
        ConfigError: on every rank: with `compile.require_cached` a graph is not in the cache, and what differs; or
            there is no C++ compiler.
    """

    def __init__(
        self, config: Config, layout: Layout, mesh: Mesh, compilation: Compilation, announce: Callable[[str], None]
    ) -> None:
        self._config, self._mesh, self._compilation = config, mesh, compilation
        self._cache = cache_of(config)
        self._reported = 0
        problems, self._facts = list[str](), dict[tuple[str, bool], Facts]()
        try:
            for unit, training in planned_graphs(config):
                self._facts[unit, training] = graph_facts(config, layout, mesh.device, unit, training)
        except ConfigError as error:
            problems = error.problems
        agree(problems, mesh.world)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._leads = local_rank == 0
        missing, problems, folder = list[str](), list[str](), Path()
        if self._leads:
            try:
                folder = self._unpack(missing)
            except OSError as error:
                problems.append(
                    f"the folder for temporary files ({tempfile.gettempdir()}) cannot be written: {reason_of(error)}; "
                    "set TMPDIR to a folder with room"
                )
        agree(problems + missing * config.compile.require_cached, mesh.world)
        everywhere = comm.all_gather_objects((folder, missing), mesh.world)
        for line in dict.fromkeys(line for _, lines in everywhere for line in lines):
            announce(line)
        self._work = everywhere[mesh.world.rank - local_rank][0]  # ranks of a machine are neighbours
        self._former = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = str(self._work)
        self._before = self._files()

    def _unpack(self, missing: list[str]) -> Path:
        """A new folder with the graphs that the cache has; `missing` gets a line for each that it has not."""
        remove_left_over()
        folder = new_folder()
        for facts in self._facts.values():
            entry = self._cache.find(facts)
            if entry is None or not self._cache.unpack(entry, folder):
                missing.append(_missing(self._cache, facts, is_damaged=entry is not None))
        return folder

    def settle(self) -> Settled:
        """What was captured since the last call; what was not in the cache is added to it.

        Raises:
            ConfigError: with `compile.require_cached`, on every rank: a graph was compiled.
        """
        graphs = self._compilation.graphs[self._reported :]
        self._reported += len(graphs)
        captured = [graph for those in comm.all_gather_objects(graphs, self._mesh.world) for graph in those]
        compiled = {(graph.unit, graph.training) for graph in captured if not graph.is_hit}
        if compiled and self._config.compile.require_cached:
            listed = ", ".join(sorted(f"{unit} ({_mode(training)})" for unit, training in compiled))
            raise ConfigError(
                f"compile.require_cached (true) allows no compilation, and the cache's code did not fit: {listed}; run "
                "shardwise compile again"
            )
        problem = None
        if self._leads and compiled:
            files = self._files()
            try:
                for key in compiled & self._facts.keys():
                    self._cache.store(self._facts[key], self._work, sorted(files - self._before))
                self._cache.prune(self._config.compile.cache_gib * 2**30)
            except OSError as error:
                problem = (
                    f"compiled graphs are not kept, as compile.cache_dir ({self._cache.root}) cannot be written: "
                    f"{reason_of(error)}"
                )
            self._before = files
        problems = [each for each in comm.all_gather_objects(problem, self._mesh.world) if each is not None]
        return Settled(captured, problems[0] if problems else None)

    def close(self) -> None:
        """Remove the compiler's folder."""
        comm.barrier(self._mesh.world)
        if self._former is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = self._former
        if self._leads:
            shutil.rmtree(self._work, ignore_errors=True)

    def _files(self) -> set[Path]:
        return {path for path in self._work.rglob("*") if path.is_file() and path.suffix not in (".lock", ".tmp")}


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


def _missing(cache: GraphCache, facts: Facts, *, is_damaged: bool) -> str:
    """Why a graph has to be compiled, with the facts in which the nearest one of the cache differs."""
    name = f"{facts['unit']} ({_mode(facts['training'])})"
    if is_damaged:
        return f"compile: the file of {name} in {cache.root} was damaged, and is compiled again"
    nearest = cache.nearest(facts)
    if nearest is None:
        return f"compile: {name} is not in {cache.root}; `shardwise compile` puts it there"
    entry, keys = nearest
    listed = "; ".join(f"{key} is {facts.get(key)} here, and {entry.facts.get(key)} there" for key in keys)
    return f"compile: {name} is not in {cache.root}; the nearest graph there differs: {listed}"


def remove_left_over() -> None:
    """Remove the folders of processes of this user on this machine that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            os.kill(int(folder.name.removeprefix(_PREFIX).partition("-")[0]), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (ValueError, PermissionError):
            continue
