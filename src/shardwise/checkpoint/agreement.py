"""Agreement of ranks on problems, and of a folder's model and tokenizer with the recipe's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from shardwise import comm
from shardwise.checkpoint_format.model_file import differences
from shardwise.config import ModelConfig
from shardwise.errors import ConfigError
from shardwise.mesh import Group
from shardwise.parsing import json_value
from shardwise.storage.root import Root

_Item = TypeVar("_Item")


def union(items: Iterable[_Item], group: Group) -> list[_Item]:
    """The items of all ranks of a group, each once, in the same order on every rank.

    Where no rank has one, as in a healthy job, the ranks exchange a flag and no more.
    """
    mine = list(items)
    if not comm.any_rank(bool(mine), group):
        return []
    return list(dict.fromkeys(item for of_rank in comm.all_gather_objects(mine, group) for item in of_rank))


def agree(problems: list[str], group: Group) -> None:
    """Every rank raises, as one ConfigError, the problems of all ranks of the group, or none does."""
    if everyones := union(problems, group):
        raise ConfigError(everyones)


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
