"""What every configuration section shares."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

PROBLEMS = "shardwise_problems"


class Section(BaseModel):
    """A frozen group of keys: strict types, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


def reject(problems: Sequence[str]) -> None:
    """Raise all `problems` as one pydantic error, if there are any; `load` takes them apart again."""
    if problems:
        raise PydanticCustomError(PROBLEMS, "{text}", {"text": "; ".join(problems), "problems": list(problems)})
