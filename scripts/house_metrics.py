"""Print figures of a source tree that its readers feel: `house_metrics.py [SRC]`, where SRC holds the packages.

All packages whose name begins with `shardwise` count. A refusal is a statement that raises or makes a ConfigError or
one of its subclasses, or collects a problem for one, with the lines of its text. Two commits are compared by two runs.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

MOST_IMPORTS = 15
PRONOUNS = {
    "one", "own", "other", "others", "mine", "each", "here", "there", "found", "held", "again", "it", "of", "some",
    "more", "whole", "what", "both", "rest", "beside", "ahead", "behind", "wanted",
}  # fmt: skip
QUESTIONS = {"What", "Where", "Whether", "Which", "How", "Of", "That", "As", "Who", "When", "Why"}
_COLLECTS = re.compile(r"(problems|reasons|texts|refusals)$")
_WITH_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_NO_CODE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_and_comments(source: str, tree: ast.Module) -> tuple[int, int]:
    """The lines of code, and the lines that hold a comment alone; docstrings are neither."""
    documented: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            documented |= _lines(node.body[0])
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - documented), len(comments - code - documented)


def _lines(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def subclasses(trees: list[ast.Module], base: str) -> set[str]:
    """`base` and the names of all classes that derive from it."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {base}
    while new := {node.name for node in classes if names & {*map(_name, node.bases)}} - names:
        names |= new
    return names


def refusal_lines(tree: ast.Module, errors: set[str]) -> int:
    """The lines of the statements that make an error, or collect a problem for one."""

    def refuses(node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            into = node.func.value if isinstance(node.func, ast.Attribute) else None
            collects = into is not None and node.func.attr in ("append", "extend") and _COLLECTS.search(_name(into))
            return _name(node.func) in errors or bool(collects)
        return isinstance(node, ast.AugAssign) and bool(_COLLECTS.search(_name(node.target)))

    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise | ast.Expr | ast.Return | ast.Assign | ast.AugAssign) and any(
            map(refuses, ast.walk(node))
        ):
            lines |= _lines(node)
        if isinstance(node, ast.FunctionDef) and node.name.endswith("problems"):
            for item in ast.walk(node):
                if isinstance(item, ast.Return) and isinstance(item.value, ast.List):
                    lines |= _lines(item)
    return len(lines)


def names(tree: ast.Module) -> list[str]:
    """Every name that the file binds as a variable or a parameter, as often as it does."""
    stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return stored + [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]


def figures(source: Path) -> dict[str, object]:
    """The figures of all packages in a folder."""
    texts = {path: path.read_text("utf-8") for path in sorted(source.glob("shardwise*/**/*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    errors = subclasses([*trees.values()], "ConfigError")
    count: Counter[str] = Counter()
    classes: dict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        code, comments = code_and_comments(texts[path], tree)
        bound = names(tree)
        docstrings = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, _WITH_DOCSTRING)]
        count.update(
            {
                "files": 1,
                "lines": len(texts[path].splitlines()),
                "lines of code": code,
                "lines of comments": comments,
                "lines of refusals": refusal_lines(tree, errors),
                f"modules with more than {MOST_IMPORTS} imports": sum(
                    isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body
                )
                > MOST_IMPORTS,
                "names": len(bound),
                "names that are pronouns": sum(name.strip("_") in PRONOUNS for name in bound),
                "docstrings": sum(map(bool, docstrings)),
                "docstrings that begin with a question word": sum(
                    bool(text) and text.split()[0] in QUESTIONS for text in docstrings
                ),
                "config: Config": len(re.findall(r"config: Config\b", texts[path])),
                "files with config: Config": bool(re.search(r"config: Config\b", texts[path])),
                "files that name train.bitwise": "train.bitwise" in texts[path],
                "shapes is None": len(re.findall(r"shapes is (?:not )?None", texts[path])),
            }
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name.strip("_")].add(path)
    shares = {
        "comments per 100 lines of code": round(100 * count["lines of comments"] / count["lines of code"], 1),
        "refusals per 100 lines": round(100 * count["lines of refusals"] / count["lines"], 1),
        "class names in two files or more": sum(len(where) > 1 for where in classes.values()),
    }
    return {**count, **shares}


if __name__ == "__main__":
    for title, value in figures(Path(sys.argv[1] if len(sys.argv) > 1 else "src")).items():
        print(f"{value!s:>10}  {title}")
