"""The errors that a user is meant to read, each with the exit code of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from shardwise.redaction import redacted


class ShardwiseError(Exception):
    """An error whose text is for the user: shown without a traceback, and without secrets."""

    exit_code = 1

    def __init__(self, text: str = "") -> None:
        super().__init__(redacted(text))


class RunError(ShardwiseError):
    """A run that had started and failed (exit code 1)."""


class LostPeerError(RunError):
    """Another rank has ended, and this one says what it was waiting for: a consequence, not the cause."""


class StoppedError(ShardwiseError):
    """A run that was asked to stop, and did so once a checkpoint was complete (exit code 75: safe to start again)."""

    exit_code = 75


class ConfigError(ShardwiseError, ValueError):
    """The configuration or the input is wrong and no step was taken (exit code 2); carries every problem found."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        given = [problems] if isinstance(problems, str) else problems
        self.problems: list[str] = [redacted(problem) for problem in given]
        Exception.__init__(self, self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return "\n".join(f"- {problem}" for problem in self.problems)


class DataError(ConfigError):
    """The input data is missing, empty or unreadable (exit code 2)."""


def listing(items: Iterable[object], conjunction: str = "and") -> str:
    """`a, b and c`."""
    words = [str(item) for item in items]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {conjunction} {words[-1]}"


def nearest_numbers(value: int, valid: Iterable[int]) -> list[int]:
    """The closest valid number at or below `value` and the closest above it."""
    numbers = sorted(set(valid))
    below = [number for number in numbers if number <= value][-1:]
    above = [number for number in numbers if number > value][:1]
    return below + above


def nearest_multiples(value: int, step: int) -> list[int]:
    """The closest positive multiples of `step` around `value`."""
    below = value // step * step
    return [number for number in (below, below + step) if number > 0]


def nearest_name(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The valid name that reads most like `name`, or None where nothing comes close."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    return matches[0] if matches else None
