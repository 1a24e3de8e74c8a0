"""Texts that a terminal can show: wrapped at words, and without characters that it would obey or lacks."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from typing import TextIO

COMMAND = "resume: "
"""What a line of a message begins with that is a command to be pasted."""
_WIDEST = 100  # most columns of prose: longer lines are hard to read
_NARROWEST = 40  # columns below which nothing is wrapped further: the words would stand alone


def _terminal_width(stream: TextIO) -> int | None:
    """Columns of the terminal to which `stream` writes; None for a file or a pipe, whose lines stay whole."""
    if not stream.isatty():
        return None
    return max(_NARROWEST, shutil.get_terminal_size().columns)


def width_of_prose() -> int:
    """Columns of prose as wide as the terminal, in a file too; two columns stay free, as in argparse."""
    return max(_NARROWEST, min(shutil.get_terminal_size().columns, _WIDEST)) - 2


def wrap_words(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of whole words, however long one is; `indent` begins all lines but the first, within `width`."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def fit_to_terminal(text: str, stream: TextIO) -> str:
    """Lines for a stream; on a terminal, each that is too long goes on below its own beginning, four columns deeper.

    Rows below a row are two columns deeper. A command to be pasted stays whole, and a comment of YAML goes on as one.
    """
    width = _terminal_width(stream)
    if width is None:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        content = line.removeprefix("# ")
        margin = "# " * (content != line) + " " * (len(content) - len(content.lstrip()) + 4)
        is_command = line.startswith((f"{COMMAND}shardwise ", f"{COMMAND}sbatch "))
        lines += [line] if len(line) <= width or is_command else wrap_words(line, width, margin)
    return "\n".join(lines)


def take_any_character() -> None:
    """Let stdout and stderr print a replacement for each character that the terminal lacks, such as × in ASCII."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def printable(text: object) -> str:
    """`text` with each character that a terminal would obey replaced by its code."""
    plain = str(text)
    return plain if plain.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in plain)


def printable_line(text: str) -> str:
    """Return `text` in one line, without characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
