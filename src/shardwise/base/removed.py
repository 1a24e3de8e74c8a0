"""Spellings that earlier versions took and this one does not: each spelling with the sentence that answers it."""

from __future__ import annotations

REMOVED = {
    "submit --kubernetes": "give each pod of Kubernetes the torchrun line of docs/cluster.md",
    "compile --retry-failed": "a graph that failed is compiled again, without an option",
}
"""Options as `COMMAND --option`, keys as `section.key`, values as `section.key=value` → one plain sentence.

A reader of input asks `removed_text` before it says that a name or a value is unknown.
"""


def removed_text(spelling: str) -> str | None:
    """The sentence on an option, a key or a value that was removed, with what to use instead; None for others."""
    sentence = REMOVED.get(spelling)
    return None if sentence is None else f"{spelling} was removed: {sentence}"
