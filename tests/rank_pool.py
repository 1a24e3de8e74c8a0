"""A pool of real ranks that stay alive between tests, since starting them costs more than most tests do."""

import gc
import os
import pickle
import queue
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import device_mesh

from shardwise.distributed import devices
from shardwise.launch.rank_process import die_with_parent

sys.dont_write_bytecode = False  # as in tests/conftest.py: each rank would compile the tests' files
_LOADED_ONCE = [__name__, "shardwise.pipeline.schedule", "shardwise.train.build"]
"""Modules that the server process imports from which ranks are forked; with them come torch and its compiler."""


class RankError(AssertionError):
    """A function failed on a rank; the message holds that rank's traceback."""


class RankPool:
    """`size` processes joined in one process group, over the backend of their device: gloo on CPUs.

    `pool.run(function, *args)` calls a module-level `function(*args)` on every rank and returns the results in rank
    order. After a failure or time-out the next call starts new ranks.

    Args:
        device_type: `cpu`, or the type of an accelerator with a device for each rank.
        prepare: module-level function that each rank calls first, such as a registration of a device with torch.
    """

    def __init__(self, size: int, *, device_type: str = "cpu", prepare: Callable[[], None] | None = None) -> None:
        self.size = size
        self.device_type = device_type
        self._prepare = prepare
        self._processes: list[Any] = []
        self._tasks: list[Any] = []
        self._results: Any = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        if not self._processes:
            self._start()
        self._let_run(True)
        for tasks in self._tasks:
            tasks.put((function, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < self.size:
            try:
                rank, value, failure = self._results.get(timeout=timeout if not failures else 5.0)
            except queue.Empty:
                # After a failure the others have 5 s: they may fail too, or wait for the failed rank for ever.
                missing = sorted(set(range(self.size)) - set(results) - set(failures))
                failures.setdefault(-1, f"ranks {missing} gave no answer within {timeout:.0f} s")
                break
            if failure is None:
                results[rank] = pickle.loads(value)
            else:
                failures[rank] = failure
        if failures:
            self.close()
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
        self._let_run(False)
        return [results[rank] for rank in range(self.size)]

    def _start(self) -> None:
        # A server process imports torch once, and each rank is forked from it in a moment.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_LOADED_ONCE)
        self._results = context.Queue()
        rendezvous = str(Path(tempfile.mkdtemp(prefix="shardwise-ranks-")) / "rendezvous")
        for rank in range(self.size):
            tasks = context.Queue()
            process = context.Process(
                target=_serve,
                args=(rank, self.size, self.device_type, self._prepare, rendezvous, tasks, self._results),
                daemon=True,
            )
            process.start()
            self._tasks.append(tasks)
            self._processes.append(process)

    def _let_run(self, runs: bool) -> None:
        """Stop the ranks on CPUs between tasks: each group of gloo has a thread that wakes a hundred times a second."""
        if self.device_type == "cpu":
            for process in self._processes:
                os.kill(process.pid, signal.SIGCONT if runs else signal.SIGSTOP)

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []
        self._tasks = []


Pools = Callable[..., RankPool]
"""Pools by the number of their ranks, and by what their device is like."""


def _serve(
    rank: int,
    size: int,
    device_type: str,
    prepare: Callable[[], None] | None,
    rendezvous: str,
    tasks: Any,
    results: Any,
) -> None:
    gc.freeze()  # what the server process imported
    die_with_parent()
    if device_type != "strict":  # whose operators torch warns of
        warnings.simplefilter("error")  # as in pyproject.toml
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")  # of torch's own code
        # torch's compiler hides it.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    os.fsync = lambda _file: None  # as in tests/conftest.py
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    if prepare is not None:
        prepare()
    device = torch.device(device_type) if device_type == "cpu" else devices.local_device()
    dist.init_process_group(
        devices.backend(device),
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    reused = _ReusedGroups()
    known = len(sys.modules)
    while True:
        function, args = tasks.get()
        if known != len(sys.modules):  # what tests import stays, and takes long to be searched for garbage or referrers
            known = len(sys.modules)
            gc.collect()
            gc.freeze()
        reused.begin()
        value = None
        failure = None
        try:
            value = _pickled(function(*args))
        except BaseException:  # noqa: BLE001  run() raises it in the test
            failure = traceback.format_exc()
        results.put((rank, value, failure))


class _ReusedGroups:
    """Process groups that earlier tasks made, for the later tasks that ask for groups of the same ranks.

    Each group of gloo keeps threads that wake a hundred times a second until the process ends, so that a pool of many
    tasks would be busy with the groups of all of them. Within a task, each request for the same ranks is another group:
    two threads may use these at once.
    """

    def __init__(self) -> None:
        self._new_group = dist.new_group
        self._made: dict[str, list[Any]] = {}
        self._requests: Counter[str] = Counter()
        for module in (dist, device_mesh):
            module.new_group = self.of  # type: ignore[attr-defined]

    def begin(self) -> None:
        """Begin a task, which may have all groups of the tasks before it."""
        self._requests.clear()

    def of(self, ranks: list[int] | None = None, **options: Any) -> Any:
        """Take the place of `torch.distributed.new_group`."""
        key = repr((ranks, {name: value for name, value in options.items() if name != "pg_options"}))
        made = self._made.setdefault(key, [])
        if self._requests[key] == len(made):
            made.append(self._new_group(ranks, **options))
        self._requests[key] += 1
        return made[self._requests[key] - 1]


def _pickled(value: Any) -> bytes:
    """Pickle a function's result here: an error in the queue's own thread would not be noticed."""
    return bytes(ForkingPickler.dumps(value))
