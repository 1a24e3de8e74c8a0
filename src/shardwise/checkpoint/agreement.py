"""Agreement of ranks on problems, and of a folder's `config.json` and tokenizer with the recipe's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from shardwise import comm
from shardwise.config import FamilyConfig, ModelConfig, OwnConfig, model_from
from shardwise.config.hugging_face import parse_hugging_face
from shardwise.errors import ConfigError, see
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
    """Raise, on every rank of the group, what `config_problems` finds on any."""
    try:
        problems = config_problems(config, folder)
    except ConfigError as error:
        problems = error.problems
    agree(problems, group)


def config_problems(config: ModelConfig, folder: Root) -> list[str]:
    """Every field in which `folder`/config.json describes another model than `config`; none where there is no file.

    Free to differ are dropout, the initial weights' deviation, names of one activation (`gelu_new` and
    `gelu_pytorch_tanh`), and the longest sequence where positions are rotary and not scaled by it.

    Raises:
        ConfigError: the file is of another family, of no model that we have, or not readable: names and shapes of the
        weights then say nothing more.
    """
    path = folder / "config.json"
    if isinstance(config, OwnConfig) or not path.exists():
        return []
    theirs = read_model(path)
    if theirs.family != config.family:
        raise ConfigError(
            f"model.family ({config.family}) must be that of {path} ({theirs.family}){see('checkpoints#other-model')}"
        )
    ours, wanted = _meaning(config), _meaning(theirs)
    differing = [key for key in ours if ours[key] != wanted[key]]
    problems = [f"model.{key} ({ours[key]}) must be that of {path} ({wanted[key]})" for key in differing]
    if problems:
        problems[-1] += f"; model.config={folder} takes the folder's model"
    return problems


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


def read_model(path: Root) -> FamilyConfig:
    """The model that a `config.json` describes.

    Raises:
        ConfigError: with every problem: the model is not supported, or the file cannot be read.
    """
    return validated(parse_hugging_face(path.read(), str(path)), str(path))


def validated(section: Mapping[str, Any], where: str) -> FamilyConfig:
    """The model of a `model` section; ConfigError, with every problem, where `where` describes none."""
    try:
        return model_from(section)
    except ConfigError as error:
        reasons = error.problems
    raise ConfigError([f"{where} describes no model that can be built: {reason}" for reason in reasons])


def _meaning(config: FamilyConfig) -> dict[str, Any]:
    """The fields that say what the weights mean."""
    free = {"initializer_range", *(key for role, key in config.keys.items() if role.endswith("_dropout"))}
    values = {key: value for key, value in config.model_dump(mode="json").items() if key not in free}
    values[config.keys["activation"]] = config.activation
    if values.get("rope_scaling") == {"rope_type": "default"}:
        values["rope_scaling"] = None
    if config.rotary_dim and not config.extends_positions:
        del values["max_position_embeddings"]
    return values
