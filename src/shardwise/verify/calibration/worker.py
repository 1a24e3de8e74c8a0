"""A rank of a calibration: `python -m shardwise.verify.calibration.worker FOLDER UNTIL`.

Rank 0 writes the measurements into FOLDER.

UNTIL is the time at which it should end, in seconds since 1970.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shardwise.launch.environment import keep_own
from shardwise.launch.rank_process import as_rank, enter_job


def main() -> int:
    keep_own()
    with as_rank(enter_job(None)) as ending:
        _work(Path(sys.argv[1]), float(sys.argv[2]))
    return ending.code


def _work(folder: Path, until: float) -> None:
    import torch

    from shardwise.distributed import devices
    from shardwise.distributed.mesh import Group, join, leave
    from shardwise.verify.calibration.measure import measured

    device = devices.local_device()
    if device.type == "cpu":
        torch.set_num_threads(1)
    join(device)
    world = Group.world()
    found = measured(world, device, until)
    if world.rank == 0:
        found.write(folder)
    leave()


if __name__ == "__main__":
    sys.exit(main())
