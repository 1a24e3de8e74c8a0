"""The JSON Schema of a recipe, from which editors complete its keys and check their values."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from shardwise.config.base_section import Section
from shardwise.config.data import StageConfig
from shardwise.config.model import FAMILIES, UserModelConfig
from shardwise.config.run_config import Config
from shardwise.config.sections import BATCH_RULE
from shardwise.config.token_counts import TOKENS

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_USER_MODEL = r":"  # a pattern in `model.family` if it names a class of the user's own


def recipe_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of a recipe: every key with its description, type, bounds, choices and default.

    It accepts what `load_config` reads and refuses unknown keys, wrong types and values out of range. What depends on
    several keys, such as whether a layout divides the heads, is checked by `load_config` alone.
    """
    # One call for all classes, so that they share their definitions.
    classes: tuple[type[Section], ...] = (Config, *FAMILIES.values(), UserModelConfig)
    references, definitions = models_json_schema([(section, "validation") for section in classes])
    schemas = definitions["$defs"]
    names = {section: references[section, "validation"]["$ref"].rpartition("/")[2] for section in classes}
    for family in FAMILIES.values():
        _accept_other_spellings(schemas[names[family]], family.aliases)
    number = schemas["TrainConfig"]["properties"]["global_batch"]
    bounds = {key: number.pop(key) for key in ("type", "exclusiveMinimum") if key in number}
    number["anyOf"] = [bounds, {"type": "string", "pattern": f"^{BATCH_RULE}$"}]
    sets = schemas["EvaluationConfig"]["properties"]["sets"]  # which may be given by their paths
    sets["additionalProperties"] = {"anyOf": [{"type": "string", "minLength": 1}, sets["additionalProperties"]]}
    for schema in schemas.values():
        _accept_tokens(schema.get("properties", {}))
    recipe: dict[str, Any] = schemas.pop(names[Config])
    _default_to_empty(recipe, Config)
    for field in Config.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            _default_to_empty(schemas[field.annotation.__name__], field.annotation)
    _default_to_empty(schemas[StageConfig.__name__], StageConfig)
    recipe["properties"]["model"] = {
        "description": Config.model_fields["model"].description,
        "type": "object",
        "properties": {
            "family": {"anyOf": [{"enum": list(FAMILIES)}, {"type": "string", "pattern": _USER_MODEL}]},
            "config": {"type": "string", "description": "a Hugging Face config.json, or the folder that holds one"},
        },
        # Keys beside `config` change the model of that file, which this schema cannot know.
        "if": {"required": ["config"]},
        "else": {
            "required": ["family"],
            "allOf": [
                *(_chosen({"const": name}, names[family]) for name, family in FAMILIES.items()),
                _chosen({"pattern": _USER_MODEL}, names[UserModelConfig]),
            ],
        },
    }
    return {"$schema": _DIALECT, **recipe, "title": "A recipe of shardwise", "$defs": schemas}


def _chosen(family: dict[str, Any], name: str) -> dict[str, Any]:
    return {"if": {"properties": {"family": family}, "required": ["family"]}, "then": {"$ref": f"#/$defs/{name}"}}


def _default_to_empty(schema: dict[str, Any], section: type[Section]) -> None:
    """Give a section or mapping that may be left out its default, which pydantic leaves out of the schema.

    The description of a key whose default depends on other keys says what it is.
    """
    for name, field in section.model_fields.items():
        if field.default_factory is dict or (field.default_factory and field.default_factory is field.annotation):
            schema["properties"][name]["default"] = {}


def _accept_tokens(properties: dict[str, Any]) -> None:
    """Let keys that count steps be given in tokens."""
    for name, schema in properties.items():
        if schema.pop("unit", None) == "steps":
            numbers = schema.pop("anyOf", None)
            if numbers is None:
                bounds = ("type", "minimum", "exclusiveMinimum")
                numbers = [{key: schema.pop(key) for key in bounds if key in schema}]
            properties[name] = {**schema, "anyOf": [*numbers, {"type": "string", "pattern": f"^{TOKENS}$"}]}


def _accept_other_spellings(schema: dict[str, Any], aliases: dict[str, str]) -> None:
    """Let a key of Hugging Face's `config.json` that this family calls otherwise stand for its key."""
    properties = schema["properties"]
    spellings = {name: [name] for name in schema.get("required", [])}
    for alias, name in aliases.items():
        if name in properties:
            properties[alias] = {**properties[name], "description": f"another spelling of {name}"}
            spellings.get(name, []).append(alias)
    # A required key with several spellings is required in one of them.
    schema["required"] = [name for name, names in spellings.items() if len(names) == 1]
    alternatives = []
    for names in spellings.values():
        if len(names) > 1:
            alternatives.append({"anyOf": [{"required": [name]} for name in names]})
    if alternatives:
        schema["allOf"] = alternatives
