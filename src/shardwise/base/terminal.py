"""Texts that fit a terminal: wrapped at words, where a terminal shows them."""

from __future__ import annotations

import shutil
import textwrap
from typing import TextIO

COMMAND = "resume: "
"""What a line of a message begins with that is a command to be pasted."""
_WIDEST = 100
"""Most columns of prose: longer lines are hard to read."""
_NARROWEST = 40
"""Columns below which nothing is wrapped further: the words would stand alone."""


def _terminal_width(stream: TextIO) -> int | None:
    """Columns of the terminal to which `stream` writes; None for a file or a pipe, whose lines stay whole."""
    if not stream.isatty():
        return None
    return max(_NARROWEST, shutil.get_terminal_size().columns)


def width_of_prose() -> int:
    """Columns of a help text, wherever it goes; two columns stay free, as in argparse."""
    return max(_NARROWEST, min(shutil.get_terminal_size().columns, _WIDEST)) - 2


def wrap_words(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of whole words, however long one is; `indent` begins all lines but the first, within `width`."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def fit_to_terminal(text: str, stream: TextIO) -> str:
    """Lines for a stream; on a terminal, each that is too long goes on below its own beginning, two columns deeper.

    A command to be pasted stays whole.
    """
    width = _terminal_width(stream)
    if width is None:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        margin = " " * (len(line) - len(line.lstrip()) + 2)
        is_command = line.startswith((f"{COMMAND}shardwise ", f"{COMMAND}sbatch "))
        lines += [line] if len(line) <= width or is_command else wrap_words(line, width, margin)
    return "\n".join(lines)


def printable_line(text: str) -> str:
    """Return `text` in one line, without characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
