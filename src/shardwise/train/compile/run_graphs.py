"""A run's graphs between the shared cache and the folder on each machine that the compiler works in.

The compiler works in a temporary folder of each job and machine; all ranks of the machine share the graphs that one of
them compiles. Before the first step the graphs of the cache are unpacked there. Graphs that were compiled in spite of
that are added to the cache after the first step, and after the first evaluation.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from shardwise.base.errors import ConfigError, see
from shardwise.base.files import cache_root, reason_of
from shardwise.config import Config, Layout
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Mesh
from shardwise.train.compile.compiled_units import CapturedGraph, Compilation
from shardwise.train.compile.graph_cache import Facts, GraphCache, graph_label
from shardwise.train.compile.graph_facts import graph_facts, planned_graphs

FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""The environment variable that names the compiler's folder."""


class RunGraphs:
    """The compiled graphs of one run, on one rank, until the end of a `with` statement. All methods are collective.

    Args:
        announce: shows the user a line; called on the first rank.

    Raises:
        ConfigError: a graph is not in the cache, with `compile.require_cached`; or there is no C++ compiler. Raised on
            every rank.
    """

    def __init__(
        self, config: Config, layout: Layout, mesh: Mesh, compilation: Compilation, announce: Callable[[str], None]
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._compilation = compilation
        self._cache = GraphCache(config.compile.cache_dir or cache_root() / "compile")
        self._reported = 0
        self._facts: dict[tuple[str, bool], Facts] = {}
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        # A machine is named by its first rank: the ranks of a machine have consecutive numbers.
        self._machine = mesh.world.rank - local_rank
        self._stores = local_rank == 0
        path: Path | None = None
        missing: list[str] = []
        problems: list[str] = []
        with ExitStack() as stack:
            try:
                for unit, training in planned_graphs(config.model, config.train):
                    self._facts[unit, training] = graph_facts(config, layout, mesh.device, unit, training)
                if self._stores:
                    self._cache.require_trusted()
                    path = Path(stack.enter_context(compiler_folder()))
                    missing = self._unpack(path)
            except ConfigError as error:
                problems += error.problems
            except OSError as error:
                problems.append(
                    f"the folder for temporary files ({tempfile.gettempdir()}) cannot be written: "
                    f"{reason_of(error)}; set TMPDIR to a folder with room"
                    f"{see('training#folder-for-temporary-files')}"
                )
            if config.compile.require_cached:
                problems += missing
            collectives.raise_on_all_ranks(problems, mesh.world)
            rank_answers = collectives.all_gather_objects((path, missing), mesh.world)
            self._stack = stack.pop_all()
        for line in dict.fromkeys(line for _, lines in rank_answers for line in lines):
            announce(line)
        work_path = rank_answers[self._machine][0]
        assert work_path is not None, "the first rank of each machine has made it"
        compilation.folder = self._work_path = work_path
        self._former = os.environ.get(FOLDER_VARIABLE)
        os.environ[FOLDER_VARIABLE] = str(self._work_path)
        self._known_files = compiled_files(self._work_path)

    def __enter__(self) -> RunGraphs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._stack:
            if kind is None:
                # Another rank may still compile in the folder. After an error no rank waits for the others.
                collectives.barrier(self._mesh.world)
            del os.environ[FOLDER_VARIABLE]
            if self._former is not None:
                os.environ[FOLDER_VARIABLE] = self._former

    def _unpack(self, folder: Path) -> list[str]:
        """Unpack the graphs that the cache has into a folder; returns a line for each that it has not."""
        missing = []
        for facts in self._facts.values():
            entry = self._cache.find(facts)
            archive = None if entry is None else self._cache.read(entry)
            if archive is None:
                reason = (
                    "with the same keys, threads, device and versions"
                    if entry is None
                    else "in a file that can be read"
                )
                missing.append(
                    f"compile: {graph_label(facts['unit'], facts['training'])} is not in {self._cache.root} {reason}; "
                    "`shardwise compile` puts it there"
                )
            else:
                archive.extractall(folder)
        return missing

    def keep_new(self) -> tuple[list[CapturedGraph], str | None]:
        """Add graphs that were compiled since the last call to the cache.

        Returns:
            The graphs that were captured, each rank's own, and the reason why compiled ones could not be kept.

        Raises:
            ConfigError: a graph was compiled, with `compile.require_cached`; raised on every rank.
        """
        graphs = self._compilation.graphs[self._reported :]
        self._reported += len(graphs)
        captured: list[CapturedGraph] = []
        compiled: set[tuple[str, bool]] = set()
        compiled_here: set[tuple[str, bool]] = set()
        for machine, rank_graphs in collectives.all_gather_objects((self._machine, graphs), self._mesh.world):
            captured += rank_graphs
            misses = {(graph.unit, graph.training) for graph in rank_graphs if not graph.is_hit}
            compiled |= misses
            if machine == self._machine:
                compiled_here |= misses
        problem = None
        if compiled and self._config.compile.require_cached:
            if self._stores:
                for key in compiled & self._facts.keys():
                    self._cache.remove(self._facts[key])
            listed = ", ".join(sorted(graph_label(*key) for key in compiled))
            raise ConfigError(
                "compile.require_cached (true) allows no compilation, and the cached code did not fit and was removed: "
                f"{listed}; run shardwise compile again, on a machine like this one"
                f"{see('training#cached-code-does-not-fit')}"
            )
        if self._stores:
            problem = self._store(compiled_here)
        problems = collectives.union([] if problem is None else [problem], self._mesh.world)
        return captured, problems[0] if problems else None

    def _store(self, compiled: set[tuple[str, bool]]) -> str | None:
        """Add graphs that ranks of this machine have compiled to the cache; returns the reason if that failed.

        Each gets all files that were compiled since the last call: the compiler does not say which file is whose.
        """
        keys = compiled & self._facts.keys()
        if not keys:
            return None
        files = compiled_files(self._work_path)
        new_files = sorted(files - self._known_files)
        self._known_files = files
        try:
            for key in keys:
                self._cache.store(self._facts[key], self._work_path, new_files)
            self._cache.prune(self._config.compile.cache_gib * 2**30, kept=self._facts.values())
        except ConfigError as error:
            return f"compiled graphs are not kept: {error}"
        return None


def compiler_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder for a compiler until the end of a `with` statement."""
    return tempfile.TemporaryDirectory(prefix="shardwise-graphs-", ignore_cleanup_errors=True)


def compiled_files(folder: Path) -> set[Path]:
    """Files that a compiler has written into a folder and another process can use."""
    return {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".lock", ".tmp")}
