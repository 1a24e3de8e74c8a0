"""The section `hooks`: functions and classes of the user's own, in place of a part of a training."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from shardwise.config.base import Section


class HooksConfig(Section):
    """Your own functions and classes, each as package.module:Name (docs/hooks.md)."""

    data: str | None = Field(
        default=None,
        description="package.module:Name of a function or class; called with (config, part), it returns the samples "
        "of that part, in place of data.path",
    )
    loss: str | None = Field(
        default=None,
        description="package.module:Name of a function; called with (logits, targets), it returns the sum of the "
        "targets' losses",
    )
    optimizer: str | None = Field(
        default=None,
        description="package.module:Name of an optimizer class that updates each element by itself, in place of "
        "optimizer.name",
    )
    optimizer_options: dict[str, Any] = Field(
        default_factory=dict,
        examples=[{"momentum": 0.9}],
        description="further arguments of that class, beside those that keys of the section optimizer give",
    )
    callbacks: tuple[str, ...] = Field(
        default=(),
        strict=False,
        examples=["[package.module:Name]"],
        description="package.module:Name of functions, or of classes that are made without arguments; on rank 0 each "
        "is called with every event that metrics.jsonl gets; if one returns True, the run is asked to stop",
    )

    @property
    def paths(self) -> dict[str, str]:
        """Every path that is given, with its key."""
        single = {"data": self.data, "loss": self.loss, "optimizer": self.optimizer}
        listed = {f"callbacks.{number}": path for number, path in enumerate(self.callbacks)}
        return {f"hooks.{key}": path for key, path in {**single, **listed}.items() if path is not None}

    @property
    def any_named(self) -> bool:
        """Whether there is any hook."""
        return bool(self.paths)
