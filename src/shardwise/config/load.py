"""Reads a recipe and `key=value` overrides into a `Config`, or reports all of their problems."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from shardwise.base.errors import ConfigError, Problems, listing
from shardwise.base.files import user_path
from shardwise.base.yaml_and_json import parse_value, parse_yaml
from shardwise.config import hugging_face, recipe_files
from shardwise.config.base_section import Origin, Section
from shardwise.config.data import DataConfig
from shardwise.config.families import FamilyConfig
from shardwise.config.model import FAMILIES
from shardwise.config.rope_scaling import LENGTH
from shardwise.config.run_config import Config, with_steps

_SectionT = TypeVar("_SectionT", bound=Section)
_MODEL_FILE = "model.config"


def load_config(recipe: str, overrides: Sequence[str] = (), *, cached: bool = False) -> Config:
    """The configuration of a shipped recipe's name, a YAML file or a model, with `a.b=value` overrides applied.

    `model.config=PATH` among the overrides replaces the recipe's whole model; other `model.*` overrides change that.

    Args:
        recipe: as in `recipe_text`.
        cached: open a model of the hub from the cache, without a request.

    Raises:
        ConfigError: something is wrong; it has all problems of the file and of the overrides.
    """
    values = _sections(recipe, cached=cached)
    typed = [override.partition("=")[0].strip() for override in overrides]
    if _MODEL_FILE in typed:
        values["model"] = {}
    problems = apply_overrides(values, overrides)
    _fit_training(recipe, values, typed)
    return config_from_sections(values, problems, typed=typed)


def load_config_with_values(recipe: str | Mapping[str, Any], overrides: Mapping[str, Any]) -> Config:
    """Load the configuration of a recipe with overrides that are values of Python, by dotted keys or by sections.

    Raises:
        ConfigError: as `load_config`.
    """
    values = _sections(recipe) if isinstance(recipe, str) else _plain(recipe)
    problems = Problems()
    changed: dict[str, Any] = {}
    for name, value in overrides.items():
        is_section = name and "." not in name and isinstance(value, Mapping)
        given = {f"{name}.{key}": inner for key, inner in value.items()} if is_section else {name: value}
        for path, inner in given.items():
            if not all(path.split(".")):
                problems.append(f"the key {path!r} must name a section and its key, such as train.steps")
            elif path in changed:
                problems.append(f"{path} must be given once, in its section or as a dotted key")
            else:
                changed[path] = inner
    if _MODEL_FILE in changed:
        values["model"] = {}
    for path, value in changed.items():
        with problems:
            _set(values, path, _plain(value))
    if isinstance(recipe, str):
        _fit_training(recipe, values, changed)
    return config_from_sections(values, problems, typed=[*changed])


def _sections(recipe: str, *, cached: bool = False) -> dict[str, Any]:
    values = parse_yaml(recipe_files.recipe_text(recipe, cached=cached), recipe)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"the recipe {recipe} must be a mapping of sections: {listing(Config.model_fields)}")
    return values


def _fit_training(recipe: str, values: dict[str, Any], typed: Collection[str]) -> None:
    """Let the warmup of a model in place of a recipe follow the steps, and its last rate the peak."""
    train, optimizer = values.get("train"), values.get("optimizer")
    if recipe_files.is_model_recipe(recipe) and isinstance(train, dict) and isinstance(optimizer, dict):
        from shardwise.config.model_recipes import default_warmup  # costly to import, for a model alone

        if "optimizer.warmup_steps" not in typed:
            optimizer["warmup_steps"] = default_warmup(train.get("steps"))
        if "optimizer.min_lr" not in typed and isinstance(optimizer.get("lr"), float):
            optimizer["min_lr"] = float(f"{optimizer['lr'] / 10:.1e}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    is_number = getattr(value, "ndim", None) == 0 and hasattr(value, "item")  # numpy's, or a tensor of one
    return value.item() if is_number else value


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Write `a.b=value` overrides into the nested `values`; returns what is wrong with them."""
    problems = Problems()
    for override in overrides:
        with problems:
            _apply(values, override)
    return problems


def config_from_sections(
    values: Mapping[str, Any], problems: Sequence[str] = (), *, typed: Collection[str] = ()
) -> Config:
    """The configuration that a nested mapping describes.

    `model.config`, a Hugging Face `config.json` or its folder, stands for that model; keys beside it change it.

    Args:
        problems: problems that are known already.
        typed: the paths, such as `model.rope_theta`, that stand on the command line and not in a recipe.

    Raises:
        ConfigError: something is wrong; it has the given `problems` and every problem of `values`.
    """
    all_problems = list(problems)
    config = None
    model = values.get("model")
    model_is_unread = False
    file = None
    from_file = frozenset[str]()
    # A class of the user's may have a key `config` of its own.
    if isinstance(model, dict) and "config" in model and ":" not in str(model.get("family")):
        file = str(model["config"])
        written = frozenset(model)
        loads = isinstance(values.get("checkpoint"), dict) and values["checkpoint"].get("load") is not None
        model, file_problems = _expanded(model, typed, loads=loads)
        if model is not None:
            from_file = frozenset(model).difference(_canonical(model["family"], key) for key in written)
        all_problems += file_problems
        model_is_unread = model is None
    family = str(model.get("family")) if isinstance(model, dict) else ""
    values, token_counts = with_steps(values)
    # The other sections are read even if the model's file was not, so that one message has the problems of all.
    try:
        config = Config.model_validate({**values, "model": model} if "model" in values else dict(values))
    except ValidationError as error:
        # Costly to import, for a configuration that is refused alone.
        from shardwise.config.pydantic_errors import error_messages

        for details in error.errors(include_url=False):
            if details["loc"][0] != "model" or not model_is_unread:
                all_problems += error_messages(details, family)
    if all_problems or config is None:
        # pydantic has an error for each type of a union, and these may read the same: each is told once.
        raise ConfigError(all_problems)
    config.came_from_tokens(token_counts)
    if not config.model.is_own:
        names = [path.split(".")[1] for path in typed if path.startswith("model.")]
        config.model.came_from(Origin(file, from_file, frozenset(_canonical(family, name) for name in names)))
    return config


