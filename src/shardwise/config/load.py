"""Reads a recipe and `key=value` overrides into a `Config`, or reports all of their problems; and writes YAML."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from shardwise.base.errors import ConfigError, listing, nearest_name, see
from shardwise.base.files import read_small
from shardwise.base.parsing import TAG, NotReadError, scalar, yaml_value
from shardwise.config.data import DataConfig
from shardwise.config.families import FamilyConfig
from shardwise.config.hugging_face import UnsupportedError, read_hugging_face
from shardwise.config.model import FAMILIES
from shardwise.config.rope_scaling import LENGTH
from shardwise.config.section import PROBLEMS, Origin, as_given, system_names, utf8_text, with_stand_ins
from shardwise.config.sections import Config

_RECIPES = Path(__file__).parent / "recipes"
_SUFFIXES = (".yaml", ".yml")
_MODEL_FILE = "model.config"
_DATA_COMMENT = r"(?m)^ *# ((?:\S.*: +|  +)data\..+)"
"""A comment of a recipe that names data for it, such as `# For a trial:  data.dataset=python`, or continues one."""


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in _RECIPES.glob("*.yaml"))


def recipe_text(recipe: str) -> str:
    """The YAML of a shipped recipe's name or of a file.

    Raises:
        ConfigError: the recipe is unknown, or its file cannot be read.
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
        with path.open("rb") as file:  # it may be a pipe, as the shell makes of <(command)
            return read_small(file, path).decode()
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe file {recipe}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe file {recipe} cannot be read: {error}") from None


def recipe_name(recipe: str) -> str:
    """The short name of a recipe, after which its runs are named: `llama` of `my/llama.yaml`."""
    return Path(recipe).stem if recipe.endswith(_SUFFIXES) else Path(recipe).name


def require_data(config: Config, recipe: str) -> None:
    """Raises ConfigError, with the comments of the recipe that name data for it, where nothing names data."""
    if not config.data.is_named and config.hooks.data is None:
        lines = re.findall(_DATA_COMMENT, recipe_text(recipe)) or ["For a trial:  data.dataset=python"]
        shown = "\n".join(f"  {line}" for line in lines)
        raise ConfigError(
            f"{recipe_name(recipe)} must name its data by data.path, data.blend or data.dataset"
            f"{see('runs#no-data-named')}:\n{shown}"
        )


def load_config(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a shipped recipe's name or a YAML file, with `a.b=value` overrides applied.

    `model.config=PATH` among the overrides replaces the recipe's whole model; other `model.*` overrides change that.

    Raises:
        ConfigError: something is wrong; it has all problems of the file and of the overrides.
    """
    values = _sections(recipe)
    if any(override.partition("=")[0].strip() == _MODEL_FILE for override in overrides):
        values["model"] = {}
    problems = apply_overrides(values, overrides)
    return config_from(values, problems, typed=[override.partition("=")[0].strip() for override in overrides])


def load_with(recipe: str | Mapping[str, Any], overrides: Mapping[str, Any]) -> Config:
    """The configuration that a program gives: overrides are values, by dotted keys or by sections with keys.

    Raises:
        ConfigError: as `load_config`.
    """
    values = _sections(recipe) if isinstance(recipe, str) else _plain(recipe)
    problems: list[str] = []
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
        try:
            _set(values, path, _plain(value))
        except ConfigError as error:
            problems += error.problems
    return config_from(values, problems, typed=[*changed])


def _sections(recipe: str) -> dict[str, Any]:
    """The sections of a shipped recipe's name or a YAML file, as they are written there."""
    values = parse_yaml(recipe_text(recipe), recipe)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"the recipe {recipe} must be a mapping of sections: {listing(Config.model_fields)}")
    return values


def _plain(value: Any) -> Any:
    """A program's value as YAML would have it."""
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
    problems: list[str] = []
    for override in overrides:
        try:
            _apply(values, override)
        except ConfigError as error:
            problems += error.problems
    return problems


