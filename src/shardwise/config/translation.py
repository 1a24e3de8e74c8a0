"""Settings of another program in keys of recipes, by the record of `other_names.yaml`."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticUndefined

from shardwise.base.yaml_and_json import parse_value, yaml_scalar
from shardwise.config.other_names import ABSENT, FORMULAS, NO, OTHER_NAMES, PROGRAMS, UNSURE, WITHOUT_KEY, WORDS
from shardwise.config.pydantic_errors import known_paths

_UNSET = (None, "", -1, "auto")  # values by which programs say that a setting is left out
_VALUE = "VALUE"
_MOST_BASE = 1024
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}

_ROUNDINGS: dict[str, Callable[[Any], int]] = {"floor": math.floor, "ceil": math.ceil}


@dataclass(frozen=True)
class Setting:
    """The translation of a setting of another program."""

    name: str
    value: Any
    keys: Mapping[str, Any] = field(default_factory=dict)  # our keys and options with their values
    reason: str = ""  # why there is none, or none with this value; empty if the name is not known
    is_default: bool = False  # True if the program does so where the setting is left out


class _NoCounterpartError(Exception):
    """A value has none here; the text says why."""


def evaluate_expression(expression: str | ast.expr, quantities: Mapping[str, Any]) -> Any:
    """The value of a formula that translates a setting, of numbers, texts, lists, mappings and dotted names.

    Raises:
        KeyError: a quantity is not known. ValueError: the expression has something else in it, such as another call
            than of `floor` and `ceil`.
    """
    if isinstance(expression, str):
        expression = ast.parse(expression.replace("×", "*").strip(), mode="eval").body

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() | ast.Attribute():
                return quantities[ast.unparse(node)]
            case ast.List() | ast.Tuple():
                return [value(element) for element in node.elts]
            case ast.Dict() if None not in node.keys:
                return {value(key): value(inner) for key, inner in zip(node.keys, node.values, strict=True) if key}
            case ast.Subscript():
                return value(node.value)[value(node.slice)]
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.BinOp() if type(node.op) in _OPERATORS:
                first, second = value(node.left), value(node.right)
                if not isinstance(first, int | float) or not isinstance(second, int | float):
                    raise ValueError("no numbers")
                if isinstance(node.op, ast.Pow) and max(abs(first), abs(second)) > _MOST_BASE:
                    raise ValueError("too large a power")
                return _OPERATORS[type(node.op)](first, second)
            case ast.IfExp(test=ast.Compare(left=left, ops=[ast.GtE()], comparators=[least])):
                return value(node.body if value(left) >= value(least) else node.orelse)
            case ast.Call(func=ast.Name(id=name), args=[quantity], keywords=[]) if name in _ROUNDINGS:
                return _ROUNDINGS[name](value(quantity))
        raise ValueError(f"{ast.unparse(node)} is no value")

    try:
        return value(expression)
    except (TypeError, IndexError, ArithmeticError, RecursionError) as error:
        raise ValueError(str(error)) from None


def equation(name: str, target: str, value: object) -> str:
    """The meaning of another program's name and value: `train.steps=20`, `optimizer.lr=VALUE`, or a formula."""
    shown = _VALUE if value in (None, "", True) else str(value)
    key, _, fixed = target.partition("=")
    formula = FORMULAS.get((name, target))
    if formula is not None:
        return f"{target} = {formula.replace(_VALUE, shown)}"
    if fixed or target.startswith("--"):
        return target
    try:
        keys = _by_words(key, value) if key in WORDS and shown != _VALUE else {key: shown}
    except _NoCounterpartError:
        keys = {key: _VALUE}
    return " ".join(f"{key}={setting_text(mapped)}" for key, mapped in keys.items())


