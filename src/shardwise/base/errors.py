"""The errors that a user is meant to read, each with its exit code, and the words that their messages are made of."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwise.base.redaction import redacted

if TYPE_CHECKING:
    from pathlib import Path

FAILED = 1
"""The run had started and failed."""
WRONG_INPUT = 2
"""The configuration or the input is wrong, and no step was taken. argparse ends with it too."""
STOPPED = 75
"""The run stopped on request, after a checkpoint or before its first step: EX_TEMPFAIL of sysexits.h, "try again"."""

_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
"""Control characters but for tab and newline, separators of lines, characters that turn the direction of the text
around them, and halves of characters that no terminal can print."""
_ENDLESS = r"(\S{200})\S{400,}(\S{100})"
"""A word of 700 characters or more, of which the middle is left out: no key and hardly any path is so long."""


def shown(text: str) -> str:
    """A user's message without secrets, with control characters as escapes, and without the middle of endless words.

    A wrong input is quoted in it: a terminal would obey its control characters, and thousands of letters would hide the
    message.
    """
    return re.sub(_ENDLESS, r"\1…\2", visible(redacted(text)))


def visible(text: str) -> str:
    """A text for a user with control characters as escapes."""
    return re.sub(_CONTROL, lambda match: ascii(match[0])[1:-1], text)


def see(entry: str) -> str:
    """The end of an error's message with an entry `PAGE#NAME` of docs/troubleshooting: the command that prints it."""
    return f" (`shardwise explain {entry.partition('#')[2]}`)"


class ShardwiseError(Exception):
    """An error whose text is for the user: the base of all that shardwise raises on purpose.

    The command line shows the text without a traceback. Secrets are hidden in it.

    Args:
        text: what is wrong and how to mend it.

    Attributes:
        exit_code: exit code of a command that ends by this error.
    """

    exit_code = FAILED

    def __init__(self, text: str = "") -> None:
        super().__init__(shown(text))


class RunError(ShardwiseError):
    """A run that had started and failed (exit code 1); `text` says why."""


class LostPeerError(RunError):
    """Another rank has ended while this one waited for it: a consequence of the run's failure, not its cause."""


class StoreError(RunError):
    """The disk or the object store of checkpoints cannot be read or written.

    Attributes:
        missing: there is nothing of that name.
        refused: this user may not read or write it, or the path cannot be used: a command ends as by wrong input.
    """

    def __init__(self, text: str, *, missing: bool = False, refused: bool = False) -> None:
        super().__init__(text)
        self.missing = missing
        self.refused = refused

    @property
    def is_damage(self) -> bool:
        """True if a file that cannot be read is lost. Where the store gave no answer, it may still be there."""
        return self.missing or isinstance(self, DamageError)


class DamageError(StoreError):
    """Checkpoint storage gives other bytes than those that were written."""


class LaunchError(RunError):
    """The launched ranks failed; `exit_code` is the one that the rank at fault asked for."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class EndedError(LaunchError):
    """A signal ended the launched ranks at once: steps since the last checkpoint, if any were taken, are not saved."""


class StoppedError(ShardwiseError):
    """A run that stopped on request, after it completed a checkpoint (exit code 75); `text` says how to continue it."""

    exit_code = STOPPED


class ConfigError(ShardwiseError, ValueError):
    """The configuration or the input is wrong and no step was taken (exit code 2). It is a `ValueError` too.

    Args:
        problems: the problem, or all that were found, each in a sentence.

    Attributes:
        problems: all of them, as they are shown.
    """

    exit_code = WRONG_INPUT

    def __init__(self, problems: str | Sequence[str]) -> None:
        if isinstance(problems, str):
            problems = [problems]
        # Two checks may find the same.
        self.problems: list[str] = [shown(problem) for problem in dict.fromkeys(problems)]
        Exception.__init__(self, self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return "\n".join(f"- {problem}" for problem in self.problems)


def raise_problems(error: type[ConfigError], problems: Sequence[str]) -> None:
    """Raise an error with problems, if there are any."""
    if problems:
        raise error(problems)


class Problems(list[str]):
    """The problems of checks that do not depend on each other, to be told at once.

    Each check is in a `with` block of its own: a ConfigError ends the block, and what follows it goes on.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self.extend(error.problems)
        return True


class DataError(ConfigError):
    """The input data is missing, empty or unreadable (exit code 2)."""


class ArgumentError(ConfigError, TypeError):
    """The error of a call whose arguments its function or class does not take; a TypeError, as Python's own is."""


@contextmanager
def keys_renamed(names: Mapping[str, str]) -> Iterator[None]:
    """A context that rewrites the message of every ConfigError: what the user gave stands in place of each key."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([renamed_error_text(text, names) for text in error.problems]) from error


def renamed_error_text(text: str, names: Mapping[str, str]) -> str:
    """The text of a ConfigError, rewritten with what the user gave in place of each key of `names`."""
    return re.sub("|".join(map(re.escape, names)), lambda key: names[key[0]], text)


def listing(items: Iterable[object], conjunction: str = "and", most: int | None = None) -> str:
    """`a, b and c`; of more than `most` items the first ones, and how many more there are: `a, b and 7 more`."""
    words = [str(item) for item in items]
    if most is not None and len(words) > most:
        words = [*words[:most], f"{len(words) - most:,} more"]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {conjunction} {words[-1]}"


def nearest_name(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The valid name most similar to an unknown `name` of any kind, for an error's message; None if none is."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def count_problems(values: Mapping[str, object]) -> list[str]:
    """The problems, for an error's message, of counts that are no whole numbers of at least 1; numpy's are valid."""
    # Costly for every command.
    from numbers import Integral

    return [
        f"{name} ({value!r}) must be a whole number of at least 1"
        for name, value in values.items()
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1
    ]


def first_line(error: BaseException) -> str:
    """The first line of a library's message, without a period."""
    return str(error).partition("\n")[0].rstrip(".")


# ---- errors of the user's own code

RAISED = (Exception, SystemExit)
"""Exceptions of code of the user's own. `sys.exit(0)` would end a run as if all its steps were done."""


def error_text(error: BaseException) -> str:
    """The text of an error in code of the user's own, with the last line of it that was running."""
    import traceback
    from pathlib import Path

    libraries = [Path(__file__).parent.parent]
    if (torch := sys.modules.get("torch")) is not None and torch.__file__:
        libraries.append(Path(torch.__file__).parent)
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        is_library = any(file.is_relative_to(library) for library in libraries) or _is_pythons(file)
        # Names of code without a file begin with "<".
        if not frame.filename.startswith("<") and not is_library:
            place = f" ({frame.filename}, line {frame.lineno})"
    if isinstance(error, SystemExit):
        code = "" if error.code is None else repr(error.code)
        return f"sys.exit({code}) was called{place}"
    text = f": {error}" if str(error) else ""
    return f"{type(error).__name__}{text}{place}"


def counted_text(error: ShardwiseError) -> str:
    """Return the text of an error, with the number of its problems above them if there are several."""
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        return f"{len(error.problems)} errors\n{error}"
    return str(error)


def _is_pythons(file: Path) -> bool:
    """True if a file is of the standard library; installed packages lie below it, and may be the user's own."""
    import sysconfig
    from pathlib import Path

    standard = Path(sysconfig.get_path("stdlib"))
    installed = ("site-packages", "dist-packages")
    return file.is_relative_to(standard) and file.relative_to(standard).parts[0] not in installed
