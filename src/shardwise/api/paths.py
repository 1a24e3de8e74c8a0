"""Paths and URLs that a call is given."""

from __future__ import annotations

import os

from shardwise.errors import ConfigError


def require_path(name: str, value: object) -> str:
    """The path or URL that an argument names.

    Raises:
        ConfigError: it is neither.
    """
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise ConfigError(f"{name} ({shown_value(value)}) must be a path or a URL")
    return path


def shown_value(value: object) -> str:
    """An argument for a message: of an object that is no simple value, only its class."""
    return repr(value) if value is None or isinstance(value, str | bytes | int | float) else type(value).__name__
