"""Chooses what the backward pass computes or gathers again, and how keys come, so that a step fits a device's memory.

`train.recompute=auto`, `parallel.sequence_regather=null` and `parallel.context_keys=null` leave this to the memory that
a rank has. The choices are tried in the order of what they cost, each by the planner's estimate. Where nothing fits,
messages list settings that train the same model in less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import get_args

from shardwise.base import units
from shardwise.base.errors import ConfigError, see
from shardwise.config import Config, Layout, Recompute, check_layout
from shardwise.config.pipeline_schedule_specs import DEFAULT_SCHEDULE
from shardwise.estimates.memory import (
    MemoryEstimate,
    expected_memory,
    leaves_to_memory,
    memory_of_machine,
    settings_left_to_memory,
)


def memory_candidates(config: Config, layout: Layout) -> Iterator[Config]:
    """Yield the configuration with each choice that its keys leave to a rank's memory, the fastest first.

    Messages are tried before more is computed again: they move bytes, which matmuls and attention hide in part.
    """
    recompute = config.train.recompute
    recomputes: tuple[Recompute, ...] = get_args(Recompute) if recompute == "auto" else (recompute,)
    for chosen in recomputes:
        for settings in settings_left_to_memory(config, layout):
            yield config.with_keys(train={"recompute": chosen}, parallel=settings)


def first_fitting_candidate(
    config: Config, layout: Layout, estimated: Callable[[Config], MemoryEstimate], limit: float
) -> tuple[Config, MemoryEstimate]:
    """Return the first candidate that needs at most `limit` bytes, or else the one that needs least, and its memory."""
    too_large: list[tuple[Config, MemoryEstimate]] = []
    for candidate in memory_candidates(config, layout):
        memory = estimated(candidate)
        if memory.total <= limit:
            return candidate, memory
        too_large.append((candidate, memory))
    return min(too_large, key=lambda pair: pair[1].total)


def fitted_to_memory(config: Config, layout: Layout, memory: float | None, *, accelerator: bool, device: str) -> Config:
    """Return the configuration with what its keys leave to the memory of a rank.

    Args:
        memory: bytes that a rank has; None where nobody knows.

    Raises:
        ConfigError: `train.recompute=auto` for memory or a model that is not known.
    """
    if not leaves_to_memory(config, layout, accelerator):
        return config
    is_auto = config.train.recompute == "auto"
    if is_auto and config.shapes is None:
        raise ConfigError(
            "train.recompute (auto) must be none, selective or full for a model of your own, whose activations are not "
            "known"
        )
    if is_auto and memory is None:
        raise ConfigError(
            f"train.recompute (auto) must be none, selective or full on {device}, whose memory is not known"
        )
    if memory is None or config.shapes is None:
        return config

    def estimated(candidate: Config) -> MemoryEstimate:
        estimate = expected_memory(candidate, layout, accelerator)
        assert estimate is not None, "the shapes of the model are known"
        return estimate

    return first_fitting_candidate(config, layout, estimated, memory)[0]


def memory_choice_text(chosen: Config, config: Config) -> str | None:
    """Return what was chosen to fit a rank's memory, as settings; None where the keys left nothing open."""
    settings = []
    if config.train.recompute != chosen.train.recompute:
        settings.append(f"train.recompute={chosen.train.recompute}")
    if chosen.regathers and not config.regathers:
        settings.append("parallel.sequence_regather=true")
    if chosen.passes_keys and not config.passes_keys:
        settings.append("parallel.context_keys=ring")
    return ", ".join(settings) or None


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
            remedies.append((saved, f"{setting} ({units.size(saved)} less)"))
    return "; ".join(text for _, text in sorted(remedies, key=lambda remedy: -remedy[0])) or "a smaller model"


def _alternatives(config: Config, layout: Layout, accelerator: bool) -> Iterator[tuple[str, Config, int]]:
    """Yield settings as text, the configuration with them, and its number of ranks; some may be invalid."""
    micro = config.train.micro_batch
    # It must divide the present one, so that the global batch stays a multiple of it.
    smaller = max((part for part in range(1, micro // 2 + 1) if micro % part == 0), default=1)
    optimizer = config.optimizer
    parallel = config.parallel
    # A user's own model may have no recompute, and is never cut into stages.
    is_family = not config.model.is_own
    regathers = layout.sequence_parallel and not config.regathers and config.precision.matmul is None
    offloads = accelerator and not (optimizer.offload or optimizer.spec.needs_whole_tensors)
    plain_schedule = {"schedule": DEFAULT_SCHEDULE, "virtual_stages": None, "stages": None}
    # Whether a remedy applies, its section and keys, of which the first is told, and the factor of the ranks.
    rows: list[tuple[bool, str, Mapping[str, object], int]] = [
        (micro > 1, "train", {"micro_batch": smaller}, 1),
        (config.recompute != "full" and is_family, "train", {"recompute": "full"}, 1),
        (regathers, "parallel", {"sequence_regather": True}, 1),
        (layout.context > 1 and parallel.context_keys != "ring", "parallel", {"context_keys": "ring"}, 1),
        (layout.tensor > 1 and not layout.sequence_parallel, "parallel", {"sequence": True}, 1),
        *((layout.replicas > 1 and optimizer.zero < zero, "optimizer", {"zero": zero}, 1) for zero in (1, 2, 3)),
        (offloads, "optimizer", {"offload": True}, 1),
        (config.precision.resolved(accelerator).parameter == "float32", "precision", {"mode": "mixed"}, 1),
        (layout.pipeline > 1 and parallel.schedule != DEFAULT_SCHEDULE, "parallel", plain_schedule, 1),
        (is_family, "parallel", {"pipeline": 2 * layout.pipeline, "stages": None}, 2),
        (True, "parallel", {"context": 2 * layout.context}, 2),
        (True, "parallel", {"tensor": 2 * layout.tensor}, 2),
    ]
    for applies, section, values, factor in rows:
        if applies:
            changed = config.with_keys(**{section: values})
            key, value = next(iter(values.items()))
            shown = "true" if value is True else value
            ranks = f" on {factor * layout.world} ranks" if factor > 1 else ""
            yield f"{section}.{key}={shown}{ranks}", changed, factor * layout.world
    if optimizer.zero:
        yield f"{2 * layout.world} ranks, which share the optimizer state", config, 2 * layout.world


def too_large_text(needed: float, memory: float, device: str) -> str:
    """The message where the memory estimate of a rank exceeds that of its device."""
    return (
        f"the memory expected on each rank ({units.size(needed)}) must be at most that of {device} "
        f"({units.size(memory)}): raise parallel.tensor or parallel.pipeline, lower train.micro_batch, or set "
        f"train.recompute=full{see('runs#model-does-not-fit')}"
    )
