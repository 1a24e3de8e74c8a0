"""Modules of a user's own, which the tests of models write."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.models.own_classes import FORWARD, HEAD, PLAIN, Write


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a module into the current directory, which no import path has; returns the family of its `Model`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def writer(constructor: str = PLAIN, forward: str = FORWARD, *, head: str = HEAD, path: str = "mine.py") -> str:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(head + textwrap.indent(textwrap.dedent(constructor + forward), "    "))
        return f"{path.removesuffix('.py').replace('/', '.')}:Model"

    yield writer
    for name in [name for name in set(sys.modules) - before if _lies_in(tmp_path, name)]:
        del sys.modules[name]


def _lies_in(folder: Path, module: str) -> bool:
    spec = getattr(sys.modules[module], "__spec__", None)
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec is not None else []
    return any(str(place).startswith(str(folder)) for place in places)
