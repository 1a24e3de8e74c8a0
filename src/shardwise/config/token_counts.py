"""Keys that count optimizer steps and take tokens too, such as `train.steps=20B`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import Field
from pydantic.fields import FieldInfo

from shardwise.config.base_section import Section

_UNIT = "unit"
_STEPS = "steps"

Path = tuple[str | int, ...]
"""The keys, and places in lists, that lead to a value."""


TOKENS = r"(\d{1,18}(?:\.\d+)?) ?([kKMBT])(?: tokens)?"
"""A number of tokens: `500M`, `1.5 T`, `20B tokens`."""
_TOKEN_POWERS = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_tokens(text: object) -> int | None:
    """The number of tokens that a text names, such as `20B tokens`; None for anything else."""
    match = re.fullmatch(TOKENS, text) if isinstance(text, str) else None
    return None if match is None else round(float(match[1]) * _TOKEN_POWERS[match[2]])


def tokens_text(tokens: int) -> str:
    """The text by which a key takes a number of tokens, such as `300B`."""
    suffix = next((suffix for suffix in "TBM" if tokens >= _TOKEN_POWERS[suffix]), "k")
    return str(tokens / _TOKEN_POWERS[suffix]).removesuffix(".0") + suffix


def step_field(default: Any = ..., *, description: str, **bounds: Any) -> Any:
    """Make the field of a key that counts steps."""
    return Field(default=default, description=description, json_schema_extra={_UNIT: _STEPS}, **bounds)


def _is_step_field(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and extra.get(_UNIT) == _STEPS


def counts_steps(section: type[Section], place: Path) -> bool:
    """Return whether the keys of `place`, from a section on, lead to one that counts steps."""
    sections = [section]
    fields: list[FieldInfo] = []
    for key in place:
        if isinstance(key, str):
            fields = [inner.model_fields[key] for inner in sections if key in inner.model_fields]
            sections = [inner for field in fields for inner in _sections_in(field.annotation)]
    return any(map(_is_step_field, fields))


def steps_of_tokens(tokens: int, step_tokens: int) -> int:
    """Return the steps of `step_tokens` tokens that come nearest to a number of tokens, at least 1."""
    return max(1, (2 * tokens + step_tokens) // (2 * step_tokens))


def token_keys(section: type[Section], values: Any, place: Path = ()) -> Iterator[tuple[Path, int]]:
    """Yield the place of each value that counts steps and is given in tokens, and the tokens."""
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        field = section.model_fields.get(key)
        if field is None or not isinstance(value, str | Mapping | list | tuple):
            continue
        if isinstance(value, str):
            tokens = parse_tokens(value) if _is_step_field(field) else None
            if tokens is not None:
                yield (*place, key), tokens
            continue
        for inner in _sections_in(field.annotation):
            elements = {(): value} if isinstance(value, Mapping) else {(i,): value[i] for i in range(len(value))}
            for number, element in elements.items():
                yield from token_keys(inner, element, (*place, key, *number))


def step_places(section: Section, place: Path = ()) -> Iterator[tuple[Path, int]]:
    """Yield the place of each number of steps that a checked section was given, and the number."""
    for key, field in type(section).model_fields.items():
        if key not in section.model_fields_set:
            continue
        value = getattr(section, key)
        if _is_step_field(field):
            # 0 and null switch something off.
            if value:
                yield (*place, key), value
            continue
        elements = {(): value} if not isinstance(value, tuple) else {(i,): value[i] for i in range(len(value))}
        for number, element in elements.items():
            if isinstance(element, Section):
                yield from step_places(element, (*place, key, *number))


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)


def replace_at_place(values: Any, place: Path, value: Any) -> Any:
    """Return nested mappings, sections and lists of keys with the value at a place replaced; the given ones stay."""
    if not place:
        return value
    first, *inside = place
    if isinstance(values, Section):
        inner = getattr(values, str(first))
        return values.model_copy(update={str(first): replace_at_place(inner, tuple(inside), value)})
    if isinstance(values, Mapping):
        return {**values, first: replace_at_place(values[first], tuple(inside), value)}
    assert isinstance(first, int), "a place in a list"
    inner = [*values]
    inner[first] = replace_at_place(inner[first], tuple(inside), value)
    return type(values)(inner)
