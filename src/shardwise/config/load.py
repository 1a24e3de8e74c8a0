"""From a recipe and `key=value` overrides to a `Config`, or to every reason why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from shardwise.config.base import PROBLEMS
from shardwise.config.data import DataConfig
from shardwise.config.hugging_face import UnsupportedError, read_hugging_face
from shardwise.config.model import FAMILIES
from shardwise.config.root import Config
from shardwise.config.text import parse_value, parse_yaml
from shardwise.errors import ConfigError, listing, nearest_name

_RECIPES = Path(__file__).parent.parent / "recipes"
_SUFFIXES = (".yaml", ".yml")
_MODEL_FILE = "model.config"


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in _RECIPES.glob("*.yaml"))


def recipe_text(recipe: str) -> str:
    """The YAML of a shipped recipe's name or of a file.

    Raises:
        ConfigError: for an unknown recipe (nearest named) and an unreadable file.
    """
    is_file = recipe.endswith(_SUFFIXES) or "/" in recipe
    if not is_file and recipe not in recipe_names():
        near = nearest_name(recipe, recipe_names(), cutoff=0.4)
        hint = f"did you mean {near}? " if near else ""
        raise ConfigError(
            f"unknown recipe {recipe!r}: {hint}shipped recipes are {listing(recipe_names())}; "
            "a path to your own ends with .yaml"
        )
    path = Path(recipe).expanduser() if is_file else _RECIPES / f"{recipe}.yaml"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe file {recipe}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe file {recipe} cannot be read: {error}") from None


def recipe_name(recipe: str) -> str:
    """The short name of a recipe, which names its runs: `my/llama.yaml` is `llama`."""
    return Path(recipe).stem if recipe.endswith(_SUFFIXES) else Path(recipe).name


def load_config(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a shipped recipe's name or a YAML file, with `a.b=value` overrides applied.

    `model.config=PATH` among the overrides replaces the recipe's whole model; other `model.*` overrides change that.

    Raises:
        ConfigError: with all problems of the file and the overrides together.
    """
    values = parse_yaml(recipe_text(recipe), recipe)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"the recipe {recipe} must be a mapping of sections: {listing(Config.model_fields)}")
    if any(override.partition("=")[0].strip() == _MODEL_FILE for override in overrides):
        values["model"] = {}
    return config_from(values, apply_overrides(values, overrides))


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Write `a.b=value` overrides into nested `values`; returns what is wrong with them."""
    problems: list[str] = []
    for override in overrides:
        try:
            _apply(values, override)
        except ConfigError as error:
            problems += error.problems
    return problems


def config_from(values: Mapping[str, Any], problems: Sequence[str] = ()) -> Config:
    """The configuration that a nested mapping describes.

    `model.config`, a Hugging Face `config.json` or its folder, stands for that model; keys beside it change it.

    Raises:
        ConfigError: with `problems`, found before, and every problem of `values`.
    """
    found = list(problems)
    config, model_unread = None, False
    model = values.get("model")
    if isinstance(model, dict) and "config" in model and ":" not in str(model.get("family")):
        model, of_file = _expanded(model)
        found += of_file
        model_unread = model is None
    try:
        config = Config.model_validate({**values, "model": model} if "model" in values else dict(values))
    except ValidationError as error:
        for details in error.errors(include_url=False):
            if not model_unread or details["loc"][0] != "model":
                found += _texts(details)
    if found or config is None:
        raise ConfigError(list(dict.fromkeys(found)))
    return config


def data_from(values: Mapping[str, Any]) -> DataConfig:
    """A `data` section by itself.

    Raises:
        ConfigError: with every problem of `values`.
    """
    try:
        return DataConfig.model_validate(dict(values))
    except ValidationError as error:
        found = [
            text
            for details in error.errors(include_url=False)
            for text in _texts({**details, "loc": ("data", *details["loc"])})
        ]
        raise ConfigError(list(dict.fromkeys(found))) from None


def _apply(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"the override {override!r} must read key=value, such as train.steps=100")
    value = parse_value(text, f"the override {override!r}")
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
    target[keys[-1]] = value


def _drop_spellings(model: dict[str, Any], key: str) -> None:
    """Forget what the recipe says under another name of what the command line gives as `key`."""
    family = FAMILIES.get(str(model.get("family")))
    aliases = family.aliases if family is not None else {}
    for known in list(model):
        if known != key and aliases.get(known, known) == aliases.get(key, key):
            del model[known]


def _expanded(model: dict[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """The section with `config` replaced by the model that this Hugging Face file describes, and what is wrong with it.

    No section where the file cannot be read; where single fields of it cannot, these have their defaults.
    """
    beside = {key: value for key, value in model.items() if key != "config"}
    path = model["config"]
    if not isinstance(path, str) or not path:
        return None, [f"{_MODEL_FILE} ({path!r}) must be the path of a Hugging Face config.json or of its folder"]
    problems: list[str] = []
    try:
        section = read_hugging_face(Path(path).expanduser())
    except ConfigError as error:
        problems = [f"{_MODEL_FILE}: {problem}" for problem in error.problems]
        if not isinstance(error, UnsupportedError):
            return None, problems
        section = error.section
    family = section["family"]
    if beside.get("family", family) != family:
        problems.append(f"model.family ({beside['family']!r}) must be left out or {family}, as {_MODEL_FILE} says")
        return None, problems
    aliases = FAMILIES[family].aliases
    return section | {aliases.get(key, key): value for key, value in beside.items()}, problems


def _texts(details: Any) -> list[str]:
    kind, context = details["type"], details.get("ctx", {})
    tag, location = _untagged(details["loc"])
    path = ".".join(str(part) for part in location)
    value, field = details["input"], _known_paths(tag).get(path)
    if kind == PROBLEMS:
        return list(context["problems"])
    if kind == "default_factory_not_called":
        return []
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return [_family_problem(value)]
    if kind == "missing" and isinstance(location[-1], int):
        whole = path.rpartition(".")[0]
        return [f"{whole} {_list_rule(_known_paths(tag)[whole])}"]
    if kind == "missing":
        return [f"{path} is missing" + (f" ({field.description})" if field and field.description else "")]
    if kind == "extra_forbidden":
        return [_unknown(path, tag)]
    rule = _list_rule(field) if field is not None and kind in _NO_LIST else _rule(kind, context, value)
    shown = f" ({value!r})" if not isinstance(value, (dict, list)) else ""
    return [f"{path}{shown} {rule or 'is not valid: ' + details['msg']}"]


def _untagged(location: tuple[str | int, ...]) -> tuple[str | None, tuple[str | int, ...]]:
    """The family that pydantic reports between `model` and the key, and the path without it."""
    if location[:1] == ("model",) and len(location) > 1:
        return str(location[1]), (location[0], *location[2:])
    return None, location


def _family_problem(model: Any) -> str:
    """Why no class reads this `model` section."""
    if not isinstance(model, dict):
        return f"model ({model!r}) must be a mapping of keys"
    valid = f"{listing(FAMILIES, 'or')}, or package.module:Class for your own"
    if model.get("family") is None:
        return f"model.family is missing (the architecture: {valid})"
    return f"model.family ({model['family']!r}) must be {valid}"


def _rule(kind: str, context: Mapping[str, Any], value: Any) -> str | None:
    """How a pydantic error type reads after `quantity (value)`."""
    fixed = {
        "float_type": "must be a number",
        "string_type": "must be text; put it in quotes",
        "string_too_short": "must not be empty; null leaves it unset",
        "finite_number": "must be a finite number",
        "model_type": "must be a mapping of keys",
        "model_attributes_type": "must be a mapping of keys",
        "dict_type": "must be a mapping of keys",
    }
    if kind in fixed:
        return fixed[kind]
    if kind == "bool_type":
        word = str(value).lower()
        return (
            f"must be true or false; write {word} without quotes"
            if word in ("true", "false")
            else ("must be true or false")
        )
    if kind == "int_type":
        whole = isinstance(value, float) and value.is_integer()
        return f"must be a whole number; write {int(value)}" if whole else "must be a whole number"
    if kind == "literal_error":
        expected = str(context["expected"]).replace("'", "")
        return f"must be {expected.lower() if expected in ('True', 'False') else expected}"
    if kind == "string_pattern_mismatch":
        return "must read package.module:Class"
    for name, (key, words) in _BOUNDS.items():
        if kind == name:
            return f"must be {words} {context[key]}"
    return None


def _list_rule(field: FieldInfo) -> str:
    """How a list of numbers must be: of two, or of any length, of which the field then has an example."""
    (form,) = (each for each in (field.annotation, *get_args(field.annotation)) if get_origin(each) is tuple)
    kind, *others = get_args(form)
    if others != [...]:
        return "must be a list of two numbers"
    numbers = "whole numbers" if kind is int else "numbers"
    return f"must be a list of {numbers}, such as {listing(field.examples or [], 'or')}"


_NO_LIST = ("tuple_type", "too_short", "too_long")

_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def _unknown(path: str, tag: str | None) -> str:
    """Names the key that was meant: of the same name in another section, else of a similar name in the same one."""
    paths = list(_known_paths(tag))
    section, _, leaf = path.rpartition(".")
    same_leaf = [known for known in paths if known.rpartition(".")[2] == leaf]
    siblings = [known for known in paths if known.rpartition(".")[0] == section]
    near = same_leaf[0] if len(same_leaf) == 1 else nearest_name(path, siblings, cutoff=0.75)
    if near:
        return f"{path}: unknown key; did you mean {near}?"
    names = [known.rpartition(".")[2] for known in siblings]
    return f"{path}: unknown key; {section or 'the top level'} has {listing(names)}"


@cache
def _known_paths(tag: str | None) -> dict[str, FieldInfo]:
    """Every key by its dotted path; those of `model` as the family `tag` has them, or any family where it is None."""
    found = {}
    for name, field in Config.model_fields.items():
        found[name] = field
        sections = [field.annotation]
        if name == "model":
            sections = [*FAMILIES.values()] if tag not in FAMILIES else [FAMILIES[tag]]
        for section in sections:
            assert isinstance(section, type)
            assert issubclass(section, BaseModel)
            found |= {f"{name}.{key}": inner for key, inner in section.model_fields.items()}
    return found