def setting_text(value: Any) -> str:
    """A key's value as a command line has it after `key=`."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(setting_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {setting_text(inner)}' for key, inner in value.items())}}}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _word_of(value: Any) -> str:
    """A value as the record has it among words: in lower case, 0.0 as 0."""
    number = _number(value)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return f"{number:g}" if is_number else str(value).lower()


def _by_words(owner: str, value: Any) -> dict[str, Any]:
    """Our keys for a value that is written otherwise here; `owner`: our key, or a name with words of its own."""
    words = WORDS[owner]
    word = _word_of(value)
    mapped = words.get(word, words.get(word.rpartition("/")[2], words.get("*", _NoCounterpartError)))
    if mapped is _NoCounterpartError:
        raise _NoCounterpartError(f"{owner} has nothing like {value}")
    if isinstance(mapped, dict) and all("." in key for key in mapped):
        return mapped
    if isinstance(mapped, str) and " " in mapped:
        raise _NoCounterpartError(mapped)
    return {owner: value if mapped == _VALUE else mapped}


def _meaning(name: str, value: Any, quantities: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Our keys and options with their values for a name; NoCounterpartError, or KeyError for an unknown quantity."""
    if name in WORDS and {_word_of(value), _word_of(value).rpartition("/")[2]} & WORDS[name].keys():
        mapped = _by_words(name, value)
        if mapped == {name: None}:
            return {}
    else:
        mapped = {}
    targets = OTHER_NAMES.get(name, ())
    if not mapped and not targets:
        raise _NoCounterpartError(WITHOUT_KEY.get(name, f"{name} has nothing like {value}"))
    for target in filter(has, targets):
        key, _, fixed = target.partition("=")
        if key in mapped:
            continue
        if name in UNSURE and (len(targets) == 1 or all(map(has, targets))):
            raise _NoCounterpartError(f"it may mean {' or '.join(targets)}")
        if fixed:
            is_off = str(value).lower() in NO
            if not is_off or fixed in ("true", "false"):
                mapped[key] = (fixed == "false") if is_off else parse_value(fixed, key)
        elif formula := FORMULAS.get((name, target)):
            mapped[key] = _by_formula(key, formula, {**quantities, _VALUE: _number(value)})
        elif key in WORDS:
            mapped |= {key: None} if value is None else _by_words(key, value)
        elif key == "data.path" and isinstance(value, list):
            mapped |= {key: value[0]} if len(value) == 1 else {"data.blend": value}
        else:
            mapped[key] = value
    if (
        targets
        and not any(map(has, targets))
        and all(ABSENT.get(target.partition("=")[0], mapped) != value for target in targets)
    ):
        family = quantities.get("model.family")
        raise _NoCounterpartError(f"the family {family} has no key for it" if family else "no key sets it")
    return mapped


def _number(value: Any) -> Any:
    return yaml_scalar(value) if isinstance(value, str) else value


def _by_formula(key: str, formula: str, quantities: Mapping[str, Any]) -> Any:
    """The value of our key by a formula, or by two with `per` between them, whose value is a rule for the batch."""
    first, _, per = formula.partition(" per ")
    try:
        value = evaluate_expression(first, quantities)
        ranks = evaluate_expression(per, quantities) if per else None
    except ValueError as error:
        raise _NoCounterpartError(str(error)) from None
    if isinstance(value, float) and (value.is_integer() or is_integer_key(key)):
        if not value.is_integer() and key.endswith("_batch"):
            raise _NoCounterpartError(f"{key} ({value:g}) must be a whole number of sequences")
        value = max(0, int(value + 0.5))
    elif isinstance(value, float):
        value = float(f"{value:.12g}")  # such as 0.1 × 3e-4
    if is_integer_key(key) and value < 0:
        raise _NoCounterpartError(
            f"{key} would be {value}, as rates end after the training: give train.steps their last step, and "
            "train.stop_after the last one of the training"
        )
    if ranks is not None:
        return f"{value} per {ranks} rank{'' if ranks == 1 else 's'}"
    return value


