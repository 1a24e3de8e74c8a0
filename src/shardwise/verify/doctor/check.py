"""One line of an examination: what was found, whether it is well, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Check:
    """What was found of one thing.

    Attributes:
        status: `wrong`: trainings fail here; `warning`: some do, or they are slow.
        found: what there is, or what is wrong with it.
        mend: what to do; empty where all is well.
    """

    name: str
    status: Status
    found: str
    mend: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)
