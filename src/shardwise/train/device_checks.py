"""Checks that a device can train: its memory and dtypes before the start, and the error where memory ran out."""

from __future__ import annotations

import os

import torch

from shardwise.base.errors import ConfigError, see
from shardwise.base.hardware import available_memory
from shardwise.base.units import counted, size
from shardwise.config import Config, Layout
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh
from shardwise.estimates.memory import RESERVED, expected_memory, leaves_to_memory, memory_of_machine, offloaded_bytes
from shardwise.train.step_record import Progress


def out_of_memory_text(
    config: Config, layout: Layout, rank: int, device: torch.device, progress: Progress, error: BaseException
) -> str:
    """The error text: phase, rank, bytes by kind, and settings that would help, the most effective first."""
    from shardwise.estimates.memory_choice import remedies_of_rank

    accelerator = device.type != "cpu"
    pipeline_rank = layout.pipeline_rank(rank)
    expected = expected_memory(config, layout, accelerator, pipeline_rank=pipeline_rank)
    known = "not known for a model of your own"
    if expected is not None:
        parts = ", ".join(f"{kind} {size(amount)}" for kind, amount in expected.rows())
        known = f"{size(expected.total)} beside Python and torch: {parts}"
    cause = str(error).strip().partition("\n")[0] or type(error).__name__
    return (
        f"rank {rank} ran out of memory on {devices.name(device)} during {progress.phase}, after step "
        f"{progress.step:,}{see('training#out-of-memory')}\nheld at most so far: {size(devices.peak_memory(device))}\n"
        f"expected: {known}\n{_allocator_line(device)}"
        f"what would help: {remedies_of_rank(config, layout, accelerator, pipeline_rank)}\ncause: {cause}"
    )


def _allocator_line(device: torch.device) -> str:
    allocator = devices.allocator_bytes(device)
    total = devices.total_memory(device)
    if not allocator:
        return ""
    unused = allocator["reserved"] - allocator["allocated"]
    line = f"allocator: {size(allocator['allocated'])} in tensors, {size(unused)} more reserved"
    if total is not None:
        line += f", of {size(total)}"
    # A tenth is more than the usual rounding of sizes wastes: blocks are split so that no large tensor fits them.
    if unused > allocator["reserved"] / 10 and devices.has_fixed_segments():
        line += "; PYTORCH_ALLOC_CONF with expandable_segments:True lets tensors use what is reserved in pieces"
    return f"{line}\n"


def memory_for_steps(device: torch.device, ranks: int) -> int | None:
    """Return how many bytes of a device each rank of this machine may use to train; None if nobody knows.

    Ranks on the CPU share what the machine has available.
    """
    if device.type == "cpu":
        available = available_memory()
        return None if available is None else available // ranks
    total = devices.total_memory(device)
    return None if total is None else int(total * (1 - RESERVED))


