"""A rank of a verification: `python -m shardwise.verify.worker FOLDER` measures the cells of the folder's job.

Rank 0 writes a result after each cell. A cell that fails ends all ranks: the process that started them knows by the
missing result which one it was.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from shardwise.launch.environment import keep_own
from shardwise.launch.rank_process import as_rank, enter_job
from shardwise.verify.job import CLEAR_LINE, TIMEOUT, Checkpoint, Job, Result


def main() -> int:
    keep_own()
    with as_rank(enter_job(None)) as ending:
        _work(Path(sys.argv[1]))
    return ending.code


def _work(folder: Path) -> None:
    import torch

    from shardwise.config import config_from
    from shardwise.distributed import collectives
    from shardwise.distributed.mesh import Group, join, leave
    from shardwise.verify.measure import measure
    from shardwise.verify.tolerance import Tolerance

    job = Job.read(folder)
    config = config_from(job.config)
    on_cpu = job.cells[0].device == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    join(torch.device("cpu") if on_cpu else None, timeout=TIMEOUT)
    world, source, tolerance = Group.world(), job.source, Tolerance.of(config)
    for number, cell in enumerate(job.cells, start=job.done):
        if world.rank == 0:
            _show(f"layout {number + 1} of {job.total}: {cell.name}")
        start = time.perf_counter()
        differences, saved = measure(config, cell, folder, Path(source.folder), folder / f"layout-{number}")
        checkpoint = Checkpoint(str(saved), cell.name)
        if world.rank == 0:
            Result(differences, checkpoint, source.of, time.perf_counter() - start).append(folder)
            if source != job.one_process:
                shutil.rmtree(Path(source.folder).parent)  # small, but there may be hundreds
        source = job.one_process if differences.problems(tolerance, source.of) else checkpoint
        collectives.barrier(world)
    leave()


def _show(text: str) -> None:
    """Replace the line of progress, where a terminal is."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{CLEAR_LINE}{text[:79]}")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
