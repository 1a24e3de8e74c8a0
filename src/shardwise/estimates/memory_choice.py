"""Chooses what the backward pass computes or gathers again, and how keys come, so that a step fits a device's memory.

`train.recompute=auto`, `parallel.sequence_regather=null` and `parallel.context_keys=null` leave this to the memory that
a rank has. The choices are tried in the order of what they cost, each by the planner's estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from shardwise.base.errors import ConfigError
from shardwise.config import Config, Layout, Recompute
from shardwise.estimates.memory import MemoryEstimate, expected_memory, leaves_to_memory, settings_left_to_memory


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
