"""A line of an examination: the finding, its status and the fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Check:
    """The finding of a check.

    Attributes:
        name: subject of the check.
        status: `wrong` if trainings fail here; `warning` if some do, or they are slow.
        found: present state, or the problem.
        mend: advice; empty if all is well.
    """

    name: str
    status: Status
    found: str
    mend: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)
