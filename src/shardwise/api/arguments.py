"""Arguments that several functions of the API have: what is wrong with one, in a sentence."""

from __future__ import annotations

import os

from shardwise.base.errors import ConfigError
from shardwise.config import Config


def shown_value(value: object) -> str:
    """An argument for a message: of an object that is no simple value, only its class."""
    return repr(value) if value is None or isinstance(value, str | bytes | int | float) else type(value).__name__


def config_problems(config: object, otherwise: str = "") -> list[str]:
    """Why an argument is no configuration; `otherwise`: what may be given in place of one."""
    if isinstance(config, Config):
        return []
    wanted = f"a shardwise.Config, as shardwise.load_recipe(RECIPE) returns it{otherwise}"
    return [f"config ({shown_value(config)}) must be {wanted}"]


def path_problems(name: str, value: object, wanted: str = "a path or a URL") -> list[str]:
    """Why an argument is no path; `wanted`: what it must be."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if isinstance(path, str) and path.strip() and "\0" not in path:
        return []
    return [f"{name} ({shown_value(value)}) must be {wanted}"]


def require_path(name: str, value: str | os.PathLike[str]) -> str:
    """The path or URL that an argument names.

    Raises:
        ConfigError: it is neither.
    """
    if problems := path_problems(name, value):
        raise ConfigError(problems)
    return os.fspath(value)
