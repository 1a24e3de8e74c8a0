"""What a user reads when memory ran out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise import device as devices
from shardwise.config import Config, Layout, OwnConfig, check_layout
from shardwise.cost.memory import expected_memory
from shardwise.errors import ConfigError
from shardwise.train.record import Progress
from shardwise.units import size


def out_of_memory_text(
    config: Config, layout: Layout, rank: int, device: torch.device, progress: Progress, error: BaseException
) -> str:
    """Phase, rank, bytes by kind, and the settings that would help, the most effective first."""
    accelerator = device.type != "cpu"
    stage = rank // (layout.data * layout.tensor) % layout.pipeline
    expected = expected_memory(config, layout, accelerator, pipeline_rank=stage)
    known = "not known for a model of your own"
    if expected is not None:
        parts = ", ".join(f"{kind} {size(amount)}" for kind, amount in expected.rows())
        known = f"{size(expected.total)} beside Python and torch: {parts}"
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    remedies = _remedies(config, layout, accelerator, stage) or ["a smaller model"]
    return (
        f"rank {rank} ran out of memory on {devices.name(device)} during {progress.phase}, after step "
        f"{progress.step:,}\nheld at most so far: {size(devices.peak_memory(device))}\n"
        f"expected: {known}\n"
        f"what would help: {'; '.join(remedies)}\ncause: {cause}"
    )


def _remedies(config: Config, layout: Layout, accelerator: bool, stage: int) -> list[str]:
    """Settings under which the same model and batch would need less, with how much less, by the formulas of `cost`.

    Of a model of the user's own no formula knows how much. stage: the pipeline rank that needs less; with another
    pipeline it is the one that then needs most.
    """
    now = expected_memory(config, layout, accelerator, pipeline_rank=stage)
    found = []
    for setting, other, world in _alternatives(config, layout, accelerator):
        try:
            rank = stage if other.parallel.pipeline == layout.pipeline else None
            then = expected_memory(other, check_layout(other, world), accelerator, pipeline_rank=rank)
        except ConfigError:
            continue
        if now is None or then is None:
            found.append((0, setting))
        elif then.total < now.total:
            found.append((now.total - then.total, f"{setting} ({size(now.total - then.total)} less)"))
    return [text for _, text in sorted(found, key=lambda one: -one[0])]


def _alternatives(config: Config, layout: Layout, accelerator: bool) -> Iterator[tuple[str, Config, int]]:
    """(what to set, the configuration then, the number of ranks then); some may not be valid."""

    def changed(section: str, **values: object) -> Config:
        return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})

    micro, tensor, world = config.train.micro_batch, layout.tensor, layout.world
    if micro > 1:
        smaller = max(part for part in range(1, micro // 2 + 1) if micro % part == 0)
        yield f"train.micro_batch={smaller}", changed("train", micro_batch=smaller), world
    if config.train.recompute != "full" and not isinstance(config.model, OwnConfig):  # which may not know how
        yield "train.recompute=full", changed("train", recompute="full"), world
    if tensor > 1 and not layout.sequence:
        yield "parallel.sequence=true", changed("parallel", sequence=True), world
    if layout.data > 1 and not config.optimizer.zero:
        yield "optimizer.zero=1", changed("optimizer", zero=1), world
    if config.precision.resolved(accelerator).parameter == "float32":
        yield "precision.mode=mixed", changed("precision", mode="mixed"), world
    if layout.pipeline > 1 and config.parallel.schedule != "1f1b":
        simple = changed("parallel", schedule="1f1b", virtual_stages=None, stages=None)
        yield "parallel.schedule=1f1b", simple, world
    if not isinstance(config.model, OwnConfig):
        deeper = changed("parallel", pipeline=2 * layout.pipeline, stages=None)
        yield f"parallel.pipeline={2 * layout.pipeline} on {2 * world} ranks", deeper, 2 * world
    yield f"parallel.tensor={2 * tensor} on {2 * world} ranks", changed("parallel", tensor=2 * tensor), 2 * world
    if config.optimizer.zero:
        yield f"{2 * world} ranks, which share the optimizer state", config, 2 * world
