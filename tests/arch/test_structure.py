"""The structure that keeps the code readable: no circle of modules, no long function, no long file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import shardwise

SOURCE = Path(shardwise.__file__).parent
LONGEST_FUNCTION, LONGEST_FILE = 60, 600


def modules() -> dict[str, ast.Module]:
    """Every module by its name."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = ["shardwise", *path.relative_to(SOURCE).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """The modules of `names` that a module imports anywhere: in functions and for type checking too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module in names:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if below in names else node.module


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Each circle once, as `a -> b -> a`, found by walking on from every module."""
    found: dict[frozenset[str], str] = {}
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> None:
        if name in path:
            circle = path[path.index(name) :]
            found.setdefault(frozenset(circle), " -> ".join([*circle, name]))
            return
        if name in done:
            return
        for other in sorted(graph[name]):
            walk(other, [*path, name])
        done.add(name)

    for name in sorted(graph):
        walk(name, [])
    return list(found.values())


def test_no_circle_of_modules() -> None:
    trees = modules()
    names = set(trees)
    graph = {name: {other for other in imports(tree, names) if other != name} for name, tree in trees.items()}
    # The package itself only names its public objects; it loads none of them (PEP 562).
    graph["shardwise"] = set()
    assert not circles(graph), "modules import each other in a circle"


def test_a_circle_would_be_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a -> b -> c -> a"]


def test_functions_and_files_stay_short() -> None:
    long = []
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    long.append(f"{name}.{node.name} has {lines} lines, at most {LONGEST_FUNCTION}")
    for path in SOURCE.rglob("*.py"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > LONGEST_FILE:
            long.append(f"{path.relative_to(SOURCE)} has {lines} lines, at most {LONGEST_FILE}")
    assert not long, "\n".join(long)
