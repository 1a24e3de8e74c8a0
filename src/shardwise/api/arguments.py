"""Checks of arguments that several functions of the API have; each problem is a sentence."""

from __future__ import annotations

import os

from shardwise.base.errors import ConfigError
from shardwise.config import Config


def shown_value(value: object) -> str:
    """An argument for a message: a simple value as it is, of any other object only its class."""
    is_simple = value is None or isinstance(value, str | bytes | int | float)
    return repr(value) if is_simple else type(value).__name__


def config_problems(config: object) -> list[str]:
    """The reason why an argument is no configuration."""
    if isinstance(config, Config):
        return []
    return [f"config ({shown_value(config)}) must be a shardwise.Config, as shardwise.load_recipe(RECIPE) returns it"]


def require_path(name: str, value: object, requirement: str = "a path or a URL") -> str:
    """The path or URL that an argument of the Python API names; ConfigError: it is not what `requirement` says."""
    path: object = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if isinstance(path, str) and path.strip() and "\0" not in path:
        return path
    raise ConfigError(f"{name} ({shown_value(value)}) must be {requirement}")
