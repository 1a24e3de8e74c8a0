"""The pages docs/troubleshooting/messages-*.md: every message of the package, with what its group has in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from scripts.messages import FOLDER, Message, messages

GROUPS = Path(__file__).with_name("message_groups.yaml")
INTRODUCTION = """\
Every message of these parts of shardwise, with `…` for values. `make pages` writes this page from the code. A message
says what must hold, which key or argument decides it, and the values that are valid. Each group begins with what its
messages have in common; a message that has an entry of its own leads to it. Wrong input ends a command with exit
code 2 and a failure with 1; in a program it is an exception ([exit codes](../troubleshooting.md)).
"""


def pages() -> dict[str, str]:
    """The text of each page, by its file's name.

    Raises:
        ValueError: a file of the package has messages and belongs to no group.
    """
    described = yaml.safe_load(GROUPS.read_text(encoding="utf-8"))
    groups = [(name, group["title"]) for page in described for group in page["groups"] for name in group["files"]]
    of_group: dict[str, list[Message]] = {}
    for message in messages():
        named = [(len(name), title) for name, title in groups if message.file.startswith(name)]
        if not named:
            raise ValueError(f"src/shardwise/{message.file} has messages: name it in a group of {GROUPS.name}")
        of_group.setdefault(max(named)[1], []).append(message)
    return {f"{page['file']}.md": _page(page, of_group) for page in described}


def _page(page: dict[str, Any], of_group: dict[str, list[Message]]) -> str:
    parts = [f"# All messages: {page['title']}\n", INTRODUCTION]
    for group in page["groups"]:
        found = sorted(of_group[group["title"]], key=lambda message: message.text.lstrip("…: ").lower())
        parts.append(f"## {group['title']}\n\n**Cause.** {group['cause']}\n\n**Fix.** {group['fix']}\n")
        parts.append("\n".join(dict.fromkeys(map(_row, found))) + "\n")
    return "\n".join([*parts, f"Next: {page['next']}\n"])


def _row(message: Message) -> str:
    fence = "``" if "`" in message.text else "`"
    page, _, name = message.entry.partition("#")
    entry = f" ([{name}]({page}.md#{name}))" if message.entry else ""
    return f"- {fence}{message.text}{fence}{entry}"


def write() -> None:
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
