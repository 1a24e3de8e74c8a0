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
_ROTARY_KEYS = (_LONGEST, "rope_theta", "rope_scaling", "rotary_pct", "no_rope_layers")
"""Keys that decide how rotary positions turn queries and keys. No weight depends on them."""
_ROLES_WITHOUT_WEIGHTS = ("activation", "norm_eps")
"""Roles of other keys that no weight depends on."""


@dataclass(frozen=True)
class ModelDifferences:
    """Differences of a recipe's model from that of a folder.

    Attributes:
        problems: why the weights of the folder are not those of the recipe's model.
        changes: sentences for the user, on each change that the recipe states and that weights allow.
    """

    problems: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


def differences(model: ModelConfig, folder: Root) -> ModelDifferences:
    """The differences of `model` from the model of `folder`/config.json; none where there is no file.

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
        return ModelDifferences()
    stored = read_model(path, config.ignore)
    if stored.family != config.family:
        raise ConfigError(
            f"model.family ({config.family}) must be that of {path} ({stored.family}){see('checkpoints#other-model')}"
        )
    values = _meaningful_values(config)
    stored_values = _meaningful_values(stored)
    free_keys = _free_keys(config)
    problems: list[str] = []
    changes: list[str] = []
    for key, value in values.items():
        stored_value = stored_values[key]
        if value == stored_value:
            continue
        if key in free_keys:
            changes.append(f"model.{key} ({value}) replaces that of {path} ({stored_value}), with the same weights")
            continue
        # A longer sequence turns no query otherwise, unless the angles are scaled by it.
        has_effect = key != _LONGEST or not config.rotary_dim
        if has_effect or _rotates_by_longest(values) or _rotates_by_longest(stored_values):
            problems.append(f"model.{key} ({value}) must be that of {path} ({stored_value})")
    if problems:
        keys = "this key" if len(problems) == 1 else "these keys"
        problems[-1] += f"; model.config={folder} takes the folder's model, without {keys} beside it"
    return ModelDifferences(tuple(problems), tuple(changes))


def read_model(path: Root, ignore: Collection[str] = ()) -> FamilyConfig:
    """The model that a `config.json` describes; `ignore`: fields that change nothing, as the user says.

    Raises:
        ConfigError: the model is not supported, or the file cannot be read: every problem.
    """
    return validated(parse_hugging_face(path.read(), str(path), ignore), str(path))


def validated(section: Mapping[str, Any], where: str) -> FamilyConfig:
    """The model of a `model` section; ConfigError, with every problem, where `where` describes none."""
    try:
        return model_from(section)
    except ConfigError as error:
        reasons = error.problems
    raise ConfigError([f"{where} describes no model that can be built: {reason}" for reason in reasons])


def _free_keys(config: FamilyConfig) -> frozenset[str]:
    """The keys that may change because the user stated them and no weight depends on them."""
    free: frozenset[str] = frozenset()
    if config.rotary_dim:
        stated = frozenset(config.model_fields_set) - config.origin.from_file
        free = stated.intersection(_ROTARY_KEYS)
    return free | config.origin.typed.intersection(config.keys[role] for role in _ROLES_WITHOUT_WEIGHTS)


def _meaningful_values(config: FamilyConfig) -> dict[str, Any]:
    """The fields that decide what the weights mean, each in one spelling."""
    dropout_keys = {key for role, key in config.keys.items() if role.endswith("_dropout")}
    free = {"initializer_range", "ignore", *dropout_keys}
    values = {key: value for key, value in config.model_dump(mode="json").items() if key not in free}
    values[config.keys["activation"]] = config.activation
    if values.get("rope_scaling") is not None:
        values["rope_scaling"] = effective_scaling(values["rope_scaling"], values[_LONGEST])
    return values


def _rotates_by_longest(values: Mapping[str, Any]) -> bool:
    """True if the angles, or the factor on them, depend on the model's longest sequence."""
    scaling = values["rope_scaling"] or {"rope_type": "default"}
    if scaling["rope_type"] == "dynamic":
        return True
    has_factor = "factor" in scaling or "attention_factor" in scaling
    return scaling["rope_type"] == "longrope" and not has_factor
