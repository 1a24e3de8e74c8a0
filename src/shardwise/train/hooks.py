"""Loss, optimizer and callbacks of the user (`hooks.*`): the checks of each, and its calls from a run.

The samples of `hooks.data` are read in `data/formats/user_samples.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.base.errors import RAISED, ConfigError, RunError, error_text, listing
from shardwise.config import OptimizerConfig
from shardwise.config.sections import HooksConfig
from shardwise.distributed import devices
from shardwise.launch import stop_requests
from shardwise.optim.wrapped_class import require_elementwise
from shardwise.runs.folder import JsonLines

Callback = Callable[[dict[str, Any]], object]
_FROM_SECTION = ("lr", "betas", "eps", "weight_decay")
"""Arguments that the section `optimizer` gives to a class that names them."""


def check_hooks(hooks: HooksConfig, optimizer: OptimizerConfig) -> None:
    """Import all hooks and check how they can be called, before ranks start; ConfigError with every problem."""
    problems: list[str] = []
    for check in (
        lambda: hooks.data is None or _load_reader(hooks.data),
        lambda: hooks.loss is None or _load_loss(hooks.loss),
        lambda: hooks.optimizer is None or user_optimizer(hooks, optimizer),
        lambda: _callbacks(hooks.callbacks),
    ):
        try:
            check()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def _load_reader(path: str) -> object:
    from shardwise.data.formats.user_samples import load_user_samples

    return load_user_samples(path)


# ---- the loss


def user_loss(path: str | None) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The function of `hooks.loss`, by which an output head computes the loss; its result is checked."""
    if path is None:
        return None
    function = _load_loss(path)

    def loss(logits_SBV: Tensor, targets_SB: Tensor) -> Tensor:
        try:
            # The function may change its targets in place, and the model still counts them.
            value = function(logits_SBV, targets_SB.clone())
        except RAISED as error:
            if devices.is_out_of_memory(error):
                raise
            raise ConfigError(f"hooks.loss ({path}) failed: {error_text(error)}") from error
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            shown = type(value).__name__
            if isinstance(value, Tensor):
                shown = f"{value.dtype} of shape {tuple(value.shape)}"
            raise ConfigError(
                f"hooks.loss ({path}) must return the sum of its targets' losses, one number, not {shown}"
            )
        if logits_SBV.requires_grad and not value.requires_grad:
            raise ConfigError(
                f"hooks.loss ({path}) must return a loss with a gradient, and this one has none: leave out detach(), "
                "item() and torch.no_grad()"
            )
        return value

    return loss


def _load_loss(path: str) -> Any:
    from shardwise.base.user_code import accepts, load_user_object

    return load_user_object(
        "hooks.loss",
        path,
        lambda value: callable(value) and not isinstance(value, type) and accepts(value, None, None),
        "a function that takes (logits_SBV, targets_SB)",
    )


# ---- the optimizer


def user_optimizer(hooks: HooksConfig, section: OptimizerConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class that `hooks.optimizer` names, and its arguments after the parameters; ConfigError if it is unfit."""
    from shardwise.base.user_code import load_user_object

    path = hooks.optimizer
    assert path is not None
    optimizer_class: type[torch.optim.Optimizer] = load_user_object(
        "hooks.optimizer",
        path,
        lambda value: isinstance(value, type) and issubclass(value, torch.optim.Optimizer),
        "a class derived from torch.optim.Optimizer",
    )
    parameters = signature(optimizer_class).parameters
    # The first parameter of the class takes the model's parameters.
    names = [name for name, parameter in parameters.items() if parameter.kind is not Parameter.VAR_KEYWORD][1:]
    takes_any = len(names) + 1 < len(parameters)
    problems = []
    for key in _FROM_SECTION:
        if key in hooks.optimizer_options:
            problems.append(f"hooks.optimizer_options.{key}: set optimizer.{key}, which gives it")
    for key in hooks.optimizer_options:
        if key not in names and key not in _FROM_SECTION and not takes_any:
            problems.append(f"hooks.optimizer_options.{key}: {path} takes {listing(names) or 'none'}")
    if section.weight_decay and "weight_decay" not in names:
        problems.append(
            f"optimizer.weight_decay ({section.weight_decay}) must be 0 with hooks.optimizer ({path}), which takes none"
        )
    if problems:
        raise ConfigError(problems)
    options = {name: getattr(section, name) for name in _FROM_SECTION if name in names} | dict(hooks.optimizer_options)
    # Buckets hold parts of parameters: a class that needs a whole parameter would compute something else.
    try:
        lost = require_elementwise(optimizer_class, options)
    except RAISED as error:
        raise ConfigError(f"hooks.optimizer ({path}): {error_text(error)}") from error
    if lost:
        raise ConfigError(
            f"hooks.optimizer ({path}) must keep tensors of the parameters' shapes, and numbers: a checkpoint holds no "
            f"other state, and {listing(lost)} would be lost when the run resumes"
        )
    return optimizer_class, options


# ---- callbacks


class MetricsWithCallbacks(JsonLines):
    """The file metrics.jsonl on rank 0, of which the callbacks get every event too.

    A callback that returns True, of Python or numpy, asks the run to stop, as `shardwise stop` does.
    """

    def __init__(self, path: Path, callbacks: Sequence[str]) -> None:
        # Callbacks first: no file is left open, or in the folder, where one of them cannot be made.
        self._callbacks = [(name, _made(name, callback)) for name, callback in _callbacks(callbacks)]
        super().__init__(path)
        self._run = path.parent

    def write(self, record: Mapping[str, Any]) -> None:
        super().write(record)
        for path, callback in self._callbacks:
            try:
                stop = callback(dict(record))
            except RAISED as error:
                # The run still records its failure, and that must not fail again.
                self._callbacks = []
                raise RunError(f"hooks.callbacks ({path}) failed: {error_text(error)}") from error
            # Functions written for another purpose return any value, such as a count: only True stops.
            if isinstance(stop, bool | np.bool_) and stop:
                stop_requests.request(self._run, f"hooks.callbacks ({path})")


def _callbacks(paths: Sequence[str]) -> Sequence[tuple[str, Any]]:
    if not paths:
        return []
    from shardwise.base.user_code import accepts, load_user_object

    def is_callback(value: object) -> bool:
        if not isinstance(value, type):
            return callable(value) and accepts(value, None)
        # Not getattr: the attribute __call__ of a class without one is that of its metaclass, which makes objects.
        call = next((vars(base)["__call__"] for base in value.__mro__ if "__call__" in vars(base)), None)
        return call is not None and accepts(value) and accepts(call, None, None)

    expected = "a function that takes (event), or a class without arguments whose objects do"
    return [(path, load_user_object("hooks.callbacks", path, is_callback, expected)) for path in paths]


def _made(path: str, callback: Any) -> Callback:
    try:
        made: Callback = callback() if isinstance(callback, type) else callback
    except RAISED as error:
        raise ConfigError(f"hooks.callbacks ({path}) cannot be made: {error_text(error)}") from error
    return made
