"""The model that a folder's `config.json` describes, and how the recipe's model differs from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.base.errors import ConfigError, see
from shardwise.checkpoint.storage.root import Root
from shardwise.config import FamilyConfig, ModelConfig, model_from, shapes_of
from shardwise.config.hugging_face import parse_hugging_face
from shardwise.config.rope_scaling import effective_scaling

_LONGEST = "max_position_embeddings"
_OF_ROTATION = (_LONGEST, "rope_theta", "rope_scaling", "rotary_pct", "no_rope_layers")
"""Keys that decide how rotary positions turn queries and keys. No weight depends on them."""
_WITHOUT_WEIGHTS = ("activation", "norm_eps")
"""Roles of other keys that no weight depends on."""


@dataclass(frozen=True)
class Differences:
    """How the model of a recipe differs from that of a folder.

    Attributes:
        problems: why the weights of the folder are not those of the recipe's model.
        changes: for the user, each change that the recipe states and that weights allow.
    """

    problems: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


def differences(model: ModelConfig, folder: Root) -> Differences:
    """How `model` differs from the model of `folder`/config.json; in nothing where there is no file.

    Free to differ are dropout, the initial weights' deviation, names of one activation (`gelu_new` and
    `gelu_pytorch_tanh`), and the longest sequence where no angle depends on it. Other keys of rotary positions may
    change where the recipe, or the command line, states them: a default alone, or the file of `model.config`, must not
    change what was learned. The activation and the norms' epsilon may change where the command line states them.

    Raises:
        ConfigError: the file is of another family, of no model that we have, or not readable: names and shapes of the
        weights then say nothing more.
    """
    path = folder / "config.json"
    config = shapes_of(model)
    if config is None or not path.exists():
        return Differences()
    stored = read_model(path, config.ignore)
    if stored.family != config.family:
        raise ConfigError(
            f"model.family ({config.family}) must be that of {path} ({stored.family}){see('checkpoints#other-model')}"
        )
    ours, theirs = _meaning(config), _meaning(stored)
    problems, changes = [], []
    stated = frozenset(config.model_fields_set) - config.origin.from_file if config.rotary_dim else frozenset[str]()
    free = stated.intersection(_OF_ROTATION)
    free |= config.origin.typed.intersection(config.keys[role] for role in _WITHOUT_WEIGHTS)
    for key in (key for key in ours if ours[key] != theirs[key]):
        if key in free:
            changes.append(f"model.{key} ({ours[key]}) replaces that of {path} ({theirs[key]}), with the same weights")
        elif key != _LONGEST or not config.rotary_dim or _turns_by_longest(ours) or _turns_by_longest(theirs):
            problems.append(f"model.{key} ({ours[key]}) must be that of {path} ({theirs[key]})")
    if problems:
        keys = "this key" if len(problems) == 1 else "these keys"
        problems[-1] += f"; model.config={folder} takes the folder's model, without {keys} beside it"
    return Differences(tuple(problems), tuple(changes))


def read_model(path: Root, ignore: Collection[str] = ()) -> FamilyConfig:
    """The model that a `config.json` describes; `ignore`: fields that change nothing, as the user says.

    Raises:
        ConfigError: with every problem: the model is not supported, or the file cannot be read.
    """
    return validated(parse_hugging_face(path.read(), str(path), ignore), str(path))


def validated(section: Mapping[str, Any], where: str) -> FamilyConfig:
    """The model of a `model` section; ConfigError, with every problem, where `where` describes none."""
    try:
        return model_from(section)
    except ConfigError as error:
        reasons = error.problems
    raise ConfigError([f"{where} describes no model that can be built: {reason}" for reason in reasons])


def _meaning(config: FamilyConfig) -> dict[str, Any]:
    """The fields that say what the weights mean."""
    free = {"initializer_range", "ignore", *(key for role, key in config.keys.items() if role.endswith("_dropout"))}
    values = {key: value for key, value in config.model_dump(mode="json").items() if key not in free}
    values[config.keys["activation"]] = config.activation
    if values.get("rope_scaling") is not None:
        values["rope_scaling"] = effective_scaling(values["rope_scaling"], values[_LONGEST])
    return values


def _turns_by_longest(meaning: Mapping[str, Any]) -> bool:
    """Whether the angles, or the factor on them, depend on the model's longest sequence."""
    scaling = meaning["rope_scaling"] or {"rope_type": "default"}
    is_given = "factor" in scaling or "attention_factor" in scaling
    return scaling["rope_type"] == "dynamic" or (scaling["rope_type"] == "longrope" and not is_given)
