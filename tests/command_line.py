"""Commands in the process of a test: the fixture `cli` of conftest.py."""

import json
from typing import Any, NamedTuple

import pytest

from shardwise.cli import main


class Said(NamedTuple):
    """What a command has written."""

    out: str
    err: str


class CommandLine:
    """Runs commands, which must end with the exit code that is expected; words need not be texts."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int = 0) -> Said:
        self._capsys.readouterr()
        found = main([*map(str, words)])
        said = Said(*self._capsys.readouterr())
        assert found == code, said
        return said

    def facts(self, *words: object, code: int = 0) -> Any:
        """The object that a command prints with `--json`."""
        return json.loads(self(*words, "--json", code=code).out)

    def rows(self, *words: object, code: int = 0) -> dict[str, str]:
        """The lines that a command prints, by their first words."""
        return dict(line.split(maxsplit=1) for line in self(*words, code=code).out.splitlines())

    def refused(self, *words: object) -> str:
        """What a command says of wrong input, which is no traceback."""
        err = self(*words, code=2).err
        assert "Traceback" not in err
        return err

    def sentence(self, *words: object) -> str:
        """The only line that a command prints, of wrong input."""
        out, err = self(*words, code=2)
        assert (out, len(err.splitlines())) == ("", 1), err
        return err
