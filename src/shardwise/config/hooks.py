"""The section `hooks`: functions and classes of the user's own, in place of a part of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from shardwise.config.base import Section

if TYPE_CHECKING:
    from shardwise.config.sections import Config

_PATH = r"^\w+(\.\w+)*:\w+$"


class HooksConfig(Section):
    """Your own functions and classes, each as package.module:Name (docs/hooks.md)."""

    data: str | None = Field(
        default=None,
        pattern=_PATH,
        description="package.module:Name, called with (config, part), gives the samples of a part instead of data.path",
    )
    loss: str | None = Field(
        default=None,
        pattern=_PATH,
        description="package.module:Name, called with (logits, targets), gives the sum of the targets' losses",
    )
    optimizer: str | None = Field(
        default=None,
        pattern=_PATH,
        description="package.module:Name, an elementwise class of torch.optim's kind, in place of optimizer.name",
    )
    optimizer_options: dict[str, Any] = Field(
        default_factory=dict,
        examples=[{"momentum": 0.9}],
        description="arguments of that class that no key of the section optimizer gives",
    )
    callbacks: tuple[Annotated[str, Field(pattern=_PATH)], ...] = Field(
        default=(),
        strict=False,
        examples=["[package.module:Name]"],
        description="functions, or classes that are made without arguments: on rank 0 each is called with every event "
        "that metrics.jsonl gets; if one returns True the run is asked to stop",
    )

    @property
    def any_named(self) -> bool:
        """Whether there is any hook."""
        return self != HooksConfig()


def hook_problems(config: Config) -> list[str]:
    """Hooks that other keys leave no place for."""
    hooks, model, data = config.hooks, config.model, config.data
    problems = []
    if hooks.data is not None and data.is_named:
        problems.append(
            f"{data.key} ({data.name}) must be left out with hooks.data ({hooks.data}), which reads the samples: set "
            "it to null"
        )
    if hooks.data is not None and data.streaming:
        problems.append(
            f"data.streaming (true) must be false with hooks.data ({hooks.data}), whose samples have numbers"
        )
    is_own = ":" in model.family
    for key, path in (("data", hooks.data), ("loss", hooks.loss)):
        if path is not None and "mlm" in model.objectives:
            problems.append(
                f"hooks.{key} ({path}) must be left out with model.family {model.family}: it is for models that "
                "predict the next token"
            )
    if hooks.loss is not None and is_own:
        problems.append(
            f"hooks.loss ({hooks.loss}) must be left out with model.family {model.family}, whose forward gives the loss"
        )
    if hooks.loss is not None and config.compile.enabled:
        problems.append(f"compile.enabled (true) must be false with hooks.loss ({hooks.loss}), which is not compiled")
    if hooks.optimizer is not None and config.optimizer.name != "adamw":
        problems.append(
            f"optimizer.name ({config.optimizer.name}) must be left out with hooks.optimizer ({hooks.optimizer})"
        )
    if hooks.optimizer is None and hooks.optimizer_options:
        names = ", ".join(hooks.optimizer_options)
        problems.append(f"hooks.optimizer_options ({names}) must be left out without hooks.optimizer")
    return problems
