"""A collective of two ranks: `python -m shardwise.verify.doctor.collective FOLDER` is one of them.

The ranks import torch, and the process that examines the machine does not.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

from shardwise.base.errors import ShardwiseError, shown
from shardwise.base.hardware import accelerators
from shardwise.launch.environment import keep_own
from shardwise.verify.doctor.check import Check, ok

_RESULT = "result.json"
_SECONDS = 60.0
_ELEMENTS = 2**20
_LOG_LINES = 12
"""Of a log, whose last line says what failed."""


def collective() -> Check:
    """Start two ranks on this machine, which sum a tensor: on two accelerators, or on the CPU."""
    from shardwise.launch.local import EndedError, launch

    try:
        made = tempfile.TemporaryDirectory(prefix="shardwise-doctor-")
    except OSError as error:
        found = f"temporary files cannot be written: {error.strerror}"
        return Check("collective", "wrong", found, "set TMPDIR to a folder with room that you can write")
    with made as name:
        folder = Path(name)
        try:
            launch([sys.executable, "-P", "-m", "shardwise.verify.doctor.collective", name], 2, folder)
            found = json.loads((folder / _RESULT).read_text(encoding="utf-8"))
        except EndedError:
            raise
        except (ShardwiseError, OSError, ValueError) as error:
            return Check("collective", "wrong", _without(str(error), folder), _mend())
    wanted = accelerators()[1]
    if found["accelerators"] < wanted:
        return Check(
            "collective",
            "wrong",
            f"torch {found['torch']} finds {found['accelerators']} accelerators, and this machine has {wanted}",
            "install a torch that is built for them, or their driver",
        )
    return ok(
        "collective",
        f"2 ranks on {found['device']} by {found['backend']}: 4 MiB summed in {1000 * found['seconds']:.1f} ms",
    )


def _mend() -> str:
    return (
        "if the ranks cannot connect, name the interface by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, or let the "
        "firewall pass local connections; NCCL_DEBUG=INFO says more"
    )


def _without(text: str, folder: Path) -> str:
    """A text that names no file of a folder that is removed; the end of a log stands in place of its path."""
    named = re.escape(str(folder)) + r"[^\s;]*"
    logs = [Path(path) for path in re.findall(rf"; its log: ({named})", text)]
    rest = re.sub(rf"; its log: {named}", "", text)
    kept = [line for line in rest.splitlines() if str(folder) not in line]
    ends = [line for log in logs if log.is_file() for line in _end(log)]
    return "\n".join(kept + ends) or rest.replace(f"{folder}/", "")


def _end(log: Path) -> list[str]:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return [shown(line) for line in lines[-_LOG_LINES:]]


def main() -> int:
    """A rank."""
    from shardwise.launch.rank_process import as_rank, enter_job

    keep_own()
    with as_rank(enter_job(None)) as ending:
        _work(Path(sys.argv[1]))
    return ending.code


def _work(folder: Path) -> None:
    import time

    import torch

    from shardwise.base.errors import RunError
    from shardwise.distributed import collectives, devices
    from shardwise.distributed.mesh import Group, join, leave

    count = torch.accelerator.device_count()
    device = devices.local_device() if count > 1 else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    join(device, timeout=_SECONDS)
    world = Group.world()
    tensor = torch.full((_ELEMENTS,), float(world.rank + 1), device=device)
    collectives.all_reduce_(tensor.clone(), world)  # the first one connects the ranks
    collectives.barrier(world)
    start = time.perf_counter()
    total = collectives.all_reduce_(tensor, world)
    devices.synchronize(device)
    seconds = time.perf_counter() - start
    if not bool((total == 3.0).all()):
        raise RunError(f"the sum of 1 and 2 over the ranks ({total[0].item()}) must be 3")
    if world.rank == 0:
        found = {"torch": torch.__version__, "accelerators": count, "device": device.type, "seconds": seconds}
        (folder / _RESULT).write_text(json.dumps({**found, "backend": devices.backend(device)}), encoding="utf-8")
    leave()


if __name__ == "__main__":
    sys.exit(main())
