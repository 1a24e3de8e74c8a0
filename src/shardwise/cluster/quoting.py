"""How a text of the user's enters a job's script, its #SBATCH lines, a manifest, or the command line of a program.

Each text passes through `in_one_line` where it could end the line that holds it, or be taken for an option.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from shardwise.config.base import utf8_text
from shardwise.errors import ConfigError

_LINE_ENDS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, other ends of a line, and bytes that are no text."""


def in_one_line(name: str, text: str) -> str:
    """A text without control characters.

    Args:
        name: what the user calls it, for the message.

    Raises:
        ConfigError: it has some.
    """
    if _LINE_ENDS.search(_in_utf8(text)):
        raise ConfigError(f"{name} ({text!r}) must be without line breaks and other control characters: rename it")
    return text


def _in_utf8(text: str) -> str:
    try:
        return utf8_text(text)
    except UnicodeError:
        return text


def operand(name: str, text: str) -> str:
    """A text that another program must not take for an option.

    Raises:
        ConfigError: it is empty, begins with a hyphen, or has spaces or control characters.
    """
    if not text or text.startswith("-") or any(c.isspace() for c in in_one_line(name, text)):
        raise ConfigError(f"{name} ({text!r}) must be one word that does not begin with a hyphen")
    return text


def shell(words: Iterable[str]) -> str:
    """Words as a shell reads them; a line break in one is part of it."""
    return shlex.join(words)


def header(option: str, text: str | None = None, *, name: str | None = None) -> str:
    """A line of a script that gives sbatch an option, with its value as a text in quotes where it needs them.

    Args:
        option: with its hyphens.
        name: what the user calls the value, for the message.

    Raises:
        ConfigError: the value does not fit in one line.
    """
    if text is None:
        return f"#SBATCH {option}"
    value = in_one_line(name or option, text)
    if not re.fullmatch(r"[\w@%+=:,./\[\]()*&|!-]+", value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH {option}={value}"


def container_argument(text: str) -> str:
    """A text in a container's command or variables, where Kubernetes replaces `$(NAME)` and reads `$$` as one sign."""
    return text.replace("$", "$$")
