"""A model of the user's own: `model.family=package.module:Class`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.errors import ConfigError


def own_class(family: str) -> Callable[..., nn.Module]:
    """The class that `package.module:Class` names.

    It is called as the families of this package are: `Class(config, group, *, sequence_parallel, recompute, seed,
    device, dtype)`, and its `forward(ids_SB, targets_SB)` returns the sum of the counted targets' losses.

    Raises:
        ConfigError: the module or the class cannot be imported, or is no `torch.nn.Module`.
    """
    module_name, _, class_name = family.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model.family ({family}) must name an importable module: there is no module {error.name}; install its "
            "package, or start in its folder"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"model.family ({family}) must name a class: {error}") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(f"model.family ({family}) must name a torch.nn.Module class")
    return found
