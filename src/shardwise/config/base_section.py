"""The base class of all configuration sections."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

PROBLEMS = "shardwise_problems"
LARGEST = 2**31 - 1
"""The largest whole number of a key without a bound of its own: larger ones overflow in libraries."""
MOST_LAYERS = 2**16
"""The largest number of blocks. Each one is a Python object: far more would not fit in memory."""

# Python has halves of characters ("surrogates", U+DC80 and up) for the bytes of a name that its encoding lacks, and
# pydantic takes them for no text. The stand-ins lie in the last plane of Unicode, which no text uses.
_STAND_INS = {0xDC80 + byte: 0x10DC80 + byte for byte in range(0x80)}
_BYTES = {stand_in: byte for byte, stand_in in _STAND_INS.items()}


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

    def __hash__(self) -> int:
        """The hash of all values, of mappings and lists by their contents: sections are keys of caches."""
        return hash(tuple(_hashable(self.__dict__[name]) for name in type(self).model_fields))

    def without_defaults(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Of the plain values of this section: required keys, and those whose value differs from the default.

        A section that reads the result has the same values: a default that depends on other keys is derived again.
        """
        kept = {name: value for name, value in recorded.items() if name not in type(self).model_fields}
        for name, key in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Section):
                inner = value.without_defaults(recorded[name])
                if inner or key.is_required():
                    kept[name] = inner
            elif key.is_required() or value != key.get_default(call_default_factory=True, validated_data=self.__dict__):
                kept[name] = recorded[name]
        return kept

    @model_validator(mode="wrap")
    @classmethod
    def _has_names_of_the_system(cls, values: Any, validated: ModelWrapValidatorHandler[Self]) -> Self:
        """Take any path, give texts as the system's names have them, whichever encoding Python has, and take a choice
        in capitals too.
        """
        if not isinstance(values, Mapping) or all(map(_is_plain, values.values())):  # as nearly always
            return validated(values)
        choices = {name: _choices(key.annotation) for name, key in cls.model_fields.items()}
        chosen = {name: _chosen(value, choices.get(name, {})) for name, value in values.items()}
        section = validated({name: with_stand_ins(system_names(value)) for name, value in chosen.items()})
        # Past pydantic, which would refuse to change a frozen section.
        for key, value in section.__dict__.items():
            section.__dict__[key] = as_given(value)
        return section

    @field_validator("*", mode="after")
    @classmethod
    def _is_not_too_large(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        has_bound = any(hasattr(rule, "le") for rule in cls.model_fields[info.field_name].metadata)
        if isinstance(value, int) and value > LARGEST and not has_bound:
            raise PydanticKnownError("less_than_equal", {"le": LARGEST})
        return value


def _choices(annotation: Any) -> dict[str, str]:
    """The texts of the Literals in an annotation, by themselves in lower case."""
    if get_origin(annotation) is Literal:
        return {choice.lower(): choice for choice in get_args(annotation) if isinstance(choice, str)}
    return {name: choice for inner in get_args(annotation) for name, choice in _choices(inner).items()}


def _chosen(value: Any, choices: Mapping[str, str]) -> Any:
    """A value, or those in a list, as the choice that differs in capitals alone."""
    if isinstance(value, list | tuple):
        return type(value)(_chosen(inner, choices) for inner in value)
    return choices.get(value.lower(), value) if isinstance(value, str) else value


def _is_plain(value: object) -> bool:
    """True if a value is the same in each encoding and has no capitals; a section within this one sees to its own."""
    if isinstance(value, str):
        return value.isascii() and value == value.lower()
    return not isinstance(value, list | tuple)


def utf8_text(text: str) -> str:
    """A text of the command line or of a name of the system, whichever encoding Python has.

    Raises:
        UnicodeError: the bytes are not UTF-8.
    """
    return text.encode("utf-8", "surrogateescape").decode()


def with_stand_ins(value: Any) -> Any:
    """A text, or those in a list, as pydantic and YAML take it: with other characters for bytes that are no text."""
    return _translated(value, _STAND_INS)


def as_given(value: Any) -> Any:
    """A value of `with_stand_ins` with the bytes again."""
    return _translated(value, _BYTES)


def system_names(value: Any) -> Any:
    """A text, or those in a list, as paths have them, whichever encoding Python has; other values as they are."""
    if isinstance(value, list | tuple):
        return type(value)(map(system_names, value))
    if not isinstance(value, str) or value.isascii():
        return value
    try:
        return os.fsdecode(as_given(value).encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:  # pydantic will refuse it
        return value


def _translated(value: Any, table: Mapping[int, int]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_translated(inner, table) for inner in value)
    return value.translate(table) if isinstance(value, str) and not value.isascii() else value


def _hashable(value: Any) -> Any:
    """A value whose hash is equal for equal values; mappings and lists, which have none, are replaced at any depth."""
    if isinstance(value, dict):
        return frozenset((key, _hashable(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return value


def reject(problems: Sequence[str]) -> None:
    """Raise all `problems` as one pydantic error, if there are any; `error_texts` takes them apart again."""
    if problems:
        # The text comes by the context: in the template itself, its braces would be taken for fields.
        text = with_stand_ins("; ".join(problems))
        raise PydanticCustomError(PROBLEMS, "{text}", {"text": text, "problems": list(problems)})
