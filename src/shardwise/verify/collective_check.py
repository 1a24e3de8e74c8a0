"""A collective of two ranks, which sum a tensor: on two accelerators, or on the CPU.

The ranks import torch, and the process that examines the machine does not.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from shardwise.base.errors import EndedError, LaunchError, ShardwiseError, shown
from shardwise.base.hardware import accelerators
from shardwise.launch.local import agent_ahead
from shardwise.verify.machine_checks import Check
from shardwise.verify.rank_calls import call_on_ranks

_TIMEOUT = 60.0  # seconds after which a rank gives up that waits for the other one
_RANKS = 2
_ELEMENTS = 2**20  # elements of the tensor: 4 MiB of float32
_FIX = (
    "if the ranks cannot connect, name the interface by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, or let the "
    "firewall pass local connections; NCCL_DEBUG=INFO says more"
)


@contextmanager
def prepared_check() -> Iterator[None]:
    """Let the ranks of `check_collective` in the `with` statement import torch beside the other checks."""
    with ExitStack() as stack:
        # `check_collective` tells why no process can be started.
        with suppress(LaunchError, OSError):
            stack.enter_context(agent_ahead(_RANKS, [__name__, "shardwise.distributed.collectives"]))
        yield


def check_collective() -> Check:
    """Start two ranks on this machine, and check their sum and the devices that torch finds."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="shardwise-doctor-"))
        facts = call_on_ranks(_sum_on_ranks, ranks=_RANKS, folder=folder).single()
    except EndedError:
        raise
    except (ShardwiseError, OSError, ValueError) as error:
        # The folder stays: the message names logs in it.
        return Check("collective", "wrong", shown(str(error)), _FIX)
    shutil.rmtree(folder, ignore_errors=True)
    present = accelerators()[1]
    if facts["accelerators"] < present:
        text = f"torch {facts['torch']} finds {facts['accelerators']} accelerators, and this machine has {present}"
        return Check("collective", "wrong", text, "install a torch that is built for them, or their driver")
    return Check(
        "collective",
        "ok",
        f"2 ranks on {facts['device']} by {facts['backend']}: 4 MiB summed in {1000 * facts['seconds']:.1f} ms",
    )


def _sum_on_ranks() -> dict[str, Any]:
    """Sum a tensor over the ranks; return the facts of this rank. Collective."""
    import time

    import torch

    from shardwise.base.errors import RunError
    from shardwise.distributed import collectives, devices
    from shardwise.verify.rank_calls import join_called_ranks

    count = torch.accelerator.device_count()
    # Two ranks need two devices: with one accelerator the CPU is tested.
    device = devices.local_device() if count > 1 else torch.device("cpu")
    with join_called_ranks(device, _TIMEOUT) as world:
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
