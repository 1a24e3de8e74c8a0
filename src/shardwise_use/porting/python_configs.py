"""Settings in configs that are Python programs, read from the syntax tree: nothing in them is executed."""

from __future__ import annotations

import ast
from typing import Any, cast

from shardwise.base.errors import ConfigError, listing
from shardwise.config.translation import evaluate_expression

_MOST_CALLS = 40  # calls and names inside each other, as a name may stand for itself
_CONVERSIONS = ("int", "float", "str", "cast", "round")


class UnknownPythonValue(str):
    """Code in a Python config whose value is known to the program alone."""


def python_settings(text: str, file: str, wanted: str) -> dict[str, Any]:
    """The settings of a Python config by dotted names; `wanted`: the function that returns it, if there are several."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"--from ({file}) is no Python program: {error}") from None
    reader = _Reader(tree)
    configs = [name for name, function in reader.functions.items() if _config_of(function) is not None]
    if not wanted and len(configs) == 1:
        (wanted,) = configs
    if wanted or configs:
        if wanted not in configs:
            names = listing(configs, "or") or "none"
            raise ConfigError(f"--from ({file}) must name one config of those in it, as in {file}:NAME: {names}")
        reader.read(ast.Call(ast.Name(wanted), [], []), "")
        return reader.settings
    parts = {inner.id for node in reader.nodes.values() for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    roots = [node for name, node in reader.nodes.items() if _is_config(node) and name not in parts]
    for name, node in {"": roots[-1]}.items() if roots else reader.nodes.items():
        reader.read(node, name)
    return reader.settings


def _assigned(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """The last value that each name, or attribute of a name, is assigned; not in functions and classes."""
    assigned: dict[str, ast.expr] = {}
    for node in body:
        for inner in ast.walk(node) if not isinstance(node, ast.FunctionDef | ast.ClassDef) else ():
            if isinstance(inner, ast.Assign):
                assigned |= {ast.unparse(target): inner.value for target in inner.targets}
            elif isinstance(inner, ast.AnnAssign) and inner.value is not None:
                assigned[ast.unparse(inner.target)] = inner.value
    return assigned


def _config_of(function: ast.FunctionDef) -> ast.expr | None:
    values = _assigned(function.body)
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    return next((value for value in reversed(returned) if _is_config(values.get(ast.unparse(value), value))), None)


def _is_config(node: ast.expr) -> bool:
    """True for a call of a class of configs, of a method of it, or of a function that may return one."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    is_plain = isinstance(node, ast.Call) and not node.args and not node.keywords and called.isidentifier()
    return called.endswith("Config") or "Config(" in called or is_plain


class _Reader:
    """Reads calls with named arguments; `nodes`: what names are assigned to, whose values an index gives."""

    def __init__(self, tree: ast.Module) -> None:
        self.nodes = _assigned(tree.body)
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.settings: dict[str, Any] = {}
        self._depth = 0
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtitan.models."):
                self.settings["module"] = str(node.module).split(".")[2]

    def __getitem__(self, name: str) -> Any:
        self._depth += 1
        try:
            if self._depth > _MOST_CALLS:
                raise ValueError(f"{name} stands for itself")
            return evaluate_expression(self.nodes[name], cast(Any, self))
        finally:
            self._depth -= 1

    def read(self, node: ast.expr, path: str, depth: int = 0) -> None:
        """Note the settings of a value, under the path of its name."""
        name = ast.unparse(node)
        if depth > _MOST_CALLS:
            raise ConfigError(f"{name[:80]} stands for itself")
        if isinstance(node, ast.Call):
            self._read_call(node, path, depth + 1)
        elif isinstance(node, ast.List) and len(node.elts) == 1 and isinstance(node.elts[0], ast.Call):
            self.read(node.elts[0], path, depth + 1)
        elif isinstance(node, ast.Dict) and path:
            for key, inner in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant):
                    self.read(inner, f"{path}.{key.value!s}", depth + 1)
        elif isinstance(self.nodes.get(name), ast.Call | ast.Dict):
            self.read(self.nodes[name], path, depth + 1)
            for changed in [known for known in self.nodes if known.startswith(f"{name}.")]:
                self.read(self.nodes[changed], f"{path}.{changed.removeprefix(f'{name}.')}", depth + 1)
        else:
            try:
                value = evaluate_expression(node, cast(Any, self))
            except (KeyError, ValueError, TypeError):
                # A member of an enumeration, such as DType.bfloat16, has its value's name.
                is_member = isinstance(node, ast.Attribute) and name[:1].isupper() and name.count(".") == 1
                value = name.partition(".")[2] if is_member else UnknownPythonValue(name)
            self._note(path, value)

    def _note(self, path: str, value: Any) -> None:
        self.settings[path.lower().lstrip(".")] = value

    def _read_call(self, call: ast.Call, path: str, depth: int) -> None:
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):  # such as .with_callback
            self.read(call.func.value, path, depth)
            if len(call.args) == 2:
                self.read(call.args[1], f"{path}.callbacks.{getattr(call.args[0], 'value', '')}", depth)
            return
        name = [part for part in ast.unparse(call.func).split(".") if part != "Config"][-1]
        if name in self.functions and (returned := _config_of(self.functions[name])) is not None:
            self.nodes |= _assigned(self.functions[name].body)
            self.read(returned, path, depth)
            return
        if name in _CONVERSIONS and call.args:
            self.read(call.args[-1], path, depth)
            return
        # A function makes a part too, such as Duration.tokens(10**9) or default_adamw(lr=3e-4).
        is_class = not name[:1].islower() or name == "dict"
        inner = path if is_class else f"{path}.{name}"
        if path.isidentifier():
            self._note(path, UnknownPythonValue(ast.unparse(call)))
        if is_class or not call.args:
            self._note(f"{path}.{'class' if is_class else 'preset'}", name)
        for argument in call.args[:0] if is_class else call.args[:1]:
            self.read(argument, inner, depth)
        for keyword in call.keywords:
            self.read(keyword.value, f"{inner}.{keyword.arg}", depth)
