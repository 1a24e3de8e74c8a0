"""What a run reads, made ready before the first rank needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardwise.config import Config

if TYPE_CHECKING:
    from shardwise.data.opening import Glance

# A byte-level tokenizer that is trained on the data fits into any vocabulary that is no smaller.
_ANY_TOKENIZER = 512


def prepare_inputs(config: Config, announce: Callable[[str], None] | None) -> None:
    """Fetch what configuration keys name by a hub id, and tokenize the data; each once.

    Raises:
        ConfigError: there are no such weights, tokenizer or data, or they cannot be read.
    """
    from shardwise import hub
    from shardwise.checkpoint_format.places import newest_of
    from shardwise.data import fetch_dataset, prepare

    if config.checkpoint.load is not None:
        load = newest_of(config.checkpoint.load, announce)
        if not hub.is_url(load):
            hub.resolve(load, config.checkpoint.revision, announce=announce)
    if config.data.tokenizer is not None:
        hub.resolve_tokenizer(config.data.tokenizer, announce=announce)
    fetch_dataset(config.data, announce)
    prepare(config, announce=announce)


def look_at_inputs(config: Config) -> Glance | None:
    """What a dry run finds of data and tokenizer; None where they are of this package, which has all that they need."""
    data = config.data
    is_own = data.path is not None or data.blend is not None or data.is_hub_dataset or data.tokenizer is not None
    if not is_own and config.model.vocab_size >= _ANY_TOKENIZER:
        return None
    from shardwise.data.opening import glance

    return glance(config)
