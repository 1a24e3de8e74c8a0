"""The test files that a change since a commit concerns, by imports: `make test-changed`, with BASE=main.

A test file is concerned where a file has changed that it imports, directly or through others, inside functions too; it
imports the commands that it names. Data belongs to the Python files of its folder. Another file, such as a page,
concerns the tests that name it or its folder. The tests of `tests/arch` read all files and always run.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import shardwise.data
from shardwise.base.registered import _FUNCTIONS

ROOT = Path(__file__).resolve().parents[1]
_FOR_ALL = {"pyproject.toml", "constraints.txt", "scripts/env.sh", "tests/conftest.py"}
_IMPORT = re.compile(r"^ *(?:from ([\w.]+) )?import (\([^)]*\)|[^\n#]+)", re.MULTILINE)
_PUBLIC = {f"shardwise.{name}": home for name, home in shardwise._HOME.items()}
_PUBLIC |= {f"shardwise.data.{name}": home for name, home in shardwise.data._HOMES.items()}
# They offer all that there is; whoever imports these names what it takes.
_NONE = {"shardwise", "shardwise.data", "tests.command_line", "tests.e2e.command", "tests.e2e.warm"}
# Modules that put together the names of what they import, and its package. SLURM runs what `submit` writes.
_BY_NAME = {
    "shardwise.data.open_data": "shardwise.data.formats.",
    "shardwise.layers.bitwise": "shardwise.layers.bitwise.",
    "shardwise.models.build": "shardwise.models.",
    "shardwise.train.build": "shardwise.optim.",
    "shardwise_jobs.cli.submit": "shardwise_jobs.cli.",
}


@cache
def modules() -> dict[str, str]:
    """Paths of the Python files of the packages, the tests and the scripts, by dotted names."""
    files = [file.relative_to(ROOT) for top in ("src", "tests", "scripts") for file in (ROOT / top).rglob("*.py")]
    paths = [str(file) for file in files if "interop" not in file.parts]
    return {re.sub(r"^src\.|\.__init__$", "", path.removesuffix(".py").replace("/", ".")): path for path in paths}


def _names(module: str) -> Iterator[str]:
    """Dotted names of what a module imports itself, or of something in that."""
    text = (ROOT / modules()[module]).read_text("utf-8")
    for home, imported in _IMPORT.findall(text):
        yield from (f"{home}.{name}".lstrip(".") for name in re.findall(r"[\w.]+", imported))
    yield from re.findall(r'\bimported\("([\w.]+)"\)', text)
    yield from (_FUNCTIONS[name].partition(":")[0] for name in re.findall(r'\bprovided\("(\w+)"', text))
    yield from (name for name in modules() if name.startswith(_BY_NAME.get(module, " ")))
    if module.startswith("tests."):
        yield from re.findall(r"\b(?:shardwise\w*|tests|scripts)(?:\.\w+)+", text)
        if re.search(r"\bshardwise\.cli\b|\be2e\.command\b|\btests\.command_line\b", text):
            words = {*re.findall(r"\w+", text)}
            yield from (name for name in modules() if ".cli." in name and name.split(".")[-1].rstrip("_") in words)


@cache
def _importers() -> dict[str, set[str]]:
    found = defaultdict[str, set[str]](set)
    for module in modules().keys() - _NONE:
        for name in _names(module):
            parts = _PUBLIC.get(name, name).split(".")
            beginnings = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
            found[next((beginning for beginning in beginnings if beginning in modules()), "")].add(module)
    return found


def _touched(path: str) -> set[str]:
    """The modules that a changed file is part of, or that name it."""
    if path in modules().values():
        return {module for module, file in modules().items() if file == path}
    folder = next((folder for folder in Path(path).parents[:-1] if any((ROOT / folder).glob("*.py"))), Path("tests"))
    words = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in (Path(path).name, path.split("/")[0])))
    return {
        module
        for module, file in modules().items()
        if Path(file).parent == folder != Path("tests")
        or (module.startswith("tests.") and words.search((ROOT / file).read_text("utf-8")))
    }


def concerned(changed: Iterable[str]) -> list[str]:
    """The test files, of changed files below the root of the project."""
    new = {module for path in changed for module in _touched(path)} if not _FOR_ALL & {*changed} else {*modules()}
    found = {module for module in modules() if module.startswith("tests.arch.test_")}
    while new:
        found |= new
        new = set[str]().union(*(_importers()[module] for module in new)) - found
    return sorted(modules()[module] for module in found if ".test_" in module)


if __name__ == "__main__":
    print(*concerned(sys.stdin.read().split()))
