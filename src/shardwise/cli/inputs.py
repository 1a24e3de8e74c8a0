"""What a run reads, made ready before the first rank needs it."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.config import Config


def prepare_inputs(config: Config, announce: Callable[[str], None] | None) -> None:
    """Fetch what configuration keys name by a hub id, and tokenize the data; each once.

    Raises:
        ConfigError: there are no such weights, tokenizer or data, or they cannot be read.
    """
    from shardwise import hub
    from shardwise.data import fetch_dataset, prepare
    from shardwise.store.places import newest_of

    if config.checkpoint.load is not None:
        load = newest_of(config.checkpoint.load, announce)
        if not hub.is_url(load):
            hub.resolve(load, config.checkpoint.revision, announce=announce)
    if config.data.tokenizer is not None:
        hub.resolve_tokenizer(config.data.tokenizer, announce=announce)
    fetch_dataset(config.data, announce)
    prepare(config, announce=announce)
