"""Explain a message: its cause and what to do about it.

NAME is the name at the end of the message, as in (`shardwise explain killed-rank`), or the message itself in quotes.
Without NAME all names are listed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.base.errors import ConfigError, nearest_name
from shardwise.base.terminal import width_of_prose, wrap_words
from shardwise.cli import output
from shardwise.cli.help import add_json

_PAGES = Path(__file__).parent / "troubleshooting"  # links to docs/troubleshooting; in a wheel, the files themselves
_ENTRY = r"(?ms)^### (\S+)\n+> (.+?)\n\n.*?^\*\*Cause\.\*\* (.+?)^\*\*Fix\.\*\* (.+?)(?=^#|^Next:|\Z)"
_LINK = r"\[([^\]]+)\]\([^)]*\)"


@dataclass(frozen=True)
class _Entry:
    """An entry of a troubleshooting page: the message with `…` for its values, its cause and what to do."""

    name: str
    page: str
    message: str
    cause: str
    fix: str

    def matches(self, text: str) -> bool:
        """True if the text holds this entry's message, with values in place of `…`."""
        parts = [part.strip(" ,;(") for part in self.message.split("…")]
        return re.search(".*".join(map(re.escape, parts)), text, re.DOTALL) is not None


def _entries() -> dict[str, _Entry]:
    by_name = {}
    # In a source tree without docs the links lead nowhere.
    for path in filter(Path.exists, sorted(_PAGES.glob("*.md"))):
        for name, *texts in re.findall(_ENTRY, path.read_text(encoding="utf-8")):
            message, cause, fix = (" ".join(re.sub(_LINK, r"\1", text).split()) for text in texts)
            by_name[name] = _Entry(name, path.stem, message, cause, fix)
    return by_name


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="the name at the end of the message, or the message")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    known = _entries()
    if not known:
        raise ConfigError(
            f"{_PAGES} holds no troubleshooting pages: install shardwise again, or run it where docs/troubleshooting is"
        )
    if arguments.name is None and arguments.json:
        output.json({"entries": [asdict(entry) for entry in known.values()]})
        return 0
    if arguments.name is None:
        output.table([(entry.name, entry.message) for entry in known.values()], ("NAME", "message"))
        return 0
    entry = _entry_of(arguments.name, known)
    if arguments.json:
        output.json(asdict(entry))
        return 0
    texts = {"Message": entry.message, "Cause": entry.cause, "Fix": entry.fix}
    paragraphs = ["\n".join(wrap_words(f"{title}: {text}", width_of_prose())) for title, text in texts.items()]
    output.raw("\n\n".join(paragraphs))
    return 0


def _entry_of(name: str, known: Mapping[str, _Entry]) -> _Entry:
    plain = name.rpartition("#")[2]
    if plain in known:
        return known[plain]
    of_message = [entry for entry in known.values() if entry.matches(name)]
    if of_message:
        # Short messages occur within others.
        return max(of_message, key=lambda entry: len(entry.message))
    near = nearest_name(plain.lower(), known)
    hint = f"did you mean {near}?" if near else "`shardwise explain` lists all names"
    raise ConfigError(f"no entry explains {name!r}: {hint}")
