"""What a user reads when memory ran out."""

from __future__ import annotations

import torch

from shardwise import device as devices
from shardwise.config import Config, Layout
from shardwise.cost.memory import MemoryEstimate
from shardwise.train.trainer import Progress
from shardwise.units import size


def out_of_memory_text(
    config: Config,
    layout: Layout,
    rank: int,
    device: torch.device,
    progress: Progress,
    expected: MemoryEstimate,
    error: BaseException,
) -> str:
    """Phase, rank, bytes by kind, and the settings that would help, the most effective first."""
    parts = ", ".join(f"{kind} {size(amount)}" for kind, amount in expected.rows())
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"rank {rank} ran out of memory on {devices.name(device)} in step {progress.step + 1}, {progress.phase}; "
        f"peak so far {size(devices.peak_memory(device))}. "
        f"Expected {size(expected.total)} beside Python and torch: {parts}. "
        f"What would help: {'; '.join(_remedies(config, layout, expected))}. ({cause})"
    )


def _remedies(config: Config, layout: Layout, expected: MemoryEstimate) -> list[str]:
    found: list[tuple[int, str]] = []
    if config.train.micro_batch > 1:
        found.append((expected.activations // 2, f"train.micro_batch={config.train.micro_batch // 2}"))
    if layout.tensor > 1 and not layout.sequence:
        found.append((expected.activations // 3, "parallel.sequence=true"))
    if not config.optimizer.zero and layout.data > 1:
        found.append((expected.optimizer * (layout.data - 1) // layout.data, "optimizer.zero=1"))
    held = expected.parameters + expected.gradients + expected.optimizer + expected.activations
    found.append((held // 2, f"parallel.tensor={layout.tensor * 2} on twice the ranks"))
    if config.optimizer.zero:
        found.append((expected.optimizer // 2, "more data-parallel ranks"))
    return [f"{setting} (about {size(saved)} less)" for saved, setting in sorted(found, reverse=True) if saved > 0]
