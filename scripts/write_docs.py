"""Write the documentation that comes from the code: docs/configuration.md, from the configuration's own schema."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shardwise.config import Config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

All keys of a recipe. `shardwise train RECIPE key=value …` overrides them. `make docs` writes this page from the schema.
"""

NOTES = {
    "model": """\
`model.config=PATH` reads a Hugging Face `config.json`, or the folder that holds one, in place of the recipe's model; \
`model.*` keys given with it change single values. A field that no family here supports is an error that names it.""",
}


def default_of(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "derived"
    if field.default is PydanticUndefined:
        return "required"
    return f"`{json.dumps(field.default)}`"


def sections(annotation: object) -> list[type[pydantic.BaseModel]]:
    """The one section that a key holds, or one for each family."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections(argument)]


def rows(section: type[pydantic.BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        assert field.description, f"{prefix}.{name} has no description"
        yield f"| `{prefix}.{name}` | {default_of(field)} | {field.description} |"


def page() -> str:
    parts = [INTRODUCTION]
    for name, field in Config.model_fields.items():
        parts.append(f"## {name}: {field.description}\n")
        if name in NOTES:
            parts.append(f"{NOTES[name]}\n")
        choices = sections(field.annotation)
        for section in choices:
            if len(choices) > 1:
                family = get_args(section.model_fields["family"].annotation)
                parts.append(f"### {family[0] if family else 'package.module:Class'}\n")
                parts.append(f"{inspect.cleandoc(section.__doc__ or '')}\n")
            table = "\n".join(rows(section, name))
            parts.append(f"| key | default | meaning |\n|---|---|---|\n{table}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
