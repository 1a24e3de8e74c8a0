"""Every message by which the package refuses something, read from its source, for the lists in docs/troubleshooting.

A message is a text in the source that is given to an error, or that says what must hold. It is neither a docstring nor
the description of a key or of an option. Values are written as `…`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "shardwise"
FOLDER = ROOT / "docs" / "troubleshooting"

_ERROR = re.compile(r"(\w*Error|error|_?[Pp]roblem\w*|reject|refuse)$")
"""Names of what is called with a message."""
_RULE = re.compile(
    r"\b(must|cannot|could not|lacks|needs|failed|is (damaged|not installed)|there is no|does not (exist|fit))\b"
)
_NO_MESSAGES = ("add_argument", "add_parser", "ArgumentParser", "Field", "compile", "AssertionError")
"""Calls whose texts describe a key, an option or a pattern, or tell of a fault of the package."""
_FEWEST_WORDS = 3
"""A shorter text is a part of a message."""


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        file: below src/shardwise.
        text: with `…` for each value.
        entry: of docs/troubleshooting, as `page#name`; empty where it has none.
    """

    file: str
    text: str
    entry: str = ""


@cache
def messages() -> tuple[Message, ...]:
    """Each message once for each file, in the order of the files."""
    found: dict[Message, None] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and _is_message(node, parents):
                text = literal(node)
                entry = next(iter(_entries(_statement(node, parents))), "")
                found[Message(file, re.sub(r"\s+", " ", text or "").strip(), entry)] = None
    return tuple(found)


def words(text: str) -> list[str]:
    """Words, names, keys and options, without other punctuation."""
    return re.findall(r"[\w.=/'-]+", text)


def marks(text: str, most: int = 4) -> set[str]:
    """What a message can be known by: runs of `most` words without a value between them, or of fewer if it has none.

    A test asserts a message if it has one of these.
    """
    parts = [words(part) for part in re.split(r"…|\{\w*\}", text)]
    length = min(most, max(map(len, parts)))
    return {" ".join(part[at : at + length]) for part in parts for at in range(len(part) - length + 1)}


def _is_message(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents.get(node)
    if isinstance(parent, ast.Expr | ast.JoinedStr | ast.FormattedValue) or (
        isinstance(parent, ast.BinOp) and literal(parent) is not None
    ):
        return False
    text = literal(node)
    if text is None or text.startswith("#") or len(words(text)) < _FEWEST_WORDS:
        return False
    around = list(_around(node, parents))
    calls = [name for name in map(_called, around) if name]
    is_part = any(isinstance(each, ast.FormattedValue | ast.Assert) for each in around)  # of a message, or our own bug
    if is_part or any(name in _NO_MESSAGES for name in calls):
        return False
    return bool(_RULE.search(text)) or any(_ERROR.search(name) for name in calls[:1])


def literal(node: ast.AST) -> str | None:
    """A literal text with `…` for its values; None of anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(value.value) if isinstance(value, ast.Constant) else "" if list(_entries(value)) else "…"
            for value in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = literal(node.left), literal(node.right)
        return None if left is None and right is None else (left or "…") + (right or "…")
    return None


def _entries(node: ast.AST) -> Iterator[str]:
    """The entries that `see` names inside of a node."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "see":
            (entry,) = call.args
            if isinstance(entry, ast.Constant):
                yield str(entry.value)


def _around(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    """What a node is a part of, from the inside out, up to its statement."""
    while not isinstance(node, ast.stmt) and node in parents:
        node = parents[node]
        yield node


def _called(node: ast.AST) -> str:
    """The last name of what a call calls; empty for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _statement(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    while not isinstance(node, ast.stmt):
        node = parents[node]
    return node if isinstance(node, ast.Raise | ast.Assign | ast.Expr | ast.Return | ast.AugAssign) else ast.Pass()
