"""Fresh processes for one measurement: as many as asked for, one thread each, joined over gloo.

Nothing is left over from an earlier measurement: neither memory, nor caches, nor a library that another contestant
loaded.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

OWN_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
"""Has glibc give every tensor from 128 KiB on pages of its own, and take them back as soon as it is freed: the peak is
then that of live tensors, without what a fragmented heap keeps, and the same in every run. Slower."""


class RankFailed(RuntimeError):
    """A process ended with an error; the message holds the end of what it said."""


class Job:
    """`module.function(**arguments)` in `world` new processes.

    A function returns its result, or it is a generator that waits at each `yield` until it is told to go on: so several
    jobs can stand ready at once and take turns. Values are JSON.

    `variables`: environment variables to add.
    """

    def __init__(
        self, module: str, function: str, world: int, *, variables: dict[str, str] | None = None, **arguments: Any
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-bench-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        call = [module, function, json.dumps(arguments)]
        self._ranks = [self._start(rank, world, port, call, variables or {}) for rank in range(world)]

    def _start(
        self, rank: int, world: int, port: int, call: list[str], variables: dict[str, str]
    ) -> tuple[subprocess.Popen[bytes], IO[bytes], Path]:
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            **variables,
        }
        log = Path(self._folder.name) / f"{rank}.log"
        results, write = os.pipe()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), *call, str(write)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[write],
            )
        os.close(write)
        return process, os.fdopen(results, "rb"), log

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        for process, results, _ in self._ranks:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
            results.close()
        self._folder.cleanup()

    def receive(self, timeout: float = 600.0) -> list[Any]:
        """What each rank returned, or yielded last, in rank order."""
        end = time.monotonic() + timeout
        values = []
        for rank, (process, results, log) in enumerate(self._ranks):
            ready, _, _ = select.select([results], [], [], max(end - time.monotonic(), 0.0))
            line = results.readline() if ready else b""
            if not line:
                code = process.wait() if ready else None
                text = log.read_text(errors="replace")[-3000:]
                what = f"gave no result within {timeout:.0f} s" if code is None else f"ended with {code}"
                raise RankFailed(f"rank {rank} {what}:\n{text}")
            values.append(json.loads(line))
        return values

    def go_on(self) -> list[Any]:
        """Let every rank run from the `yield` where it stands to the next; what that one yields."""
        for process, _, _ in self._ranks:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        return self.receive()


def run(
    module: str, function: str, world: int, *, variables: dict[str, str] | None = None, **arguments: Any
) -> list[Any]:
    """Call `module.function(**arguments)` in `world` new processes; their results in rank order."""
    with Job(module, function, world, variables=variables, **arguments) as job:
        return job.receive()


def main() -> None:
    """In the new process: call the function and hand over its result, or results."""
    from shardwise.launch.rank_process import die_with_parent

    die_with_parent()
    module, function, arguments, descriptor = sys.argv[1:]
    with os.fdopen(int(descriptor), "w") as results:
        value = getattr(importlib.import_module(module), function)(**json.loads(arguments))
        for item in value if inspect.isgenerator(value) else [value]:
            print(json.dumps(item), file=results, flush=True)
            if not sys.stdin.readline():
                return


if __name__ == "__main__":
    main()