def config_from(values: Mapping[str, Any], problems: Sequence[str] = (), *, typed: Collection[str] = ()) -> Config:
    """The configuration that a nested mapping describes.

    `model.config`, a Hugging Face `config.json` or its folder, stands for that model; keys beside it change it.

    Args:
        values: the sections.
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
    try:
        config = Config.model_validate({**values, "model": model} if "model" in values else dict(values))
    except ValidationError as error:
        for details in error.errors(include_url=False):
            if details["loc"][0] != "model":
                all_problems += _texts(details)
            elif not model_is_unread:
                all_problems += _texts(details, family)
    if all_problems or config is None:
        raise ConfigError(list(dict.fromkeys(all_problems)))
    if config.shapes is not None:
        names = [path.split(".")[1] for path in typed if path.startswith("model.")]
        config.shapes.came_from(Origin(file, from_file, frozenset(_canonical(family, name) for name in names)))
    return config


def data_from(values: Mapping[str, Any]) -> DataConfig:
    """A `data` section by itself.

    Raises:
        ConfigError: something is wrong; it has every problem of `values`.
    """
    try:
        return DataConfig.model_validate(dict(values))
    except ValidationError as error:
        raise _refusal(error, "data") from None


def model_from(values: Mapping[str, Any]) -> FamilyConfig:
    """A `model` section by itself, of one of the families here.

    Raises:
        ConfigError: something is wrong; it has every problem of `values`.
    """
    family = str(values["family"])
    try:
        return FAMILIES[family].model_validate(dict(values))
    except ValidationError as error:
        raise _refusal(error, "model", family) from None


def _refusal(error: ValidationError, section: str, family: str = "") -> ConfigError:
    """The error for a section that is read by itself, from what pydantic says."""
    problems = []
    for details in error.errors(include_url=False):
        problems += _texts({**details, "loc": (section, *details["loc"])}, family)
    return ConfigError(list(dict.fromkeys(problems)))


def _apply(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not all(path.strip().split(".")):
        raise ConfigError(f"the override {override!r} must read key=value, such as train.steps=100")
    try:
        text = utf8_text(text)
    except UnicodeError:  # a path may have any bytes
        if is_yaml(text):
            raise ConfigError(
                f"the override {override!r} must be UTF-8 where its value is in brackets or quotes"
            ) from None
    _set(values, path, parse_value(text, f"the override {override!r}"))


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    """Write a value into the nested `values` at a dotted path."""
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
    path = system_names(model["config"])
    if not isinstance(path, str) or not path:
        return None, [f"{_MODEL_FILE} ({path!r}) must be the path of a Hugging Face config.json or of its folder"]
    problems: list[str] = []
    try:
        section = read_hugging_face(Path(path).expanduser(), ignored_fields(model))
    except ConfigError as error:
        problems = [f"{_MODEL_FILE}: {problem}" for problem in error.problems]
        if not isinstance(error, UnsupportedError):
            return None, problems
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
    """The name of a key of a family that may be spelled otherwise."""
    return FAMILIES[family].aliases.get(key, key)


def ignored_fields(model: Mapping[str, Any]) -> list[str]:
    """The names in `model.ignore` of an unchecked section."""
    names = model.get("ignore")
    if not isinstance(names, list | tuple):
        return []
    return [name for name in names if isinstance(name, str)]


def _texts(details: Any, family: str = "") -> list[str]:
    """The messages of one pydantic error. `family`: family of the `model` section that holds the key."""
    kind = details["type"]
    context = details.get("ctx", {})
    location = details["loc"]
    path = ".".join(str(part) for part in location)
    value = details["input"]
    known = _known_paths(family)
    field = known.get(path)
    if kind == PROBLEMS:
        return list(context["problems"])
    if kind == "default_factory_not_called":  # a value that the default depends on is wrong, and has its own error
        return []
    if kind == "missing" and isinstance(location[-1], int):  # an item of a list
        key = path.rpartition(".")[0]
        return [f"{key} {_list_rule(known[key])}"]
    if kind == "missing":
        return [f"{path} is missing" + (f" ({field.description})" if field and field.description else "")]
    if kind == "extra_forbidden":
        return [_unknown(path, known)]
    rule = _list_rule(field) if field is not None and kind in _NO_LIST else _rule(kind, context, value)
    shown = f" ({as_given(value)!r})" if not isinstance(value, (dict, list)) else ""
    return [f"{path}{shown} {rule or 'is not valid: ' + details['msg']}"]


_RULES = {
    "float_type": "must be a number",
    "string_type": "must be text; put it in quotes",
    "path_type": "must be a path",
    "string_too_short": "must not be empty; null leaves it unset",
    "string_pattern_mismatch": "must read package.module:Class",
    "finite_number": "must be a finite number",
    "model_type": "must be a mapping of keys",
    "model_attributes_type": "must be a mapping of keys",
    "dict_type": "must be a mapping of keys",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
}
"""The rule that a message gives after `quantity (value)`, by pydantic's type of error; its context has the numbers."""
_NO_LIST = ("tuple_type", "too_short", "too_long")


