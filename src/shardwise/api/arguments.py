"""What is wrong with arguments that several functions of the API have."""

from __future__ import annotations

import os

from shardwise.config import Config


def config_problems(config: object) -> list[str]:
    if isinstance(config, Config):
        return []
    return [f"config ({config!r}) must be a shardwise.Config, as shardwise.load_recipe(RECIPE) returns it"]


def folder_problems(name: str, path: object, otherwise: str = "") -> list[str]:
    """`otherwise`: what to give in place of an empty path."""
    if isinstance(path, str | os.PathLike) and os.fspath(path):
        return []
    return [f"{name} ({path!r}) must be a folder's path{otherwise}"]
