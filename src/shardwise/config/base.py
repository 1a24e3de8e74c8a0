"""What every configuration section shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

PROBLEMS = "shardwise_problems"
LARGEST = 2**31 - 1
"""The largest whole number of a key without a bound of its own: larger ones overflow in libraries."""
MOST_LAYERS = 2**16
"""The largest number of blocks. Each one is a Python object: far more would not fit in memory."""


@dataclass(frozen=True)
class Origin:
    """Where the keys of a `model` section come from. Two are always equal: a section is what its values are.

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

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    def __hash__(self) -> int:
        """The hash of all values, of mappings and lists by their contents: sections are keys of caches."""
        return hash(tuple(_hashable(self.__dict__[name]) for name in type(self).model_fields))

    @field_validator("*", mode="after")
    @classmethod
    def _is_not_too_large(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        has_bound = any(hasattr(rule, "le") for rule in cls.model_fields[info.field_name].metadata)
        if isinstance(value, int) and value > LARGEST and not has_bound:
            raise PydanticKnownError("less_than_equal", {"le": LARGEST})
        return value


def _hashable(value: Any) -> Any:
    """A value whose hash is equal for equal values; mappings and lists, which have none, are replaced at any depth."""
    if isinstance(value, dict):
        return frozenset((key, _hashable(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return value


def reject(problems: Sequence[str]) -> None:
    """Raise all `problems` as one pydantic error, if there are any; `load` takes them apart again."""
    if problems:
        raise PydanticCustomError(PROBLEMS, "{text}", {"text": "; ".join(problems), "problems": list(problems)})