def _rule(kind: str, context: Mapping[str, Any], value: Any) -> str | None:
    """The rule that a message gives after `quantity (value)`; None for a type of error without words here."""
    if kind == "bool_type":
        word = str(value).lower()
        return "must be true or false" + (f"; write {word} without quotes" if word in ("true", "false") else "")
    if kind == "int_type":
        is_whole = isinstance(value, float) and value.is_integer()
        return "must be a whole number" + (f"; write {int(value)}" if is_whole else "")
    if kind == "literal_error":
        expected = str(context["expected"]).replace("'", "")
        return f"must be {expected.lower() if expected in ('True', 'False') else expected}"
    return _RULES[kind].format_map(context) if kind in _RULES else None


def _list_rule(field: FieldInfo) -> str:
    """The rule that a message gives for a list: two numbers, or any length, with the field's example."""
    annotations = (field.annotation, *get_args(field.annotation))
    (tuple_type,) = (annotation for annotation in annotations if get_origin(annotation) is tuple)
    kind, *further = get_args(tuple_type)
    if further != [...]:
        return "must be a list of two numbers"
    entries = "whole numbers" if kind is int or get_args(kind)[:1] == (int,) else "numbers"
    if kind is str or get_origin(kind) is Literal:
        entries = "names"
    return f"must be a list of {entries}, such as {listing(field.examples or [], 'or')}"


def _unknown(path: str, known_paths: Mapping[str, FieldInfo]) -> str:
    """The message for an unknown key. It suggests the same name in another section, else a similar one in this one."""
    paths = list(known_paths)
    section, _, leaf = path.rpartition(".")
    same_leaf = [known for known in paths if known.rpartition(".")[2] == leaf]
    siblings = [known for known in paths if known.rpartition(".")[0] == section]
    near = same_leaf[0] if len(same_leaf) == 1 else nearest_name(path, siblings, cutoff=0.75)
    if near:
        return f"{path}: unknown key; did you mean {near}?"
    names = [known.rpartition(".")[2] for known in siblings]
    return f"{path}: unknown key; {section or 'the top level'} has {listing(names)}"


@cache
def _known_paths(family: str) -> dict[str, FieldInfo]:
    """Every key by its dotted path; those of `model` as this family has them, or of all families for another name."""
    paths = {}
    for name, field in Config.model_fields.items():
        paths[name] = field
        sections: list[Any] = [field.annotation]
        if name == "model":
            sections = [FAMILIES[family]] if family in FAMILIES else [*FAMILIES.values()]
        for section in sections:
            paths |= {f"{name}.{key}": inner for key, inner in section.model_fields.items()}
    return paths


def parse_yaml(text: str, origin: str) -> Any:
    """The value that `text` holds; `origin` names it in errors.

    Raises:
        ConfigError: the text is no YAML, has too many levels or values, or keys are given twice; with every such key.
    """
    try:
        return yaml_value(text, origin)
    except NotReadError as error:
        raise ConfigError(error.problems) from None


def parse_value(text: str, origin: str) -> Any:
    """The value of a command line's `key=value`: YAML in brackets, braces or quotes, else one plain scalar."""
    return parse_yaml(text.strip(), origin) if is_yaml(text) else scalar(text.strip())


def is_yaml(text: str) -> bool:
    """True if the value of a `key=value` is YAML in brackets, braces or quotes."""
    return text.strip()[:1] in ("[", "{", '"', "'")


def dump_yaml(values: Mapping[str, Any]) -> str:
    """`values` as YAML that `parse_yaml` reads back as the same; a path is written as its text."""
    text: str = yaml.serialize(_node(dict(values)), Dumper=yaml.SafeDumper, width=120, allow_unicode=True)
    return "\n".join(map(_escaped, text.split("\n")))


def _escaped(line: str) -> str:
    """A line with an escape for each character that is not printable: these stand in double quotes alone."""
    return line if line.isprintable() else "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in line)


def _node(value: Any) -> yaml.Node:
    if isinstance(value, Mapping):
        pairs = [(_node(str(key)), _node(item)) for key, item in value.items()]
        return yaml.MappingNode(TAG + "map", pairs, flow_style=False)
    if isinstance(value, (list, tuple)):
        return yaml.SequenceNode(TAG + "seq", [_node(item) for item in value], flow_style=True)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        value = with_stand_ins(value)
        plain = scalar(value) == value and value.isprintable()
        return yaml.ScalarNode(TAG + "str", value, style=None if plain else '"')
    if value is None:
        return yaml.ScalarNode(TAG + "null", "null")
    if isinstance(value, bool):
        return yaml.ScalarNode(TAG + "bool", "true" if value else "false")
    if isinstance(value, int):
        return yaml.ScalarNode(TAG + "int", str(value))
    # YAML 1.1 readers (PyYAML's own among them) take 1e-05 for a word and 1.0e-05 for a number.
    text = repr(float(value))
    return yaml.ScalarNode(TAG + "float", text if "." in text else text.replace("e", ".0e"))
