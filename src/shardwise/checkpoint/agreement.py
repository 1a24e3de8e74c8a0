"""Agreement of the model and the tokenizer of a folder with those of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.base.parsing import json_value
from shardwise.checkpoint.format.model_file import differences
from shardwise.checkpoint.storage.root import Root
from shardwise.config import ModelConfig
from shardwise.distributed.agreement import agree
from shardwise.distributed.mesh import Group


def require_model(config: ModelConfig, folder: Root, group: Group) -> None:
    """Raise, on every rank of the group, why the weights of a folder are not the model's, where any rank finds it."""
    try:
        problems = list(differences(config, folder).problems)
    except ConfigError as error:
        problems = error.problems
    agree(problems, group)


def differ_in_tokens(folder: Path, other: Path) -> bool:
    """Whether two folders hold a `tokenizer.json` each, and one token has another id in the one than in the other."""
    try:
        tokens, others = (json_value((f / "tokenizer.json").read_text(encoding="utf-8")) for f in (folder, other))
        same: bool = _vocabulary(tokens) == _vocabulary(others)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return not same


def _vocabulary(tokenizer: Any) -> Any:
    held = tokenizer["model"]["vocab"]
    ids = held if isinstance(held, dict) else {piece: number for number, (piece, _) in enumerate(held)}
    return {**ids, **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
