"""What a user reads when a device has too little memory for a training, before the start or when it ran out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from shardwise import device as devices
from shardwise.config import Config, Layout, OwnConfig, check_layout
from shardwise.cost.memory import expected_memory, memory_of_machine
from shardwise.errors import ConfigError, see
from shardwise.hardware import available_memory
from shardwise.optim import ZeroRedundancyOptimizer
from shardwise.train.record import Progress
from shardwise.units import counted, size

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
        f"what would help: {_listed_remedies(config, layout, accelerator, pipeline_rank)}\ncause: {cause}"
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
    rest = f"{size(total)} of {devices.name(device)}: {_listed_remedies(config, layout, True, pipeline_rank)}"
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
    remedies = "; ".join(remedies_of_machine(config, layout, ranks)) or "a smaller model"
    rest = f"the {size(available)} that it has available: {remedies}"
    if state > available:
        raise ConfigError(
            f"memory of parameters, gradients and optimizer {of_ranks} ({size(state)}) must be at most {rest}"
            f"{see('runs#model-does-not-fit')}"
        )
    return f"the expected memory {of_ranks} ({size(expected)}) exceeds {rest}; the system may kill a rank"


def remedies_of_machine(config: Config, layout: Layout, ranks: range) -> list[str]:
    """Settings that keep the number of ranks, and the bytes that they save on one machine, which has these ranks."""

    def needed(changed: Config, layout: Layout) -> int | None:
        memory = memory_of_machine(changed, layout, ranks)
        return None if memory is None else memory[1]

    same_world = (alternative for alternative in _alternatives(config, layout, False) if alternative[2] == layout.world)
    return _remedies(config, layout, same_world, needed)


def _listed_remedies(config: Config, layout: Layout, accelerator: bool, pipeline_rank: int) -> str:
    """Settings that save memory on `pipeline_rank`, or where the pipeline changes, on the rank that then needs most."""

    def needed(changed: Config, other: Layout) -> int | None:
        rank = pipeline_rank if other.pipeline == layout.pipeline else None
        memory = expected_memory(changed, other, accelerator, pipeline_rank=rank)
        return None if memory is None else memory.total

    alternatives = _alternatives(config, layout, accelerator)
    return "; ".join(_remedies(config, layout, alternatives, needed) or ["a smaller model"])


def _remedies(
    config: Config,
    layout: Layout,
    alternatives: Iterable[tuple[str, Config, int]],
    needed: Callable[[Config, Layout], int | None],
) -> list[str]:
    """Settings that train the same model and batch in less memory, the one that saves most first.

    Args:
        alternatives: settings as text, the configuration with them, and its number of ranks.
        needed: the bytes that a configuration takes; None where no formula knows them.
    """
    now = needed(config, layout)
    remedies = []
    for setting, changed, world in alternatives:
        try:
            then = needed(changed, check_layout(changed, world))
        except ConfigError:
            continue
        if now is None or then is None:
            remedies.append((0, setting))
        elif then < now:
            remedies.append((now - then, f"{setting} ({size(now - then)} less)"))
    return [text for _, text in sorted(remedies, key=lambda remedy: -remedy[0])]


def _alternatives(config: Config, layout: Layout, accelerator: bool) -> Iterator[tuple[str, Config, int]]:
    """Yield settings as text, the configuration with them, and its number of ranks; some may be invalid."""

    def changed(section: str, **values: object) -> Config:
        return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})

    micro, tensor, pipeline, world = config.train.micro_batch, layout.tensor, layout.pipeline, layout.world
    is_own = isinstance(config.model, OwnConfig)  # it may have no recompute, and is never cut into stages
    if micro > 1:
        smaller = max(part for part in range(1, micro // 2 + 1) if micro % part == 0)
        yield f"train.micro_batch={smaller}", changed("train", micro_batch=smaller), world
    if config.train.recompute != "full" and not is_own:
        yield "train.recompute=full", changed("train", recompute="full"), world
    if tensor > 1 and not layout.sequence:
        yield "parallel.sequence=true", changed("parallel", sequence=True), world
    if layout.data > 1 and not config.optimizer.zero:
        yield "optimizer.zero=1", changed("optimizer", zero=1), world
    if config.precision.resolved(accelerator).parameter == "float32":
        yield "precision.mode=mixed", changed("precision", mode="mixed"), world
    if pipeline > 1 and config.parallel.schedule != "1f1b":
        one_stage = changed("parallel", schedule="1f1b", virtual_stages=None, stages=None)
        yield "parallel.schedule=1f1b", one_stage, world
    if not is_own:
        deeper = changed("parallel", pipeline=2 * pipeline, stages=None)
        yield f"parallel.pipeline={2 * pipeline} on {2 * world} ranks", deeper, 2 * world
    yield f"parallel.tensor={2 * tensor} on {2 * world} ranks", changed("parallel", tensor=2 * tensor), 2 * world
    if config.optimizer.zero:
        yield f"{2 * world} ranks, which share the optimizer state", config, 2 * world
