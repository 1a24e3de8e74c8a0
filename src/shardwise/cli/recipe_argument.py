"""The recipe that a command is given, or a model in place of one."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.cli import output
from shardwise.config import Config, load_config
from shardwise.config.recipe_files import is_model_recipe
from shardwise.launch.environment import is_launched, joined


def load_recipe(recipe: str, overrides: Sequence[str]) -> Config:
    """The configuration; of a model, with a line for the user on what is taken of it and on the defaults.

    A rank opens a hub id from the cache, which the process that launched it has filled.
    """
    launched = is_launched()
    config = load_config(recipe, overrides, cached=launched)
    place = joined()
    if not launched and (place is None or place.rank == 0) and is_model_recipe(recipe):
        from shardwise.config.model_recipes import model_recipe_remark  # costly to import, for a model alone

        output.progress(model_recipe_remark(recipe, config))
    return config