def checked_data_section(values: Mapping[str, Any]) -> DataConfig:
    """A `data` section by itself; ConfigError with every problem of `values`."""
    return _checked(DataConfig, values, "data")


def checked_model_section(values: Mapping[str, Any], where: str) -> FamilyConfig:
    """A `model` section by itself, of one of the families here; ConfigError, with every problem, names its place."""
    family = str(values["family"])
    try:
        return _checked(FAMILIES[family], values, "model", family)
    except ConfigError as error:
        reasons = error.problems
    raise ConfigError([f"{where} describes no model that can be built: {reason}" for reason in reasons])


def _checked(record: type[_SectionT], values: Mapping[str, Any], *names: str) -> _SectionT:
    try:
        return record.model_validate(dict(values))
    except ValidationError as error:
        from shardwise.config.pydantic_errors import refusal

        raise refusal(error, *names) from None


def _apply(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not all(path.strip().split(".")):
        raise ConfigError(f"the override {override!r} must read key=value, such as train.steps=100")
    try:
        override.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the override {override!r} must be UTF-8: rename what it names") from None
    _set(values, path, parse_value(text, f"the override {override!r}"))


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    keys = path.strip().split(".")
    target = values
    for key in keys[:-1]:
        inner = target.get(key)
        if inner is None:
            inner = target[key] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{path}: unknown key; {key} is one value and has no keys of its own")
        target = inner
    if keys[:-1] == ["model"]:
        _drop_spellings(target, keys[-1])
    if keys == ["train", "global_batch"]:
        target.pop("batch_rule", None)  # it gave the number that is replaced
    target[keys[-1]] = value


def _drop_spellings(model: dict[str, Any], key: str) -> None:
    """Remove the recipe's value of what the command line gives as `key`, if the recipe spells the key otherwise."""
    family = FAMILIES.get(str(model.get("family")))
    aliases = family.aliases if family is not None else {}
    for known in list(model):
        if known != key and aliases.get(known, known) == aliases.get(key, key):
            del model[known]


def _expanded(model: dict[str, Any], typed: Collection[str], *, loads: bool) -> tuple[dict[str, Any] | None, list[str]]:
    """A `model` section with the keys of the Hugging Face file that its `config` names, and the problems of both.

    Where weights are loaded, they were trained for the file's length, so that is the length before a new scaling.
    The section is None if the file cannot be read. Fields that are not supported have their defaults in it.
    """
    changed = {key: value for key, value in model.items() if key != "config"}
    path = model["config"]
    if not isinstance(path, str) or not path:
        return None, [f"{_MODEL_FILE} ({path!r}) must be the path of a Hugging Face config.json or of its folder"]
    problems: list[str] = []
    try:
        section = hugging_face.read_hugging_face(user_path(path), ignored_fields(model))
    except ConfigError as error:
        problems = [f"{_MODEL_FILE}: {problem}" for problem in error.problems]
        if not isinstance(error, hugging_face.UnsupportedError):
            return None, problems
        # The rest of the file is checked too, so that the message has all problems.
        section = error.section
    family = section["family"]
    if changed.get("family", family) != family:
        problems.append(f"model.family ({changed['family']!r}) must be left out or {family}, as {_MODEL_FILE} says")
        return None, problems
    changed = {_canonical(family, key): value for key, value in changed.items()}
    scaling = changed.get("rope_scaling")
    if isinstance(scaling, dict):
        stored = section.get("rope_scaling") or {}
        # A recipe's mapping replaces the file's; dotted keys of the command line change it.
        if "model.rope_scaling" not in typed and any(path.startswith("model.rope_scaling.") for path in typed):
            scaling = {**stored, **scaling}
        is_yarn = "yarn" in (scaling.get("rope_type"), scaling.get("type"))
        if loads and is_yarn and scaling.get(LENGTH) is None:
            scaling = {**scaling, LENGTH: stored.get(LENGTH, section["max_position_embeddings"])}
        changed["rope_scaling"] = scaling
    return section | changed, problems


def _canonical(family: str, key: str) -> str:
    return FAMILIES[family].aliases.get(key, key)


def ignored_fields(model: Mapping[str, Any]) -> list[str]:
    """The names in `model.ignore` of an unchecked section."""
    names = model.get("ignore")
    if not isinstance(names, list | tuple):
        return []
    return [name for name in names if isinstance(name, str)]
