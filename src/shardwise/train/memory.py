"""What a user reads when a device has too little memory for a training, before the start or when it ran out."""

from __future__ import annotations

import os

import torch
from torch import nn

from shardwise.base.errors import ConfigError, see
from shardwise.base.hardware import available_memory
from shardwise.base.units import counted, size
from shardwise.config import Config, Layout
from shardwise.distributed import devices
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.planner.memory import expected_memory, memory_of_machine
from shardwise.train.memory_remedies import remedies_of_machine, remedies_of_rank
from shardwise.train.step_record import Progress

_ALLOCATOR_SETTINGS = "PYTORCH_ALLOC_CONF"


def out_of_memory_text(
    config: Config, layout: Layout, rank: int, device: torch.device, progress: Progress, error: BaseException
) -> str:
    """Phase, rank, bytes by kind, and the settings that would help, the most effective first."""
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
        f"expected: {known}\n{_of_allocator(device)}"
        f"what would help: {remedies_of_rank(config, layout, accelerator, pipeline_rank)}\ncause: {cause}"
    )


def state_by_kind(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> dict[str, int]:
    """Bytes of `parameters`, `gradients` and `optimizer` on this rank, which are the same after each step."""
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    gradients = sum(bucket.gradients.nbytes for bucket in optimizer.buckets)
    state = optimizer.state_bytes()
    return {"parameters": parameters, "gradients": gradients, "optimizer": state["state"] + state["masters"]}


def memory_by_kind(state: dict[str, int], device: torch.device) -> dict[str, int]:
    """Bytes that this rank holds: its `state_by_kind`, and `other`, which is the rest in use."""
    return {**state, "other": max(0, devices.memory_in_use(device) - sum(state.values()))}


def _of_allocator(device: torch.device) -> str:
    """A line on the allocator, with advice where it holds much memory in pieces that are too small."""
    held, total = devices.allocator_bytes(device), devices.total_memory(device)
    if not held:
        return ""
    unused = held["reserved"] - held["allocated"]
    line = f"allocator: {size(held['allocated'])} in tensors, {size(unused)} more reserved"
    if total is not None:
        line += f", of {size(total)}"
    if unused > held["reserved"] / 10 and "expandable_segments:True" not in os.environ.get(_ALLOCATOR_SETTINGS, ""):
        line += f"; {_ALLOCATOR_SETTINGS}=expandable_segments:True lets tensors use what is reserved in pieces"
    return f"{line}\n"


def require_device(config: Config, layout: Layout, rank: int, device: torch.device) -> str | None:
    """Check before the start that this rank's device can train the model.

    Returns:
        a warning where the estimate of the whole step exceeds the memory: of that a part is allocated and freed by
        kernels, and the estimate of it is not exact for each device.

    Raises:
        ConfigError: parameters, gradients and optimizer state alone, which are exact, need more memory than the
            accelerator has, or than the machine has available for all of its ranks on a CPU; the device does not
            compute in the dtype of the parameters; or it shares no memory with those of its tensor-parallel ranks, and
            `parallel.tensor_overlap` needs that.
    """
    in_memory = config.parallel.tensor_overlap == "symmetric_memory" and layout.tensor > 1
    if in_memory and not devices.shares_memory(device, layout.tensor):
        raise ConfigError(
            "parallel.tensor_overlap (symmetric_memory) must be pieces or null where the tensor-parallel ranks "
            f"({layout.tensor}) are not on CUDA devices of one machine that read each other's memory: this one is "
            f"{devices.name(device)}"
            f"{see('runs#symmetric-memory')}"
        )
    if device.type == "cpu":
        return _require_host_memory(config, layout, rank)
    precision = config.precision.resolved(accelerator=True)
    if not devices.computes_in(device, getattr(torch, precision.parameter)):
        raise ConfigError(
            f"precision.mode ({config.precision.mode or 'mixed, the default on an accelerator'}) must be float32: "
            f"{devices.name(device)} does not compute in {precision.parameter}"
        )
    pipeline_rank = layout.pipeline_rank(rank)
    expected, total = expected_memory(config, layout, True, pipeline_rank=pipeline_rank), devices.total_memory(device)
    if expected is None or total is None or expected.total <= total:
        return None
    rest = f"{size(total)} of {devices.name(device)}: {remedies_of_rank(config, layout, True, pipeline_rank)}"
    if expected.state > total:
        raise ConfigError(
            f"memory of parameters, gradients and optimizer ({size(expected.state)}) must be at most the {rest}"
            f"{see('runs#model-does-not-fit')}"
        )
    return f"the expected memory ({size(expected.total)}) exceeds the {rest}"


def _require_host_memory(config: Config, layout: Layout, rank: int) -> str | None:
    """As `require_device`, for the ranks of this machine together, since they share its memory."""
    first = rank - int(os.environ.get("LOCAL_RANK", "0"))
    ranks = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    needed, available = memory_of_machine(config, layout, ranks), available_memory()
    if needed is None or available is None or needed[1] <= available:
        return None
    state, expected = needed
    of_ranks = f"of the {counted(len(ranks), 'rank')} on this machine"
    rest = f"the {size(available)} that it has available: {remedies_of_machine(config, layout, ranks)}"
    if state > available:
        raise ConfigError(
            f"memory of parameters, gradients and optimizer {of_ranks} ({size(state)}) must be at most {rest}"
            f"{see('runs#model-does-not-fit')}"
        )
    return f"the expected memory {of_ranks} ({size(expected)}) exceeds {rest}; the system may kill a rank"
