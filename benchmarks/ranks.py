"""Fresh processes for one measurement: as many as asked for, one thread each, joined over gloo.

Nothing is left over from an earlier measurement: neither memory, nor caches, nor a library that another contestant
loaded.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OWN_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
"""Has glibc give every tensor from 128 KiB on pages of its own, and take them back as soon as it is freed: the peak is
then that of live tensors, without what a fragmented heap keeps, and the same in every run. Slower."""


class RankFailed(RuntimeError):
    """A process ended with an error; the message holds the end of what it said."""


def run(
    module: str,
    function: str,
    world: int,
    *,
    timeout: float = 600.0,
    variables: dict[str, str] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Call `module.function(**arguments)` in `world` new processes; their JSON results in rank order.

    `variables`: environment variables to add.
    """
    call = [module, function, json.dumps(arguments)]
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes = [_start(Path(folder), rank, world, port, call, variables or {}) for rank in range(world)]
        try:
            _wait(processes, Path(folder), timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


def _start(
    folder: Path, rank: int, world: int, port: int, call: list[str], variables: dict[str, str]
) -> subprocess.Popen[bytes]:
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
    result = folder / f"{rank}.json"
    command = [sys.executable, str(Path(__file__)), *call, str(result)]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    end = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                text = (folder / f"{rank}.log").read_text(errors="replace")
                raise RankFailed(f"rank {rank} ended with {code}:\n{text[-3000:]}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            raise RankFailed(f"no result within {timeout:.0f} s")
        time.sleep(0.05)


def main() -> None:
    """In the new process: call the function and leave its result."""
    from shardwise.launch.guard import die_with_parent

    die_with_parent()
    module, function, arguments, result = sys.argv[1:]
    value = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    Path(result).write_text(json.dumps(value))
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
