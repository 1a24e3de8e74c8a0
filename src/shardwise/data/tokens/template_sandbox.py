"""The sandbox of chat templates, as in transformers, with a bound on what a template may write and how long it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# Unicode has these two for use within a program: they stand for the bounds of an answer until the text is complete.
BEGIN = "\ufdd0"
END = "\ufdd1"
MOST_WORK = 1 << 26
"""The characters at most that a template writes for a conversation; a round of a loop counts as `_ROUND` of them."""
_ROUND = 16


class SandboxedTemplate:
    """A chat template that is ready to run; TemplateError where its source is no jinja2."""

    def __init__(self, source: str) -> None:
        self._sandbox = _Sandbox()
        self._source = source
        self._code = self._sandbox.from_string(source)

    def render(self, values: Mapping[str, Any]) -> str:
        """The text; TemplateError if the template refuses the values, or works too long."""
        self._sandbox.work = 0
        return self._code.render(values)

    def names(self) -> set[str]:
        """The names of fields and of variables, and the texts, that the template has."""
        tree = self._sandbox.parse(self._source)
        names: set[str] = {node.attr for node in tree.find_all(nodes.Getattr)}
        names |= {node.name for node in tree.find_all(nodes.Name)}
        return names.union(str(node.value) for node in tree.find_all(nodes.Const))


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with the functions and filters of transformers, which counts the work of a rendering."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=self._written,
        )
        self.work = 0
        # jinja2's own filter escapes HTML.
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now(UTC).astimezone().strftime(form)
        self.globals["namespace"] = _Namespace

    def count(self, work: int) -> str:
        """Counts work in characters, in each round of a loop and each call of a macro too."""
        self.work += work
        if self.work > MOST_WORK:
            raise TemplateError(
                f"it must write at most {MOST_WORK:,} characters, of which a round of a loop counts as {_ROUND}"
            )
        return ""

    def joined(self, *values: Any) -> str:
        """The text of jinja2's operator `~`."""
        texts = [str(value) for value in values]
        self.count(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The value of an operator, whose size is counted before it is made."""
        sizes = [len(value) for value in (left, right) if isinstance(value, str | list | tuple)]
        number = next((value for value in (right, left) if isinstance(value, int)), 1)
        if operator == "**" and isinstance(left, int):
            self.count(left.bit_length() * abs(number))
        elif operator == "*" and sizes:
            self.count(sizes[0] * max(0, number))
        elif operator == "+":
            self.count(sum(sizes))
        return super().call_binop(context, operator, left, right)

    def _written(self, value: Any) -> Any:
        self.count(len(value) if isinstance(value, str) else _ROUND)
        return value

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        return tree


class _Counted(NodeTransformer):
    """Lets a template count its work: the text of each round of a loop and of each macro, and of each `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        counted = self._with_count(node)
        if node.test is not None:  # what it leaves out is a round too
            node.test = nodes.Or(_call("count", [nodes.Const(_ROUND)]), node.test)
        return counted

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_count(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes).set_lineno(node.lineno)

    def _with_count(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        size = _ROUND + sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_call("count", [nodes.Const(size)])).set_lineno(node.lineno))
        return node


def _call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


class _Namespace(Namespace):
    """jinja2's namespace without names of Python's internals, by which a template could leave the sandbox."""

    def __init__(self, /, *args: Any, **values: Any) -> None:
        given = dict(*args, **values)
        for name in given:
            _require_public(name)
        super().__init__(given)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: str) -> None:
    if name.startswith("_"):
        raise TemplateError(f"a namespace must have no name that begins with _, such as {name}")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which puts a private character before and after the text of an answer."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{BEGIN}{caller()}{END}"