def config_for_device_memory(config: Config, layout: Layout, mesh: Mesh) -> tuple[Config, str | None]:
    """Check the devices' memory, and choose what keys leave to it; return the configuration, and a text on the choice.

    Collective.

    Raises:
        ConfigError: `train.recompute=auto` where the memory of a device is not known.
    """
    device = mesh.device
    accelerator = device.type != "cpu"
    if not leaves_to_memory(config, layout, accelerator):
        return config, None
    from shardwise.estimates.memory_choice import fitted_to_memory, memory_choice_text

    room = memory_for_steps(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    # The ranks choose alike, by the least of them; of -0 nothing is known.
    (least,) = collectives.reduce_numbers([-(room or 0)], mesh.world)
    chosen = fitted_to_memory(config, layout, -least or None, accelerator=accelerator, device=devices.name(device))
    return chosen, memory_choice_text(chosen, config)


def require_device(config: Config, layout: Layout, rank: int, device: torch.device) -> str | None:
    """Check before a training starts that this rank's device has memory and dtypes for the model.

    Returns:
        a warning where the estimate of the whole step exceeds the memory; None where it fits or is not known.

    Raises:
        ConfigError: parameters, gradients and optimizer state alone, which are exact, need more memory than the
            accelerator has, or than the machine has available for all of its ranks on a CPU; so does offloaded
            optimizer state on the host of an accelerator; the device does not compute in the dtype of the parameters,
            or not in that of `precision.matmul`; or it shares no memory with those of its tensor-parallel ranks, and
            `parallel.tensor_overlap` needs that.
    """
    reads_peers = config.parallel.tensor_overlap == "symmetric_memory" and layout.tensor > 1
    if reads_peers and not devices.shares_memory(device, layout.tensor):
        raise ConfigError(
            "parallel.tensor_overlap (symmetric_memory) must be pieces or null where the tensor-parallel ranks "
            f"({layout.tensor}) are not on CUDA devices of one machine that read each other's memory: this one is "
            f"{devices.name(device)}"
            f"{see('runs#symmetric-memory')}"
        )
    require_matmul_support(config.precision.matmul, device)
    if device.type == "cpu":
        return _require_host_memory(config, layout, rank)
    precision = config.precision.resolved(accelerator=True)
    if not devices.computes_in(device, getattr(torch, precision.parameter)):
        raise ConfigError(
            f"precision.mode ({config.precision.mode or 'mixed, the default on an accelerator'}) must be float32: "
            f"{devices.name(device)} does not compute in {precision.parameter}"
        )
    pipeline_rank = layout.pipeline_rank(rank)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    offloaded = ranks * offloaded_bytes(config, layout, True)
    available = available_memory()
    if available is not None and offloaded > available:
        raise ConfigError(
            f"the optimizer state of the {counted(ranks, 'rank')} on this machine ({size(offloaded)}), which "
            "optimizer.offload (true) keeps in the host's memory, must be at most what that has available "
            f"({size(available)}): set optimizer.zero=1 or higher, optimizer.offload=false, or use more machines"
            f"{see('runs#model-does-not-fit')}"
        )
    expected = expected_memory(config, layout, True, pipeline_rank=pipeline_rank)
    total = devices.total_memory(device)
    if expected is None or total is None or expected.total <= total:
        return None
    from shardwise.estimates.memory_choice import remedies_of_rank

    limit = f"the {size(total)} of {devices.name(device)}: {remedies_of_rank(config, layout, True, pipeline_rank)}"
    return _require_state_fits(expected.state, expected.total, total, limit)


def _require_state_fits(state: int, step: int, limit: int, limit_text: str, whose: str = "") -> str:
    """Refuse a state that does not fit, which is exact; return a warning for the whole step, which is an estimate."""
    if state > limit:
        raise ConfigError(
            f"memory of parameters, gradients and optimizer {whose}({size(state)}) must be at most {limit_text}"
            f"{see('runs#model-does-not-fit')}"
        )
    return f"the expected memory {whose}({size(step)}) exceeds {limit_text}"


def require_matmul_support(matmul: str | None, device: torch.device) -> None:
    """Check that this rank's device can train with `precision.matmul`; ConfigError if it does not multiply so."""
    if matmul is not None and not devices.multiplies_fp8(device):
        raise ConfigError(
            f"precision.matmul (fp8) must be left out on {devices.name(device)}, for which shardwise has no products "
            "in fp8: they need an NVIDIA GPU of compute capability 8.9 or higher, such as an H100, or a CPU"
        )


def _require_host_memory(config: Config, layout: Layout, rank: int) -> str | None:
    """Do the work of `require_device` for the ranks of this machine together, since they share its memory."""
    # Ranks of a machine have consecutive numbers.
    first = rank - int(os.environ.get("LOCAL_RANK", "0"))
    ranks = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    needed = memory_of_machine(config, layout, ranks)
    available = available_memory()
    if needed is None or available is None or needed[1] <= available:
        return None
    from shardwise.estimates.memory_choice import remedies_of_machine

    whose = f"of the {counted(len(ranks), 'rank')} on this machine "
    limit = f"the {size(available)} that it has available: {remedies_of_machine(config, layout, ranks)}"
    return _require_state_fits(*needed, available, limit, whose) + "; the system may kill a rank"
