"""The package as the architecture tests read it: files, syntax trees, imports, configuration keys."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_origin

import pydantic
import yaml
from pydantic.fields import FieldInfo

from shardwise.config import Config, UserModelConfig
from shardwise.config.model import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "shardwise"
CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))


def package_files() -> list[Path]:
    """The files of the package and of those beside it."""
    return sorted(SOURCE.rglob("*.py"))


def python_files() -> list[Path]:
    """Every Python file that the project keeps, tests included."""
    folders = ("src", "tests", "benchmarks", "scripts", "examples")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a file imports; `from a import b` gives `a.b`."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` of an attribute chain, None of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else None
    return None


def attribute_names(path: Path) -> set[str]:
    return {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)}


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


@cache
def headings(page: Path) -> set[str]:
    """Of a page of the documentation, as links name them."""
    found = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def models_of(annotation: object) -> list[type[pydantic.BaseModel]]:
    """The pydantic models that a field's annotation mentions, unions and Annotated included, values of mappings not."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    if get_origin(annotation) is dict:
        return []
    return [model for argument in getattr(annotation, "__args__", ()) for model in models_of(argument)]


def config_fields(model: type[pydantic.BaseModel] = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """Every key of a recipe, dotted, with its field."""
    found = {}
    for name, field in model.model_fields.items():
        # The annotation of `model` names the base class of the families, not each of them.
        inner = models_of(field.annotation)
        if name == "model":
            inner = [*FAMILIES.values(), UserModelConfig]
        for child in inner:
            found |= config_fields(child, f"{prefix}{name}.")
        if not inner:
            found[f"{prefix}{name}"] = field
    return found