def is_integer_key(key: str) -> bool:
    """Return whether a key of ours has whole numbers alone."""
    key_field = known_paths().get(key)
    return key_field is not None and key_field.annotation in (int, int | None)


def translate_settings(
    settings: Mapping[str, Any],
    program: str | None,
    known: Mapping[str, Any],
    has: Callable[[str], bool],
    find: Callable[[str], str | None],
) -> Iterator[Setting]:
    """Yield what becomes of each setting, and of what the program does where settings are left out.

    Args:
        settings: values by names of the program, in lower case with underscores.
        program: the program's name in the record; None if it is not known.
        known: values of keys of ours that count where no setting says otherwise.
        has: returns whether one of our targets is valid, as keys of a model depend on its family.
        find: returns the name in the record that a setting's name stands for; None if there is none.
    """
    spec = PROGRAMS.get(program or "")
    defaults = {name: value for name, value in (spec.defaults if spec else {}).items() if name not in settings}
    given = {name: value for name, value in settings.items() if value not in _UNSET}
    # First comes what switches something off, such as evaluation.
    given = dict(sorted(given.items(), key=lambda item: item[0] not in WORDS))
    base = {key: field.default for key, field in known_paths().items() if field.default is not PydanticUndefined}
    translator = _Translator(base | (spec.keys if spec else {}) | dict(known), program, has, find)
    # Formulas come last, in the order of the record: of a key, what is given before what a program does by default.
    every = [(name, value, values is defaults) for values in (given, defaults) for name, value in values.items()]
    for item in sorted(every, key=lambda item: translator.place(item[0])):
        yield translator.row(*item)


@dataclass
class _Translator:
    """The keys of a recipe that are known while the settings of a file are read."""

    _base: Mapping[str, Any]
    _program: str | None
    _has: Callable[[str], bool]
    _find: Callable[[str], str | None]
    _keys: dict[str, Any] = field(default_factory=dict)
    _complete: set[str] = field(default_factory=set)

    def place(self, name: str) -> int:
        """Return the place in the record of the last key that a setting gives by a formula; -1 if it gives none."""
        record = self._find(name) or name
        keys = [*dict.fromkeys(key for _, key in FORMULAS)]
        return max((keys.index(key) for owner, key in FORMULAS if owner == record), default=-1)

    def _reads(self, name: str) -> set[str]:
        record = self._find(name) or name
        formulas = [formula for (owner, _), formula in FORMULAS.items() if owner == record]
        return {key for formula in formulas for key in re.findall(r"\b[a-z_]+\.[a-z_]+\b", formula)}

    def row(self, name: str, value: Any, is_default: bool) -> Setting:
        """Return what becomes of a setting, and remember our keys."""
        record = self._find(name)
        keys = self._keys
        try:
            is_told = self._program is None and record in WITHOUT_KEY
            if is_told or record is None or (record not in OTHER_NAMES and record not in WORDS):
                return Setting(name, value, reason=WITHOUT_KEY.get(record or "", ""), is_default=is_default)
            mapped = _meaning(record, value, {**self._base, **keys}, self._has)
        except _NoCounterpartError as error:
            return Setting(name, value, reason=str(error), is_default=is_default)
        except KeyError as error:
            return Setting(name, value, reason=f"needs {error.args[0]}, which is not known", is_default=is_default)
        # A formula such as that of one of two betas changes what is there.
        fixed = {key for key in mapped if key in keys and (key in self._complete or key not in self._reads(name))}
        if is_default and fixed:
            return Setting(name, value, is_default=True)
        taken = {key for key in fixed if keys[key] != mapped[key]}
        if taken and len(taken) == len(mapped):
            return Setting(name, value, reason=f"{', '.join(sorted(taken))} is {keys[min(taken)]} by another setting")
        mapped = {key: mapped[key] for key in mapped if key not in taken}
        keys.update(mapped)
        self._complete.update(mapped if self.place(name) < 0 else ())
        return Setting(name, value, mapped, "" if mapped else "nothing to set", is_default)
