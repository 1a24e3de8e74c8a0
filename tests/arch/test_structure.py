"""The structure that keeps the code readable: no circle of modules, no long function."""

import ast
import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from shardwise.config.optimizer_specs import OPTIMIZERS
from tests.arch.source import (
    ROOT,
    SOURCE,
    attribute_names,
    config_fields,
    dotted,
    imported_names,
    nodes,
    package_files,
    place,
    python_files,
)

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


MAX_LINES = 600


def is_private_torch(name: str) -> bool:
    first, *rest = name.split(".")
    return first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest)


def test_private_torch_names_have_one_home() -> None:
    found = []
    for path in package_files():
        if path.relative_to(SOURCE).as_posix() == "shardwise/distributed/torch_private.py":
            continue
        names = list(imported_names(path))
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and (name := dotted(node)):
                names.append((node.lineno, name))
        found += [f"{place(path, line)} {name}" for line, name in names if is_private_torch(name)]
    assert not found, "only distributed/torch_private.py may use a private torch name:\n" + "\n".join(found)


def test_collectives_have_one_home() -> None:
    """Only one file calls the collectives of torch.distributed: the byte meter sees everything that is sent."""
    verbs = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "isend", "irecv", "send", "recv")
    called = re.compile(rf"(dist|distributed)\.({'|'.join(verbs)})(_\w+)?$")
    found = []
    for path in package_files():
        if path.relative_to(SOURCE).as_posix() == "shardwise/distributed/collectives.py":
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call) and (name := dotted(node.func)) and called.search(name):
                found.append(f"{place(path, node.lineno)} {name}")
    assert not found, "call the collectives of distributed/collectives.py instead:\n" + "\n".join(found)


def test_no_vendor_outside_device() -> None:
    """`torch.accelerator` decides: one file writes `cuda`, and base/hardware.py reads the device files of vendors."""
    found = []
    for path in package_files():
        if path.relative_to(SOURCE).as_posix() in (
            "shardwise/distributed/devices.py",
            "shardwise/base/hardware.py",
            "shardwise/distributed/torch_private.py",
        ):
            continue
        for node in nodes(path):
            name = node.attr if isinstance(node, ast.Attribute) else None
            text = node.value if isinstance(node, ast.Constant) else None
            if name == "cuda" or (isinstance(text, str) and re.fullmatch(r"cuda(:\d+)?", text)):
                found.append(place(path, node.lineno))
    assert not found, "ask shardwise.distributed.devices instead:\n" + "\n".join(found)


def test_homes_of_users_have_one_home() -> None:
    """`Path.expanduser` raises a RuntimeError for `~name` where there is no such user."""
    found = [
        place(path, node.lineno)
        for path in package_files()
        if path.relative_to(SOURCE).as_posix() != "shardwise/base/files.py"
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == "expanduser"
    ]
    assert not found, "call user_path of base/files.py instead:\n" + "\n".join(found)


def test_files_stay_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    long = [f"{place(path, lines)}" for path, lines in lengths.items() if lines > MAX_LINES]
    assert not long, f"a file of more than {MAX_LINES} lines has more than one subject:\n" + "\n".join(long)


def test_nothing_is_unfinished() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = [
        place(path, number)
        for path in python_files()
        if path.name != "test_structure.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if words.search(line)
    ]
    assert not found, "\n".join(found)


def read_by_own_methods(path: Path) -> set[str]:
    """`self.key` in the public methods of a section: what they derive is read in the key's stead.

    So is what a family's table `keys` names: the properties of all families read through it.
    """
    sections = [section for section in nodes(path) if isinstance(section, ast.ClassDef)]
    tables = [
        node.value
        for section in sections
        for node in section.body
        if isinstance(node, ast.AnnAssign) and dotted(node.target) == "keys" and isinstance(node.value, ast.Dict)
    ]
    methods = (
        method
        for section in sections
        for method in section.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
    )
    named = {str(value.value) for table in tables for value in table.values if isinstance(value, ast.Constant)}
    return named | {
        node.attr
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and dotted(node.value) == "self"
    }


def test_every_config_key_has_a_reader() -> None:
    """A key that nothing reads is a promise that nothing keeps. A key with one legal value leaves nothing to read."""
    # Arguments of the optimizer's class.
    read = {key.rpartition(".")[2] for spec in OPTIMIZERS.values() for key in spec.keys}
    for path in package_files():
        in_config = path.is_relative_to(SOURCE / "shardwise/config")
        read |= read_by_own_methods(path) if in_config else attribute_names(path)
    keys = [key for key, field in config_fields().items() if len(get_args(field.annotation)) != 1]
    unread = [key for key in keys if key.rpartition(".")[2] not in read]
    assert not unread, f"nothing reads the config keys {unread}"
