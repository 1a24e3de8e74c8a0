"""The structure that keeps the code readable: no circle of modules, no long function."""

import ast
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.arch.source import ROOT, SOURCE, nodes, package_files

LONGEST_FUNCTION = 60


def modules() -> dict[str, Path]:
    """The file of every module by the module's name."""
    found = {}
    for path in package_files():
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, names: set[str]) -> Iterator[str]:
    """The modules of `names` that a module imports anywhere: in functions and for type checking too."""
    for node in nodes(path):
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
    files = modules()
    names = set(files)
    graph = {name: {other for other in imports(path, names) if other != name} for name, path in files.items()}
    # The package itself only names its public objects; it loads none of them (PEP 562).
    graph["shardwise"] = set()
    assert not circles(graph), "modules import each other in a circle"


def test_a_circle_would_be_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a -> b -> c -> a"]


def test_functions_stay_short() -> None:
    long = []
    for name, path in modules().items():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    long.append(f"{name}.{node.name} has {lines} lines, at most {LONGEST_FUNCTION}")
    assert not long, "\n".join(long)


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("scripts/*.py")]), ids=lambda path: path.stem
)
def test_programs_beside_the_package_import_what_is_there(path: Path) -> None:
    """Benchmarks run rarely, mostly on machines where nobody can mend them."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0].startswith("shardwise"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name) or find_spec(f"{node.module}.{alias.name}"), alias.name
