"""The section `compile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from shardwise.config.base import Section


class CompileConfig(Section):
    """What of a training is compiled, by what, and where the results are kept."""

    enabled: bool = Field(
        default=False,
        description="compile each block and the loss of the output head; other parts, and generation, are not compiled",
    )
    backend: str | None = Field(
        default=None,
        examples=["inductor"],
        description="one of torch.compile's backends; null = that of the device: neuron on Trainium, else inductor",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        examples=[{"max_autotune": True}],
        description="options of the backend, as torch.compile takes them",
    )
    cache_dir: Path | None = Field(
        default=None,
        strict=False,
        description="the folder of compiled graphs, which runs and `shardwise compile` share; null = the folder "
        "`compile` in $SHARDWISE_CACHE or ~/.cache/shardwise",
    )
    cache_gib: float = Field(
        default=20.0,
        gt=0,
        description="largest size of that folder in GiB; above it, the graphs that were used longest ago are removed",
    )
    require_cached: bool = Field(
        default=False, description="refuse to train, before the first step, if a graph is not in that folder"
    )
