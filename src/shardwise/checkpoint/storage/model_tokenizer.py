"""The tokenizer of the model that a run starts from, which reads the run's data too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, DataError, StoreError
from shardwise.base.files import cache_root, write_files
from shardwise.base.hub import holds_tokenizer
from shardwise.base.yaml_and_json import json_value
from shardwise.checkpoint.format.model_files import files_beside_weights
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config
from shardwise.data import cache
from shardwise.data.open_data import trains_tokenizer
from shardwise.data.tokens.tokenizer import open_user_tokenizer
from shardwise.data.tokens.tokenizer_files import tokenizer_names


def with_loaded_tokenizer(config: Config, weights: Root | str | None) -> Config:
    """`config` with the tokenizer of the loaded weights as `data.tokenizer`, unless the user names another one.

    Data that are tokens already are checked against it; they need none, so there one that cannot be opened is left out.

    Args:
        weights: the folder of `checkpoint.load`, or a hub id as `data.tokenizer` names it; None if nothing is loaded.

    Raises:
        ConfigError: there is none, and the data are text.
    """
    if weights is None or config.data.tokenizer is not None:
        return config
    named = weights if isinstance(weights, str) else _tokenizer_beside(weights)
    if trains_tokenizer(config):
        if named is None:
            raise ConfigError(
                f"checkpoint.load ({weights}) must hold the model's tokenizer ({tokenizer_names()}), as the data "
                "are text, and it holds none: name the model's own by data.tokenizer"
            )
    elif named is not None:
        try:
            open_user_tokenizer(named, config.model.vocab_size, pairs="nsp" in config.model.objectives)
        except DataError:
            named = None
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": named})})


def other_tokenizer_text(weights: Root, tokenizer: Path | None) -> str | None:
    """A warning where the tokenizer in a folder gives other ids than that beside loaded weights; else None."""
    if tokenizer is None or not weights.is_local or not _differ_in_tokens(weights.local(), tokenizer):
        return None
    return (
        f"data.tokenizer gives other ids than the tokenizer of the loaded weights ({weights}): leave it out to keep "
        "what they learned"
    )


def _tokenizer_beside(weights: Root) -> str | None:
    try:
        if not holds_tokenizer(weights.names()):
            return None
        if weights.is_local:
            return str(weights.local())
        files = files_beside_weights(weights)
    except StoreError as error:
        raise ConfigError(f"checkpoint.load: {error}") from None

    def build(folder: Path) -> dict[str, Any]:
        write_files(folder / "tokenizer", files)
        return {"tokenizer": cache.tokenizer_digest(folder / "tokenizer")}

    key = cache.cache_key({"model": {name: content.hex() for name, content in files.items()}})
    return str(
        cache.open_or_build(cache_root(None), "tokenizers", key, cache.has_sound_tokenizer, build).tokenizer_path
    )


def _differ_in_tokens(folder: Path, other_folder: Path) -> bool:
    """True if two folders hold a `tokenizer.json` each, and one token has another id in the one than in the other."""
    vocabularies = []
    try:
        for path in (folder, other_folder):
            vocabularies.append(_vocabulary(json_value((path / "tokenizer.json").read_text(encoding="utf-8"))))
        return bool(vocabularies[0] != vocabularies[1])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    """Token → id of a `tokenizer.json`: its model has a mapping of them, or a list of (token, score) in their order."""
    vocabulary = tokenizer["model"]["vocab"]
    if not isinstance(vocabulary, dict):
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    # Tokens that were added after the training of the tokenizer stand apart.
    return {**vocabulary, **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
