"""The structure that keeps the code readable: no circle of modules, no long function."""

import ast
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import shardwise
from shardwise.cli import main
from shardwise.config.optimizer_specs import OPTIMIZERS
from shardwise.launch.stop_requests import SIGNALS
from shardwise.models.causal import CausalLM
from tests.arch.source import (
    CASES,
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
MAX_LINES = 600
PACKAGE = Path(shardwise.__file__).parent
MOST_FRAMES, MOST_FILES = 7, 4
SHORT = ["train.steps=2", "train.global_batch=2", "train.eval_every=0", "log.sample_tokens=0", "log.tensorboard=false"]
HOMES = CASES["homes of names"]
"""Names, the only files of the core that may use them, and what others call instead."""


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


def used(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each import, attribute and call, whose name ends with (); line and quoted text of constants."""
    yield from imported_names(path)
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            yield node.lineno, dotted(node) or f"….{node.attr}"
        elif isinstance(node, ast.Call):
            yield node.lineno, f"{dotted(node.func)}()"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, repr(node.value)


@pytest.mark.parametrize("names", HOMES)
def test_names_have_one_home(names: str) -> None:
    files, _, instead = HOMES[names].partition(": ")
    homes = {SOURCE / "shardwise" / home for home in files.split()}
    found = [
        f"{place(path, line)} {name}"
        for path in package_files()
        if path not in homes
        for line, name in used(path)
        if re.fullmatch(names, name)
    ]
    assert not found, f"only {files} may use these; {instead}:\n" + "\n".join(found)


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


@pytest.fixture
def _as_before() -> Iterator[None]:
    """A run in this process hears signals; afterwards pytest does again."""
    handlers, threads = {number: signal.getsignal(number) for number in SIGNALS}, torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_as_before")
def test_from_the_command_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are this package's frames, from the command's `run` to the one that calls the model, and not torch's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.cli.train.accelerators", lambda: ("cpu", 0))
    ways: list[list[tuple[str, str]]] = []

    def note(module: torch.nn.Module, _: object) -> None:
        if isinstance(module, CausalLM):
            stack = [(Path(frame.filename), frame.name) for frame in traceback.extract_stack()]
            ours = [(file.relative_to(PACKAGE).as_posix(), name) for file, name in stack if PACKAGE in file.parents]
            ways.append(ours[ours.index(("cli/train.py", "run")) :])

    hook = register_module_forward_pre_hook(note)
    try:
        assert main(["train", "llama2-tiny", *SHORT, "--nproc", "1", "--run-dir", "run"]) == 0
    finally:
        hook.remove()
    assert len(ways) > 1
    for way in ways:
        assert len(way) <= MOST_FRAMES, way
        assert len({file for file, _ in way}) <= MOST_FILES, way


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TORCH_FREE = PROJECT["tool"]["importlinter"]["contracts"][1]["source_modules"]
"""The modules below the torch line; those of a room that is wholly below it end in `.**`."""

CURVE = str(ROOT / "tests/golden/curves/llama2-tiny.json")
COMMANDS = [*CASES["commands without torch"], ["compare", CURVE, CURVE]]
RUN_EACH = """
import contextlib, io, json, sys
from shardwise.cli import main
for command in json.loads(sys.argv[1]):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            code = main(command)
        except SystemExit as exit:
            code = exit.code
    assert code == 0, (command, code)
    assert shown.getvalue().strip(), command
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "torch")
    assert not loaded, f"torch was imported by {command}: {loaded[:5]}"
"""


def python(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def test_import_contracts() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    result = python(code, "--no-cache", cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_needs_no_torch_imports_none(tmp_path: Path) -> None:
    code = """
import sys, shardwise
loaded = [name for name in sys.modules if name.startswith(("torch", "shardwise."))]
assert not loaded, f"importing the package loads {loaded}"
config = shardwise.load_recipe("llama2-tiny", train={"steps": 5})
assert shardwise.plan(config, "h100:2", best=1).plans
shardwise.export_checkpoint, shardwise.save_checkpoint, shardwise.Run, shardwise.train
assert "torch" not in sys.modules
"""
    result = python(code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_modules_below_the_torch_line_import_no_torch(tmp_path: Path) -> None:
    code = """
import importlib, pkgutil, sys
sys.modules["torch"] = None
for name in sys.argv[1:]:
    module = importlib.import_module(name.removesuffix(".**"))
    for below in pkgutil.walk_packages(module.__path__, f"{module.__name__}.") if name.endswith(".**") else ():
        importlib.import_module(below.name)
"""
    result = python(code, *TORCH_FREE, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_commands_run_without_torch(tmp_path: Path) -> None:
    result = python(RUN_EACH, json.dumps(COMMANDS), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert not list(tmp_path.iterdir()), "a command must leave nothing behind"
