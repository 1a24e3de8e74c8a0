"""Settings that train the same model in less memory, for messages on too little memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from shardwise.base.errors import ConfigError
from shardwise.base.units import size
from shardwise.config import Config, Layout, check_layout
from shardwise.config.schedules import DEFAULT_SCHEDULE
from shardwise.estimates.memory import expected_memory, memory_of_machine


def remedies_of_machine(config: Config, layout: Layout, ranks: range) -> str:
    """Settings that keep the number of ranks, and the bytes that they save on one machine, which has these ranks."""

    def needed(changed: Config, layout: Layout) -> int | None:
        memory = memory_of_machine(changed, layout, ranks)
        return None if memory is None else memory[1]

    same_world = (alternative for alternative in _alternatives(config, layout, False) if alternative[2] == layout.world)
    return _listed(config, layout, same_world, needed)


def remedies_of_rank(config: Config, layout: Layout, accelerator: bool, pipeline_rank: int) -> str:
    """Settings that save memory on `pipeline_rank`, or where the pipeline changes, on the rank that then needs most."""

    def needed(changed: Config, changed_layout: Layout) -> int | None:
        rank = pipeline_rank if changed_layout.pipeline == layout.pipeline else None
        memory = expected_memory(changed, changed_layout, accelerator, pipeline_rank=rank)
        return None if memory is None else memory.total

    alternatives = _alternatives(config, layout, accelerator)
    return _listed(config, layout, alternatives, needed)


def _listed(
    config: Config,
    layout: Layout,
    alternatives: Iterable[tuple[str, Config, int]],
    needed: Callable[[Config, Layout], int | None],
) -> str:
    """Settings that train the same model and batch in less memory, the one that saves most first.

    Args:
        alternatives: settings as text, the configuration with them, and its number of ranks.
        needed: gives the bytes that a configuration takes; None where no formula knows them.
    """
    present_bytes = needed(config, layout)
    remedies = []
    for setting, changed, world in alternatives:
        try:
            changed_bytes = needed(changed, check_layout(changed, world))
        except ConfigError:
            continue
        if present_bytes is None or changed_bytes is None:
            remedies.append((0, setting))
        elif changed_bytes < present_bytes:
            saved = present_bytes - changed_bytes
            remedies.append((saved, f"{setting} ({size(saved)} less)"))
    return "; ".join(text for _, text in sorted(remedies, key=lambda remedy: -remedy[0])) or "a smaller model"


def _alternatives(config: Config, layout: Layout, accelerator: bool) -> Iterator[tuple[str, Config, int]]:
    """Yield settings as text, the configuration with them, and its number of ranks; some may be invalid."""

    def changed(section: str, **values: object) -> Config:
        return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})

    micro = config.train.micro_batch
    tensor = layout.tensor
    pipeline = layout.pipeline
    world = layout.world
    # A user's own model may have no recompute, and is never cut into stages.
    is_user_model = config.model.is_own
    if micro > 1:
        # It must divide the present one, so that the global batch stays a multiple of it.
        smaller = max(part for part in range(1, micro // 2 + 1) if micro % part == 0)
        yield f"train.micro_batch={smaller}", changed("train", micro_batch=smaller), world
    if config.recompute != "full" and not is_user_model:
        yield "train.recompute=full", changed("train", recompute="full"), world
    if layout.sequence_parallel and not config.regathers and config.precision.matmul is None:
        yield "parallel.sequence_regather=true", changed("parallel", sequence_regather=True), world
    if layout.context > 1 and config.parallel.context_keys != "ring":
        yield "parallel.context_keys=ring", changed("parallel", context_keys="ring"), world
    if tensor > 1 and not layout.sequence_parallel:
        yield "parallel.sequence=true", changed("parallel", sequence=True), world
    for stage in (1, 2, 3):
        if layout.replicas > 1 and config.optimizer.zero < stage:
            yield f"optimizer.zero={stage}", changed("optimizer", zero=stage), world
    optimizer = config.optimizer
    if accelerator and not (optimizer.offload or optimizer.spec.needs_whole_tensors):
        yield "optimizer.offload=true", changed("optimizer", offload=True), world
    if config.precision.resolved(accelerator).parameter == "float32":
        yield "precision.mode=mixed", changed("precision", mode="mixed"), world
    if pipeline > 1 and config.parallel.schedule != DEFAULT_SCHEDULE:
        plain_schedule = changed("parallel", schedule=DEFAULT_SCHEDULE, virtual_stages=None, stages=None)
        yield f"parallel.schedule={DEFAULT_SCHEDULE}", plain_schedule, world
    if not is_user_model:
        deeper = changed("parallel", pipeline=2 * pipeline, stages=None)
        yield f"parallel.pipeline={2 * pipeline} on {2 * world} ranks", deeper, 2 * world
    context = 2 * layout.context
    yield f"parallel.context={context} on {2 * world} ranks", changed("parallel", context=context), 2 * world
    yield f"parallel.tensor={2 * tensor} on {2 * world} ranks", changed("parallel", tensor=2 * tensor), 2 * world
    if config.optimizer.zero:
        yield f"{2 * world} ranks, which share the optimizer state", config, 2 * world
