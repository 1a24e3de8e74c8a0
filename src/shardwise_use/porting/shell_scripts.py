"""Arguments of training commands in shell scripts, without running anything.

Variables, arrays, defaults and whole-number arithmetic are filled in, in the order of the file, as where the script
runs without arguments and without variables of its own. So are conditions that compare them. Of any other condition,
what all branches assign counts, the last one most, where its value is known.
"""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.base.files import read_plain
from shardwise.base.yaml_and_json import parse_value
from shardwise.config.other_names import VARIABLES
from shardwise.config.translation import evaluate_expression

_STATEMENT = re.compile(
    r"""^[ \t]*(?:export[ \t]+|local[ \t]+|declare[ \t]+(?:-\w+[ \t]+)?)?(?P<name>\w+)(?P<more>\+?)=
    (?P<value>"(?:[^"\\]|\\.)*"|'[^']*'|\([^()]*(?:\([^()]*\)[^()]*)*\)|\$\([^\n]*\)|\$\{[^{}\n]*\}|[^\s;"'(]*)
    [ \t]*;?[ \t]*$
    |^(?P<command>[^\n]+)$""",
    re.MULTILINE | re.VERBOSE,
)
_DEFAULT = re.compile(r"^[ \t]*:?[ \t]*\"?\$\{(\w+):?=([^{}]*)\}\"?[ \t]*$")
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_COMMENT = re.compile(r"(?m)(^|\s)#(?!!).*$")
_END_OF_COMMAND = re.compile(r"\d?[|&;>]")
_BRANCH = re.compile(r"^\s*(if|elif|else|fi)\b(.*)$")
_TEST = re.compile(
    r"""\[\[?\s+(?P<negated>!\s+)?(?:(?P<flag>-[nzv])\s+(?P<only>\S+)
    |(?P<left>\S+)\s+(?P<operator>==?|!=|-eq|-ne|-gt|-ge|-lt|-le)\s+(?P<right>\S+))\s+\]\]?""",
    re.VERBOSE,
)
_OF_BASH = frozenset(
    ("HOSTNAME", "PWD", "OLDPWD", "USER", "UID", "EUID", "PPID", "SHELL", "PATH", "RANDOM", "SECONDS", "OSTYPE", "LANG")
)
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")
}
_PASSES = 8  # the number of passes that fill in variables inside of the values of variables


