"""A collective of two ranks, which sum a tensor: on two accelerators, or on the CPU.

The ranks import torch, and the process that examines the machine does not.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from shardwise.base.errors import ShardwiseError, shown
from shardwise.base.hardware import accelerators
from shardwise.verify.machine_checks import Check, ok

_TIMEOUT = 60.0
"""Seconds after which a rank gives up that waits for the other one."""
_ELEMENTS = 2**20
"""Elements of the tensor: 4 MiB of float32."""
_LOG_LINES = 12
"""Lines that are shown of a log, whose last line says what failed."""
_FIX = (
    "if the ranks cannot connect, name the interface by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, or let the "
    "firewall pass local connections; NCCL_DEBUG=INFO says more"
)


def collective() -> Check:
    """Start two ranks on this machine, and check their sum and the devices that torch finds."""
    from shardwise.launch.local import EndedError
    from shardwise.verify.rank_calls import call_on_ranks

    try:
        temporary = tempfile.TemporaryDirectory(prefix="shardwise-doctor-")
    except OSError as error:
        problem = f"temporary files cannot be written: {error.strerror}"
        return Check("collective", "wrong", problem, "set TMPDIR to a folder with room that you can write")
    with temporary as name:
        folder = Path(name)
        try:
            facts = call_on_ranks(_sum_on_ranks, ranks=2, folder=folder).single()
        except EndedError:
            raise
        except (ShardwiseError, OSError, ValueError) as error:
            return Check("collective", "wrong", _without_paths(str(error), folder), _FIX)
    present = accelerators()[1]
    if facts["accelerators"] < present:
        return Check(
            "collective",
            "wrong",
            f"torch {facts['torch']} finds {facts['accelerators']} accelerators, and this machine has {present}",
            "install a torch that is built for them, or their driver",
        )
    return ok(
        "collective",
        f"2 ranks on {facts['device']} by {facts['backend']}: 4 MiB summed in {1000 * facts['seconds']:.1f} ms",
    )


def _sum_on_ranks() -> dict[str, Any]:
    """Sum a tensor over the ranks; return the facts of this rank. Collective."""
    import time

    import torch

    from shardwise.base.errors import RunError
    from shardwise.distributed import collectives, devices
    from shardwise.verify.rank_calls import process_group

    count = torch.accelerator.device_count()
    # Two ranks need two devices: with one accelerator the CPU is tested.
    device = devices.local_device() if count > 1 else torch.device("cpu")
    with process_group(device, _TIMEOUT) as world:
        tensor = torch.full((_ELEMENTS,), float(world.rank + 1), device=device)
        # The first collective connects the ranks, which takes longer than the sum.
        collectives.all_reduce_(tensor.clone(), world)
        collectives.barrier(world)
        start = time.perf_counter()
        total = collectives.all_reduce_(tensor, world)
        devices.synchronize(device)
        seconds = time.perf_counter() - start
        if not bool((total == 3.0).all()):
            raise RunError(f"the sum of 1 and 2 over the ranks ({total[0].item()}) must be 3")
    return {
        "torch": torch.__version__,
        "accelerators": count,
        "device": device.type,
        "seconds": seconds,
        "backend": devices.backend(device),
    }


def _without_paths(text: str, folder: Path) -> str:
    """Remove the files of a folder that is about to be removed from a text; a log's end stands in place of its path."""
    logs = [Path(path) for path in re.findall(rf"^log: ({re.escape(str(folder))}.*)$", text, re.MULTILINE)]
    lines = [line for line in text.splitlines() if str(folder) not in line]
    for log in logs:
        if log.is_file():
            lines += _last_lines(log)
    return "\n".join(lines) or text.replace(f"{folder}/", "")


def _last_lines(log: Path) -> list[str]:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return [shown(line) for line in lines[-_LOG_LINES:]]
