"""The base class of all configuration sections, the rules of several keys, and the numbers that errors propose."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from shardwise.base.errors import listing

PROBLEMS = "shardwise_problems"
LARGEST = 2**31 - 1
"""The largest whole number of a key without a bound of its own: larger ones overflow in libraries."""
MOST_LAYERS = 2**16
"""The largest number of blocks. Each one is a Python object: far more would not fit in memory."""


@dataclass(frozen=True)
class Origin:
    """The sources of a `model` section's keys. Two origins are always equal: sections are compared by their values.

    Attributes:
        file: the Hugging Face file or folder that `model.config` named; None where it named none.
        from_file: keys with the values of that file.
        typed: keys that stand on the command line, or among the values that a program gives beside a recipe.
    """

    file: str | None = field(default=None, compare=False)
    from_file: frozenset[str] = field(default=frozenset(), compare=False)
    typed: frozenset[str] = field(default=frozenset(), compare=False)


class Section(BaseModel):
    """A frozen group of keys: strict types, and an unknown key is an error."""

    # Validators are built when a section is first read: most commands start without several of them.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    # Not among the values, so that no copy with other values takes it along.
    __slots__ = ("_hash",)

    def __hash__(self) -> int:
        """The hash of all values, of mappings and lists by their contents: sections are keys of caches."""
        kept_hash: int | None = getattr(self, "_hash", None)
        if kept_hash is None:
            kept_hash = hash(tuple(_hashable(self.__dict__[name]) for name in type(self).model_fields))
            object.__setattr__(self, "_hash", kept_hash)
        return kept_hash

    def without_defaults(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Required keys of the plain values of this section, and those whose value differs from the default.

        A section that reads the result has the same values: a default that depends on other keys is derived again.
        """
        kept: dict[str, Any] = {}
        for name, key in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Section):
                inner = value.without_defaults(recorded[name])
                if inner or key.is_required():
                    kept[name] = inner
            elif key.is_required() or value != key.get_default(call_default_factory=True, validated_data=self.__dict__):
                kept[name] = recorded[name]
        return kept | {name: value for name, value in recorded.items() if name not in type(self).model_fields}

    @model_validator(mode="before")
    @classmethod
    def _takes_choices_in_capitals(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or all(map(_has_no_capitals, values.values())):  # as nearly always
            return values
        choices = {name: _choices(key.annotation) for name, key in cls.model_fields.items()}
        return {name: _chosen(value, choices.get(name, {})) for name, value in values.items()}

    @model_validator(mode="after")
    def _is_not_too_large(self) -> Self:
        # A validator of each key would be inspected once for each: a twentieth of a dry run's calls.
        large = [name for name, value in self.__dict__.items() if isinstance(value, int) and value > LARGEST]
        fields = type(self).model_fields
        errors = [
            InitErrorDetails(type="less_than_equal", loc=(name,), input=self.__dict__[name], ctx={"le": LARGEST})
            for name in large
            if not any(hasattr(rule, "le") for rule in fields[name].metadata)
        ]
        if errors:
            raise ValidationError.from_exception_data(type(self).__name__, errors)
        return self


def _choices(annotation: Any) -> dict[str, str]:
    if get_origin(annotation) is Literal:
        return {choice.lower(): choice for choice in get_args(annotation) if isinstance(choice, str)}
    return {name: choice for inner in get_args(annotation) for name, choice in _choices(inner).items()}


def _chosen(value: Any, choices: Mapping[str, str]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_chosen(inner, choices) for inner in value)
    return choices.get(value.lower(), value) if isinstance(value, str) else value


def _has_no_capitals(value: object) -> bool:
    """True if no choice is written in capitals in a value; a section within this one sees to its own."""
    return value == value.lower() if isinstance(value, str) else not isinstance(value, list | tuple)


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return frozenset((key, _hashable(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return value


def reject(problems: Sequence[str]) -> None:
    """Raise all `problems` as one pydantic error, if there are any; `error_messages` takes them apart again."""
    if problems:
        # The text comes by the context: in the template itself, its braces would be taken for fields.
        raise PydanticCustomError(PROBLEMS, "{text}", {"text": "; ".join(problems), "problems": list(problems)})


# ---- rules of several keys as tables of their messages

RuleTable = Mapping[str, Sequence[str]]
_PLACE = r"\{([!=]?)([a-z_.]+)(?:=(\w+))?\}"
"""A message names the keys that do not go together, and so says itself what breaks its rule:

- `{section.key}`: the rule is broken only if the key has a value other than null, false, 0 and empty. The message has
  the key with its value: `train.steps (10)`.
- `{section.key=value}`: only if the key has this value; shown likewise.
- `{!section.key}`: only if the key has no value, or one of those above; the message has the key alone.
- `{=section.key}`: the value, whatever it is.

A key may also be a property. The messages of a table stand under what else breaks all of them: properties, each with a
`!` where it must be false.
"""
_places = cache(re.compile(_PLACE).findall)


def broken_rules(table: RuleTable, values: Any, section: str = "") -> list[str]:
    """The messages of the rules of a table that a configuration breaks, or the section of this name."""

    def value(path: str) -> Any:
        return attrgetter(path.removeprefix(f"{section}."))(values)

    def is_met(place: tuple[str, str, str]) -> bool:
        mark, path, only = place
        if mark == "=":
            return True
        return _yaml_text(value(path)) == only if only else bool(value(path)) is not bool(mark)

    def filled(place: re.Match[str]) -> str:
        mark, path, _ = place.groups()
        if mark == "!":
            return path
        return _yaml_text(value(path)) if mark else f"{path} ({_yaml_text(value(path))})"

    problems = []
    for facts, texts in table.items():
        if all(bool(value(fact.lstrip("!"))) is not fact.startswith("!") for fact in facts.split()):
            problems += [text for text in texts if all(map(is_met, _places(text)))]
    return [re.sub(_PLACE, filled, text) for text in problems]


def _yaml_text(value: object) -> str:
    if isinstance(value, Mapping):
        return listing(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value) if isinstance(value, tuple) else value)


def nearest_numbers(value: int, valid: Iterable[int]) -> list[int]:
    """The valid numbers nearest to a wrong `value`, for an error's message: the closest at or below and above it."""
    numbers = sorted(set(valid))
    place = bisect_right(numbers, value)
    return numbers[max(place - 1, 0) : place + 1]


def divisors(number: int) -> set[int]:
    """All divisors of a number above 0, of which errors name the nearest, in time proportional to its square root."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return {*small, *(number // n for n in small)}


def nearest_multiples(value: int, step: int) -> list[int]:
    """The closest positive multiples of `step` around a wrong `value`, for an error's message."""
    below = value // step * step
    return [number for number in (below, below + step) if number > 0]
