"""Messages for keys and values that pydantic refuses: the key, its value, and the rule that it breaks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from shardwise.base.errors import ConfigError, listing
from shardwise.config.base_section import PROBLEMS, Section
from shardwise.config.evaluation import as_keys_of_set
from shardwise.config.model import FAMILIES, UserModelConfig
from shardwise.config.run_config import Config
from shardwise.config.token_counts import counts_steps


def refusal(error: ValidationError, section: str, family: str = "") -> ConfigError:
    """The error for a section that is read by itself, from what pydantic says."""
    problems = []
    for details in error.errors(include_url=False):
        problems += error_messages({**details, "loc": (section, *details["loc"])}, family)
    return ConfigError(list(dict.fromkeys(problems)))


def error_messages(details: Any, family: str = "") -> list[str]:
    """The messages of one pydantic error. `family`: family of the `model` section, whose keys may be suggested."""
    kind = details["type"]
    context = details.get("ctx", {})
    location = details["loc"]
    # A set has the keys of the section data, and what is wrong with one of them is told as of that section.
    if location[:2] == ("evaluation", "sets") and (len(location) > 3 or (len(location) == 3 and kind == PROBLEMS)):
        texts = error_messages({**details, "loc": ("data", *location[3:])}, family)
        # The first word is a key, known or not.
        prefix = f"evaluation.sets.{location[2]}."
        return [as_keys_of_set(re.sub(r"^data\.", prefix, text), location[2]) for text in texts]
    path = ".".join(str(part) for part in location)
    value = details["input"]
    known = known_paths(family)
    field = known.get(path)
    if kind == PROBLEMS:  # raised by `reject`: these texts have their quantities already
        return list(context["problems"])
    if kind == "default_factory_not_called":  # a value that the default depends on is wrong, and has its own error
        return []
    if kind == "missing" and isinstance(location[-1], int):  # an item of a list
        key = path.rpartition(".")[0]
        return [f"{key} {_list_rule(known[key])}"]
    if kind == "missing":
        return [f"{path} is missing" + (f" ({field.description})" if field and field.description else "")]
    if kind == "extra_forbidden" and (inner := ".".join(map(str, location[:2]))) in _INNER:
        section = next(part for part in get_args(known[inner].annotation) if part is not str)
        return [f"{path}: unknown key; a {_INNER[inner]} has {listing(section.model_fields)}"]
    if kind == "extra_forbidden":
        return _unknown(path, value, known, is_own_model=":" in family)
    rule = _list_rule(field) if field is not None and kind in _NO_LIST else _rule(kind, context, value)
    if kind == "int_type" and isinstance(value, str) and counts_steps(Config, location):
        rule = "must be a whole number of steps, or tokens such as 20B, 500M or 1.5T"
    shown = f" ({value!r})" if not isinstance(value, (dict, list)) else ""
    return [f"{path}{shown} {rule or 'is not valid: ' + details['msg']}"]


_INNER = {"data.mixture": "source", "data.stages": "stage"}
"""Keys that hold sections, and what messages call one of these."""
_RULES = {
    "float_type": "must be a number",
    "string_type": "must be text; put it in quotes",
    "path_type": "must be a path",
    "string_too_short": "must not be empty; null leaves it unset",
    "string_unicode": "must be UTF-8: rename what it names",
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
# In these errors pydantic speaks of tuples, which YAML lacks.
_NO_LIST = ("tuple_type", "too_short", "too_long")


def _rule(kind: str, context: Mapping[str, Any], value: Any) -> str | None:
    if kind == "bool_type":
        word = str(value).lower()
        return "must be true or false" + (f"; write {word} without quotes" if word in ("true", "false") else "")
    if kind == "int_type":
        is_whole = isinstance(value, float) and value.is_integer()
        return "must be a whole number" + (f"; write {int(value)}" if is_whole else "")
    if kind == "literal_error":
        # pydantic writes Python: 'a', 'b' or 'c', and True where YAML has true.
        expected = str(context["expected"]).replace("'", "")
        return f"must be {expected.lower() if expected in ('True', 'False') else expected}"
    return _RULES[kind].format_map(context) if kind in _RULES else None


def _list_rule(field: FieldInfo) -> str:
    return f"must be a list, such as {listing(field.examples or [list(field.default)], 'or')}"


def _unknown(path: str, value: Any, keys: Mapping[str, FieldInfo], *, is_own_model: bool) -> list[str]:
    """The messages for an unknown key; those of an unknown section are about its keys, unless its name is a slip."""
    # Reads the names of other programs from a file.
    from shardwise.config.suggestions import reason_without_key, removed_text, section_suggestion, suggestions

    if is_own_model:
        # Its class has keys of its own, and those that other models have are no advice.
        keys = {key: field for key, field in keys.items() if not key.startswith("model.")}
    section, _, _ = path.rpartition(".")
    if not section:
        near = section_suggestion(path, Config.model_fields)
        names = [f"{path}.{name}" for name in value] if isinstance(value, Mapping) else []
        if names and (near is None or any(map(reason_without_key, names))):
            return [text for name in names for text in _unknown(name, None, keys, is_own_model=is_own_model)]
        if near is not None:
            return [f"{path}: unknown key; did you mean {near}?"]
    if text := removed_text(path):
        return [text]
    if reason := reason_without_key(path):
        return [f"{path}: unknown key; {reason}"]
    if meant := suggestions(path, keys, value=value):
        return [f"{path}: unknown key; did you mean {listing(meant, 'or')}?"]
    if is_own_model and not section:
        return [f"{path}: unknown key; did you mean model.{path}, an argument of your model's class?"]
    siblings = [key for key in keys if key.rpartition(".")[0] == section]
    if not siblings:
        return [f"{path}: unknown key; the sections are {listing(Config.model_fields)}"]
    names = [key.rpartition(".")[2] for key in siblings]
    return [f"{path}: unknown key; {section or 'the top level'} has {listing(names)}"]


@cache
def known_paths(family: str = "") -> dict[str, FieldInfo]:
    """Every key by its dotted path; those of `model` as this family has them, or of all families for another name."""
    paths = {}
    for name, field in Config.model_fields.items():
        paths[name] = field
        sections: list[Any] = [field.annotation]
        if name == "model":
            sections = [FAMILIES[family]] if family in FAMILIES else [*FAMILIES.values()]
            if ":" in family:
                sections = [UserModelConfig]
        for section in sections:
            for key, inner in section.model_fields.items():
                paths[f"{name}.{key}"] = inner
                if isinstance(inner.annotation, type) and issubclass(inner.annotation, Section):
                    paths |= {f"{name}.{key}.{leaf}": field for leaf, field in inner.annotation.model_fields.items()}
    return paths
