"""What is refused of a recipe with overrides."""

from collections.abc import Sequence

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import Layout, check_layout, load_config


def layout_of(overrides: Sequence[str], recipe: str = "llama2-tiny", world: int | None = None) -> Layout | None:
    """Of a recipe on so many ranks; None where it is only read."""
    config = load_config(recipe, overrides)
    return None if world is None else check_layout(config, world)


def problems(*overrides: str, **options: str | int) -> list[str]:
    """The sentences that refuse it; `options` as of `layout_of`."""
    with pytest.raises(ConfigError) as caught:
        layout_of(overrides, **options)
    return list(caught.value.problems)


def problem(*overrides: str, **options: str | int) -> str:
    """The one sentence that refuses it."""
    (sentence,) = problems(*overrides, **options)
    return sentence
