"""Rules of the section `hooks`, the user's own functions and classes."""

from __future__ import annotations

import re

from shardwise.config.data import PYTHON_NAME
from shardwise.config.optimizers import DEFAULT_OPTIMIZER
from shardwise.config.run_config import Config


def hook_problems(config: Config) -> list[str]:
    """Refuse hooks that other keys leave no place for."""
    hooks = config.hooks
    model = config.model
    data = config.data
    problems = [
        f"{key} ({path!r}) must read package.module:Name"
        for key, path in hooks.paths.items()
        if not re.fullmatch(PYTHON_NAME, path)
    ]
    if hooks.data is not None and data.is_named:
        problems.append(
            f"{data.key} ({data.name}) must be left out with hooks.data ({hooks.data}), which reads the samples: set "
            "it to null"
        )
    if hooks.data is not None and data.streaming:
        problems.append(
            f"data.streaming (true) must be false with hooks.data ({hooks.data}), whose samples have numbers"
        )
    for key, path in (("data", hooks.data), ("loss", hooks.loss)):
        if path is not None and "mlm" in model.objectives:
            problems.append(
                f"hooks.{key} ({path}) must be left out with model.family {model.family}: it is for models that "
                "predict the next token"
            )
    if hooks.loss is not None and ":" in model.family:  # the user's own
        problems.append(
            f"hooks.loss ({hooks.loss}) must be left out with model.family {model.family}, whose forward gives the loss"
        )
    if hooks.loss is not None and config.compile.enabled:
        problems.append(f"compile.enabled (true) must be false with hooks.loss ({hooks.loss}), which is not compiled")
    if hooks.optimizer is not None and config.optimizer.name != DEFAULT_OPTIMIZER:
        problems.append(
            f"optimizer.name ({config.optimizer.name}) must be left out with hooks.optimizer ({hooks.optimizer})"
        )
    if hooks.optimizer is None and hooks.optimizer_options:
        names = ", ".join(hooks.optimizer_options)
        problems.append(f"hooks.optimizer_options ({names}) must be left out without hooks.optimizer")
    return problems