def script_commands(
    text: str, folder: Path, variables: dict[str, str] | None = None, inner: list[Path] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the settings of each command line of a training script, and of those that it runs, read once each."""
    is_whole = variables is None
    variables = {"HOME": "~"} if variables is None else variables
    inner = [] if inner is None else inner
    text = _COMMENT.sub(r"\1", text.replace("\r", "")).replace("\\\n", " ")
    branches = _Branches(variables, text)
    for statement in _STATEMENT.finditer(text):
        if not branches.run(statement["command"] or ""):
            continue
        if name := statement["name"]:
            # The usual way to name the script's own folder.
            is_folder = statement["value"].startswith("$(") and "dirname" in statement["value"]
            _assign(variables, name, str(folder) if is_folder else statement["value"], more=bool(statement["more"]))
        elif match := _DEFAULT.match(statement["command"]):
            variables.setdefault(match[1], _filled(match[2], variables))
        else:
            words = _words(_filled(statement["command"], variables))
            # What is sourced and not there may set any name.
            branches.knows_unset &= words[:1] not in (["."], ["source"]) or (folder / words[-1]).is_file()
            for script in (folder / word for word in words if word.endswith(".sh")):
                if script not in inner and script.is_file():
                    inner.append(script)
                    yield from script_commands(_text_of(script), folder, variables, inner)
            found_in_it = _settings_of(words)
            told = {name.lower(): [value] for name, value in variables.items() if name.lower() in VARIABLES}
            yield {**{name: _value(values) for name, values in told.items()}, **found_in_it} if found_in_it else {}
    if is_whole:
        # A file may hold the arguments alone, for another script.
        yield _settings_of(_words(_filled(" ".join(value for value in variables.values() if "--" in value), variables)))


class _Branches:
    """The branches of conditions around a line; `knows_unset`: a name without an assignment is unset."""

    def __init__(self, variables: Mapping[str, str], text: str) -> None:
        self.knows_unset = True
        self._variables = variables
        # Names that stand elsewhere than in assignments of their own line, such as in `for`, `read` and `A=1; B=2`.
        others = _STATEMENT.sub(lambda found: found["command"] or found["value"], text)
        self._doubtful = _OF_BASH | set(re.findall(r"[A-Za-z_]\w*", re.sub(r"\$\{?\w+|-v \w+", "", others)))
        if re.search(r"\w\s*\(\)", text):
            self._doubtful |= set("123456789")  # of a function
        # Of each condition around a line: whether its present branch runs, and whether one before did; None: not known.
        self._open: list[tuple[bool | None, bool | None]] = []

    def run(self, command: str) -> bool:
        """Return whether a line runs, or may run, after a command that may begin or end a branch."""
        match = _BRANCH.match(command)
        word = match[1] if match else ""
        if match and not (word == "if" and re.search(r"\bfi\s*$", command)):
            _, before = self._open.pop() if self._open and word != "if" else (None, False)
            if word in ("if", "elif"):
                decided = False if before else self._decided(match[2])
                self._open.append((decided, before or (decided if before is False else None)))
            elif word == "else":
                self._open.append((None if before is None else not before, True))
        return all(runs is not False for runs, _ in self._open)

    def _decided(self, condition: str) -> bool | None:
        first, *further = re.split(r"(&&|\|\|)", condition.rpartition("then")[0] or condition)
        value = self._tested(first)
        for joint, test in zip(further[::2], further[1::2], strict=True):
            stops = joint == "||"
            if value is not stops:
                right = self._tested(test)
                value = right if value is not None or right is stops else None
        return value

    def _tested(self, test: str) -> bool | None:
        match = _TEST.fullmatch(test.strip(" \t;"))
        if not match:
            return None
        parts = [match[name] for name in ("only", "left", "right") if match[name]]
        names = set(re.findall(r"\$\{?(\w+)", " ".join(parts))) | ({parts[0]} if match["flag"] == "-v" else set())
        if names & self._doubtful or not (self.knows_unset or names <= self._variables.keys()):
            return None
        words = [re.sub(r"\$(?:\w+|\{\w+\})", "", _filled(part, self._variables)).strip("\"'") for part in parts]
        is_pattern = test.lstrip().startswith("[[") and match["right"] and re.search(r"[*?[]", words[-1])
        if is_pattern or any("$" in word or "`" in word for word in words):
            return None
        sign = match["operator"] or ""
        if match["flag"]:
            holds = words[0] in self._variables if match["flag"] == "-v" else bool(words[0]) == (match["flag"] == "-n")
        elif sign in _COMPARISONS:
            try:
                holds = _COMPARISONS[sign](*map(int, words))
            except ValueError:  # nothing is no number, and the test fails
                holds = False
        else:
            holds = (words[0] == words[1]) == (sign != "!=")
        return holds != bool(match["negated"])


def _text_of(script: Path) -> str:
    try:
        return read_plain(script).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{script} cannot be read: {error}") from None


def _assign(variables: dict[str, str], name: str, value: str, *, more: bool) -> None:
    literal = value.startswith("'")
    value = value[1:-1] if value.startswith(('"', "'", "(")) else value
    value = value if literal else _filled(value, variables)
    if more:
        value = f"{variables.get(name, '')} {value}"
    if "$" not in value or name not in variables:
        variables[name] = value


def _filled(text: str, variables: Mapping[str, str]) -> str:
    def variable(match: re.Match[str]) -> str:
        value = variables.get(match[1] or match[3])
        return value if value is not None else match[2].strip("\"'") if match[2] is not None else match[0]

    def arithmetic(match: re.Match[str]) -> str:
        numbers = {name: int(value) for name, value in variables.items() if re.fullmatch(r"-?\d{1,18}", value)}
        try:
            return str(
                int(evaluate_expression(re.sub(r"\$\{?(\w+)\}?", r"\1", match[1]).replace("/", "//").strip(), numbers))
            )
        except (KeyError, ValueError, TypeError, SyntaxError):
            return match[0]

    for _ in range(_PASSES):
        filled = _VARIABLE.sub(variable, _ARITHMETIC.sub(arithmetic, text))
        if filled == text or len(filled) > 10**6:
            break
        text = filled
    return text


def _words(line: str) -> list[str]:
    try:
        # Arithmetic that is not known stays one word.
        line = re.sub(r"\$\(\(.*?\)\)+", lambda match: match[0].replace(" ", ""), line.replace("\n", " "))
        words = shlex.split(line)
    except ValueError:
        return []
    end = next((place for place, word in enumerate(words) if _END_OF_COMMAND.match(word)), len(words))
    return [word for word in words[:end] if word not in ("$@", "$*")]


def _settings_of(words: list[str]) -> dict[str, Any]:
    """Settings by their names: `--name value …`, `--name=value`, `--name`, Hydra's `section.name=value`, `trl sft`."""
    given = {"trl": ["sft"]} if ("trl", "sft") in pairwise(words) else {}
    name: str | None = None
    for word in words:
        before, equals, value = word.partition("=")
        if word.startswith("--") and len(word) > 2:
            name = before[2:].lower().replace("-", "_")
            given[name] = [value] if equals else []
            name = None if equals else name
        elif equals and re.fullmatch(r"\+{0,2}[A-Za-z_]\w*(\.\w+)+", before):
            given[before.lstrip("+").lower()] = [value]
            name = None
        elif word.endswith((".py", ".sh")) or re.match(r"-[A-Za-z]", word):
            name = None
        elif name is not None:
            given[name].append(word)
    return {name: _value(values) for name, values in given.items()}


def _value(words: list[str]) -> Any:
    values = [word if "$" in word else parse_value(word, f"the value {word!r}") for word in words]
    return True if not values else values[0] if len(values) == 1 else values
