"""Configurations from Python."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.config import Config, load_config_with_values


def load_recipe(recipe: str | os.PathLike[str] | Mapping[str, Any] | Config, /, **overrides: Any) -> Config:
    """The checked configuration of a recipe, with keys replaced.

        load_recipe("llama2-tiny", train={"steps": 100}, parallel={"tensor": 2})
        load_recipe("my.yaml", **{"train.steps": 100, "data.path": Path("corpus.jsonl")})

    Both spellings of a key mean the same, and the same as `train.steps=100` on the command line; give each key once. A
    section replaces only the keys that it names; `model={"config": PATH}` replaces the whole model by that of a Hugging
    Face `config.json`. Paths, tuples and numbers of numpy are taken as the text, lists and numbers that YAML has.

    Args:
        recipe: a shipped recipe's name (`shardwise recipes` lists them), a YAML file, a model (a hub id, its folder
            or its `config.json`, see docs/recipes.md), a mapping of sections, or a configuration, of which a changed
            copy is returned.
        overrides: sections with keys, or dotted keys. docs/configuration.md has all of them.

    Returns:
        a frozen `shardwise.Config`: `config.train.steps`; `config.model_dump()` gives plain values.

    Raises:
        ConfigError: there is no such recipe, or a key or value is wrong; every problem at once, with dotted keys.
    """
    if isinstance(recipe, Config):
        recipe = recipe.model_dump(mode="json", exclude_unset=True)
    if not isinstance(recipe, Mapping | str | os.PathLike):
        raise ConfigError(f"recipe ({recipe!r}) must be a recipe's name, a YAML file or a mapping of sections")
    return load_config_with_values(recipe if isinstance(recipe, Mapping) else str(os.fspath(recipe)), overrides)
