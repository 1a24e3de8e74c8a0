"""The Python API is a contract: names and signatures are frozen in tests/arch/public.txt and change only on purpose.

After a deliberate change, write the file anew: `python tests/arch/test_public.py`.
"""

import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import is_typeddict

import pytest

import shardwise

FROZEN = Path(__file__).with_name("public.txt")
ERRORS = {"train", "plan", "load_recipe", "load_checkpoint", "save_checkpoint", "export_checkpoint"}
"""Functions that read files, and say what they raise."""
_SHAPE = r"`\[[^]`]*\]`"
_SOURCE = r"arXiv:\d{4}\.\d{5}|`torch\.\w+|docs/[\w-]+\.md"


def members(name: str) -> Iterator[tuple[str, object]]:
    """A public object, and the public methods and properties of a class that is not pydantic's."""
    value = getattr(shardwise, name)
    yield name, value
    if not inspect.isclass(value) or hasattr(value, "model_fields") or is_typeddict(value):
        return
    for member, raw in inspect.getmembers_static(value):
        own = next(base for base in value.__mro__ if member in vars(base)).__module__.startswith("shardwise")
        if own and not member.startswith("_"):
            yield f"{name}.{member}", raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw


def described(name: str, value: object) -> str:
    if isinstance(value, cached_property):
        value = property(value.func)
    if isinstance(value, property):
        return f"{name} -> {inspect.signature(value.fget).return_annotation}"
    if hasattr(value, "model_fields"):
        return f"{name}: sections {', '.join(value.model_fields)}"
    if is_typeddict(value):
        return f"{name}: keywords {', '.join(sorted(value.__optional_keys__))}"
    return re.sub(r" at 0x\w+", "", f"{name}{inspect.signature(value)}") if callable(value) else name


def has_signature(value: object) -> bool:
    return callable(value) and not hasattr(value, "model_fields") and not is_typeddict(value)


def current() -> str:
    found = (described(*member) for name in shardwise.__all__ for member in members(name))
    return "\n".join(found) + "\n"


def test_public_signatures_are_frozen() -> None:
    assert current() == FROZEN.read_text(encoding="utf-8"), "run `python tests/arch/test_public.py`, and the changelog"


@pytest.mark.parametrize("name", shardwise.__all__)
def test_what_is_public_is_annotated_and_documented_with_parameters_shapes_and_sources(name: str) -> None:
    """In the docstring of a function or method, or of its class: each parameter, and the shapes of tensors.

    What computes (layers, losses, optimizers) also names the paper or the function of torch that it follows.
    """
    of_class = inspect.getdoc(getattr(shardwise, name)) or ""
    home = getattr(shardwise, name)
    of_rooms = getattr(home, "__module__", "").startswith(("shardwise.layers", "shardwise.optim"))
    if of_rooms and has_signature(home):
        assert re.search(_SOURCE, of_class), f"{name} names no paper or function that it follows"
    for path, value in members(name):
        value = value.fget if isinstance(value, property) else value
        if not has_signature(value):
            continue
        text, signature = f"{inspect.getdoc(value)} {of_class}", inspect.signature(value)
        assert inspect.getdoc(value), f"{path} has no docstring"
        own = {n: p.annotation for n, p in signature.parameters.items() if n not in ("self", "cls")}
        assert signature.empty not in own.values(), f"{path}: a parameter has no annotation"
        if not inspect.isclass(value):
            assert signature.return_annotation is not signature.empty, f"{path} says not what it returns"
        if name in ("plan", "train"):  # which test_functions_say_what_they_take_give_and_raise asks
            continue
        lacking = [n for n in own if n not in ("args", "kwargs") and not re.search(rf"\b{n}\b", text)]
        assert not lacking, f"{path}: the docstring does not tell of {lacking}"
        if any("Tensor" in str(each) for each in (*own.values(), signature.return_annotation)):
            assert re.search(_SHAPE, text), f"{path}: the docstring has no shape"


def test_keywords_that_layers_share_are_documented() -> None:
    groups = [value for name in shardwise.__all__ if is_typeddict(value := getattr(shardwise, name))]
    text = "\n".join(inspect.getdoc(group) or "" for group in groups)
    keywords = {key for group in groups for key in group.__optional_keys__}
    assert "group" in keywords
    lacking = [key for key in sorted(keywords) if not re.search(rf"^ *[\w, ]*\b{key}\b[\w, ]*:", text, re.MULTILINE)]
    assert not lacking, f"no docstring tells of {lacking}"


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_functions_say_what_they_take_give_and_raise(name: str) -> None:
    value = dict(members(name))[name]
    home = inspect.unwrap(value) if inspect.isfunction(value) else _called(name)
    text = inspect.getdoc(home) or ""
    assert {"Args:", "Returns:", "Raises:"} <= set(text.split()), f"{name} lacks a part of its docstring"
    documented = text.partition("Args:")[2]
    lacking = [p for p in inspect.signature(home).parameters if not re.search(rf"\b{p}\b[\w, ]*:", documented)]
    assert not lacking, f"{name}: {lacking} are not documented"


def _called(name: str) -> object:
    """The function behind a package that can be called."""
    from shardwise.api import runs
    from shardwise_plan import api as plans

    return {"plan": plans.plan, "train": runs.train}[name]


if __name__ == "__main__":
    FROZEN.write_text(current(), encoding="utf-8")
