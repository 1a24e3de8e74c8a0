"""A run's graphs between the shared cache and the folder on each machine that the compiler works in.

The compiler works in a folder of its own for each job and machine, a temporary one on which a process keeps a lock; all
ranks of the machine share the graphs that one of them compiles. Before the first step the graphs of the cache are
unpacked there. Graphs that were compiled in spite of that are added to the cache after the first step, and after the
first evaluation.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from shardwise.base.errors import ConfigError, see
from shardwise.base.files import cache_root, open_own, reason_of
from shardwise.config import Config, Layout
from shardwise.distributed import collectives
from shardwise.distributed.collectives import agree, union
from shardwise.distributed.mesh import Mesh
from shardwise.train.compile.graph_cache import Facts, GraphCache, name_of, not_written
from shardwise.train.compile.graph_facts import graph_facts, planned_graphs
from shardwise.train.compile.units import CapturedGraph, Compilation

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_SHOWN = 3
"""Most facts that are listed as different from the nearest graph; with more, the graph is called another model's."""
_HASHED = {"code": "the code of shardwise or of the model", "processor": "what the processor can do"}


def cache_of(config: Config) -> GraphCache:
    """The cache that the configuration names."""
    return GraphCache(config.compile.cache_dir or cache_root() / "compile")


@dataclass(frozen=True)
class CapturedGraphs:
    """The graphs that all ranks of a run have captured since the last question.

    Attributes:
        graphs: graphs of all ranks; each rank captures its own.
        problem: reason why compiled graphs could not be kept; None if they were, or if there were none.
    """

    graphs: list[CapturedGraph]
    problem: str | None


class RunGraphs:
    """The graphs of one run, on one rank, until the end of a `with` statement. All methods are collective.

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
        self._cache = cache_of(config)
        self._reported = 0
        self._facts: dict[tuple[str, bool], Facts] = {}
        problems: list[str] = []
        try:
            for unit, training in planned_graphs(config):
                self._facts[unit, training] = graph_facts(config, layout, mesh.device, unit, training)
        except ConfigError as error:
            problems = error.problems
        agree(problems, mesh.world)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        # A machine is named by its first rank: the ranks of a machine have consecutive numbers.
        self._machine = mesh.world.rank - local_rank
        self._folder: WorkFolder | None = None
        missing: list[str] = []
        problems = []
        try:
            if local_rank == 0:
                try:
                    self._cache.require_trusted()
                    self._folder = self._unpacked(missing)
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
            agree(problems, mesh.world)
            path = None if self._folder is None else self._folder.path
            rank_answers = collectives.all_gather_objects((path, missing), mesh.world)
        except BaseException:
            self._remove()
            raise
        for line in dict.fromkeys(line for _, lines in rank_answers for line in lines):
            announce(line)
        work_path = rank_answers[self._machine][0]
        assert work_path is not None, "the first rank of each machine has made it"
        self._work_path: Path = work_path
        self._former = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = str(self._work_path)
        self._known_files = compiled_files(self._work_path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            # Another rank may still compile in the folder. After an error no rank waits for the others.
            collectives.barrier(self._mesh.world)
        if self._former is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = self._former
        self._remove()

    def _remove(self) -> None:
        if self._folder is not None:
            self._folder.remove()

    def _unpacked(self, missing: list[str]) -> WorkFolder:
        """A new folder with the graphs that the cache has; `missing` gets a line for each that it has not."""
        remove_left_over()
        folder = WorkFolder()
        try:
            for facts in self._facts.values():
                entry = self._cache.find(facts)
                if entry is None or not self._cache.unpack(entry, folder.path):
                    missing.append(_missing(self._cache, facts, is_damaged=entry is not None))
        except BaseException:
            folder.remove()
            raise
        return folder

    def keep_new(self) -> CapturedGraphs:
        """Add graphs that were compiled since the last call to the cache; returns all that were captured.

        Raises:
            ConfigError: a graph was compiled, with `compile.require_cached`; raised on every rank.
        """
        graphs = self._compilation.graphs[self._reported :]
        self._reported += len(graphs)
        captured: list[CapturedGraph] = []
        compiled: set[tuple[int, tuple[str, bool]]] = set()
        for machine, rank_graphs in collectives.all_gather_objects((self._machine, graphs), self._mesh.world):
            captured += rank_graphs
            compiled |= {(machine, (graph.unit, graph.training)) for graph in rank_graphs if not graph.is_hit}
        problem = None
        if compiled and self._config.compile.require_cached:
            keys = {key for _, key in compiled}
            if self._folder is not None:
                for key in keys & self._facts.keys():
                    self._cache.remove(self._facts[key])
            listed = ", ".join(sorted(name_of(*key) for key in keys))
            raise ConfigError(
                "compile.require_cached (true) allows no compilation, and the cached code did not fit and was removed: "
                f"{listed}; run shardwise compile again, on a machine like this one"
                f"{see('training#cached-code-does-not-fit')}"
            )
        if self._folder is not None:
            problem = self._store({key for machine, key in compiled if machine == self._machine})
        problems = union([] if problem is None else [problem], self._mesh.world)
        return CapturedGraphs(captured, problems[0] if problems else None)

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
        except OSError as error:
            return f"compiled graphs are not kept: {not_written(self._cache.root, error)}"
        return None


def _missing(cache: GraphCache, facts: Facts, *, is_damaged: bool) -> str:
    """The line on a graph that has to be compiled, with facts in which the nearest one of the cache differs."""
    name = name_of(facts["unit"], facts["training"])
    remedy = "`shardwise compile` puts it there"
    if is_damaged:
        return f"compile: the file of {name} in {cache.root} cannot be read or is damaged; {remedy}"
    nearest = cache.nearest(facts)
    if nearest is None:
        return f"compile: {name} is not in {cache.root}; {remedy}"
    entry, keys = nearest
    if any(key.startswith("model.") for key in keys[:_SHOWN]) and len(keys) > _SHOWN:
        return f"compile: {name} is not in {cache.root}, which has graphs of other models; {remedy}"
    listed = [_difference(key, facts.get(key), entry.facts.get(key)) for key in keys[:_SHOWN]]
    suffix = f"; and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"compile: {name} is not in {cache.root}; the nearest graph there differs: {'; '.join(listed)}{suffix}"


def _difference(key: str, value: object, cached_value: object) -> str:
    if key in _HASHED:
        return f"{_HASHED[key]} is another"
    option = f" (`shardwise compile --threads {value}` is for this run)" if key == "threads" else ""
    return f"{key} is {value} here, and {cached_value} there{option}"


_PREFIX = f"shardwise-graphs-{os.getuid()}-"
_LOCK = "owner.lock"
_NEW_SECONDS = 3600.0
"""Age up to which a folder without a lock is taken for a new one, whose process makes the lock next."""


class WorkFolder:
    """A folder of this process, until `remove`.

    Its lock tells other processes, in other containers and on other machines that share the disk too, that it is in
    use. The lock ends with the process, even one that is killed.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the folder with all its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def compiled_files(folder: Path) -> set[Path]:
    """Files that a compiler has written into a folder and another process can use."""
    return {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".lock", ".tmp")}


def remove_left_over() -> None:
    """Remove the folders of this user's processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if folder.lstat().st_uid == os.getuid() and not _is_locked(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # Another user's, or removed meanwhile: by its process, or by another one that removes leftovers.
            continue


def _is_locked(folder: Path) -> bool:
    try:
        lock = open_own(folder / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime < _NEW_SECONDS
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
