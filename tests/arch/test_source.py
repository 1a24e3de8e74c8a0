"""Rules of the source that no tool of `make lint` checks."""

import ast
import re
from pathlib import Path
from typing import get_args

from shardwise.config.optimizer_specs import OPTIMIZERS
from tests.arch.source import (
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
        if path.name != "test_source.py"
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
