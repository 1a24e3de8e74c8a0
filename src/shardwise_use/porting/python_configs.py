"""Settings in configs that are Python programs, read from the syntax tree: nothing in them is executed."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from shardwise.base.errors import ConfigError, listing
from shardwise.config.translation import computed

_MOST_CALLS = 40
"""Calls and names inside each other, as a name may stand for itself."""
_CONVERSIONS = ("int", "float", "str", "dict", "cast", "round")


class UnknownValue(str):
    """Code whose value is known to the program alone."""


def python_settings(text: str, file: str, wanted: str | None) -> dict[str, Any]:
    """The settings of a config by the dotted names of arguments, such as `training.local_batch_size`.

    Args:
        file: its name in errors.
        wanted: the function that returns the config; None for the only one.

    Raises:
        ConfigError: it is no Python, or has several configs and none is named.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{file} is no Python program: {error}") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    configs = {name: node for name, node in functions.items() if _returned(node) is not None}
    reader = _Reader(_assigned(tree.body), configs)
    if wanted is None and len(configs) != 1:
        roots = [node for name, node in reader.values.items() if _is_config(node) and not _is_part(name, reader.values)]
        if len(configs) > 1 and not roots:
            raise ConfigError(f"{file} has several configs: name one, as in {file}:NAME, of {listing(configs, 'or')}")
        for root in roots[-1:] or [None]:
            plain = {name: node for name, node in reader.values.items() if root is None}
            for name, node in plain.items():
                reader.read(node, name)
            if root is not None:
                reader.read(root, "")
        return reader.settings
    if wanted is not None and wanted not in configs:
        raise ConfigError(f"{file} has no config {wanted}: it has {listing(configs, 'and') or 'none'}")
    reader.read(ast.Call(ast.Name(wanted or next(iter(configs))), [], []), "")
    return reader.settings


def _assigned(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """What names, and attributes of names, are assigned to last."""
    found: dict[str, ast.expr] = {}
    for node in body:
        for inner in ast.walk(node) if not isinstance(node, ast.FunctionDef | ast.ClassDef) else ():
            targets = inner.targets if isinstance(inner, ast.Assign) else []
            targets = [inner.target] if isinstance(inner, ast.AnnAssign) and inner.value else targets
            found |= {ast.unparse(target): inner.value for target in targets}  # type: ignore[union-attr, attr-defined]
    return found


def _returned(function: ast.FunctionDef) -> ast.expr | None:
    """What a function returns, if that is a config."""
    returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    values = _assigned(function.body)
    for value in reversed(returns):
        if _is_config(values.get(ast.unparse(value), value)):
            return value
    return None


def _is_config(node: ast.expr | None) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    return (
        called.endswith("Config")
        or "Config(" in called
        or (not node.args and not node.keywords and called.isidentifier())
    )


def _is_part(name: str, values: Mapping[str, ast.expr]) -> bool:
    """True if another value has this one in it."""
    return any(
        isinstance(inner, ast.Name) and inner.id == name for value in values.values() for inner in ast.walk(value)
    )


class _Reader(Mapping[str, Any]):
    """Reads calls with named arguments; as a mapping, it has the values that names stand for."""

    def __init__(self, values: dict[str, ast.expr], functions: Mapping[str, ast.FunctionDef]) -> None:
        self.values = values
        self.functions = functions
        self.settings: dict[str, Any] = {}
        self._depth = 0

    def __getitem__(self, name: str) -> Any:
        self._depth += 1
        try:
            if self._depth > _MOST_CALLS:
                raise ValueError("it stands for itself")
            return computed(self.values[name], self)
        finally:
            self._depth -= 1

    def __iter__(self) -> Any:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def read(self, node: ast.expr, path: str, depth: int = 0) -> None:
        """Note the settings of a value, under the path of its name."""
        name = ast.unparse(node)
        if depth > _MOST_CALLS:
            raise ConfigError(f"{name[:80]} stands for itself")
        if isinstance(node, ast.Call):
            self._read_call(node, path, depth + 1)
        elif isinstance(node, ast.Dict) and path:
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant):
                    self.read(value, f"{path}.{key.value}", depth + 1)
        elif isinstance(self.values.get(name), ast.Call | ast.Dict):
            self.read(self.values[name], path, depth + 1)
            for changed, value in self.values.items():
                if changed.startswith(f"{name}."):
                    self.read(value, f"{path}.{changed.removeprefix(f'{name}.')}", depth + 1)
        else:
            try:
                self._note(path, computed(node, self))
            except (KeyError, ValueError, TypeError):
                self._note(path, UnknownValue(name))

    def _note(self, path: str, value: Any) -> None:
        self.settings[path.lower().lstrip(".")] = value

    def _read_call(self, call: ast.Call, path: str, depth: int) -> None:
        parts = [part for part in ast.unparse(call.func).split("(")[-1].split(".") if part != "Config"]
        last = parts[-1].rstrip(")")
        if isinstance(call.func, ast.Attribute) and call.func.attr == "with_callback" and len(call.args) == 2:
            self.read(call.func.value, path, depth)
            self.read(call.args[1], f"{path}.callbacks.{getattr(call.args[0], 'value', '')}", depth)
        elif last in self.functions:
            function = self.functions[last]
            returned = _returned(function)
            self.values |= _assigned(function.body)
            self.read(returned or ast.Constant(None), path, depth)
        elif last in _CONVERSIONS and call.args:
            self.read(call.args[-1], path, depth)
        elif not last[:1].islower():
            self._note(f"{path}.class", last)
            for keyword in call.keywords:
                self.read(keyword.value, f"{path}.{keyword.arg}", depth)
        else:
            # A function that makes a part, such as Duration.tokens(10**9) or default_adamw(lr=3e-4).
            for keyword in call.keywords:
                self.read(keyword.value, f"{path}.{last}.{keyword.arg}", depth)
            for argument in call.args[:1]:
                self.read(argument, f"{path}.{last}", depth)
            if not call.args and not call.keywords:
                self._note(f"{path}.preset", last)
