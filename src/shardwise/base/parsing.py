"""Reads JSON and YAML from files that anybody may have written, and the JSON records of a run's folder.

The levels and the number of the values are bounded before any code walks through them: a file of a few bytes can
describe more of both than Python's recursion or the memory takes.

YAML is read by the core schema of YAML 1.2, in which `1e-4` is a number and `no` is a word.

A record in a run's folder is a mapping whose fields have the types that a run writes, or are missing. A crash, another
program or another version may have left anything in these files. A field of another type counts as one that was never
recorded, which every reader of an older run's folder has to bear anyway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shardwise.base.errors import ConfigError
from shardwise.base.files import read_plain

if TYPE_CHECKING:
    import yaml
    from pydantic import TypeAdapter

MOST_LEVELS = 64
"""Mappings and lists inside each other: far more than any file has, and far less than Python's recursion takes."""
MOST_VALUES = 100_000
"""Values of a YAML file, where a value counts at each alias that repeats it: far more than any recipe has."""


# ---- JSON


def json_value(text: str | bytes, loads: Callable[[str | bytes], Any] = json.loads) -> Any:
    """The value of a JSON text; ValueError: no JSON in UTF-8, a number too long, or more levels than `MOST_LEVELS`."""
    problem = f"it has more than {MOST_LEVELS} levels of lists and mappings inside each other"
    try:
        value = loads(text)
    except RecursionError:
        raise ValueError(problem) from None
    # Nearly every text has too few brackets for so many levels: to count them is much faster than to walk.
    brackets = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if brackets > MOST_LEVELS and not _is_within(value, MOST_LEVELS):
        raise ValueError(problem)
    return value


def _is_within(value: Any, levels: int) -> bool:
    """True if a value of JSON has at most so many levels."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        value = []
    return levels > 0 and all(_is_within(inner, levels - 1) for inner in value if isinstance(inner, dict | list))


def json_object(text: str | bytes, file: str) -> dict[str, Any]:
    """The JSON object in the text of a file of a user's, which is `file` in errors; ConfigError if it holds none."""
    try:
        value = json_value(text)
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return value


# ---- YAML

# As Python reads them: an underscore stands between two digits.
_INTEGER = re.compile(r"[-+]?(0|[1-9](_?[0-9])*)")
_FLOAT = re.compile(r"[-+]?([0-9](_?[0-9])*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
# Far below the 4,300 at which Python refuses to read an integer.
_MOST_DIGITS = 1000
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_QUOTED = ("'", '"', "|", ">")
TAG = "tag:yaml.org,2002:"
_STANDARD_TAGS = {TAG + "str", TAG + "map", TAG + "seq"}


class NotReadError(ValueError):
    """A text is no YAML of plain values."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


def yaml_value(text: str, origin: str) -> Any:
    """The value of a YAML text, `origin` in errors; NotReadError: it is none, is too deep or large, or repeats keys."""
    # Costly to import, for readers of JSON.
    import yaml

    # libyaml's loader, where PyYAML was built with it, is several times faster. The base loader gives every scalar as
    # text: `yaml_scalar` decides what a word means.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        root = yaml.compose(text, Loader=loader)
    except RecursionError:
        raise NotReadError([_too_deep(origin)]) from None
    except yaml.YAMLError as error:
        # libyaml has a limit of its own.
        invalid = f"{origin} is not valid YAML: {_reason(error)}"
        raise NotReadError([_too_deep(origin) if "nesting depth" in invalid else invalid]) from None
    except UnicodeError:  # bytes of the command line
        raise NotReadError([f"{origin} must be UTF-8 where its value is in brackets or quotes"]) from None
    if root is None:
        return None
    conversion = _Conversion(origin)
    value = conversion.value(root, ())
    if conversion.problems:
        raise NotReadError(conversion.problems)
    return value


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; OSError if it cannot be read, ValueError if it holds none."""
    value = yaml_value(read_plain(path).decode(), "it")
    if not isinstance(value, dict):
        raise ValueError("it is no mapping")
    return value


def yaml_scalar(text: str) -> bool | int | float | str | None:
    """The value of a plain word in YAML."""
    # `null`, `Null` and `NULL` are the word; `nULL` is a text.
    word = text if text in _WORDS else text.lower()
    if word in _WORDS and text in (word, word.capitalize(), word.upper()):
        return _WORDS[word]
    if _INTEGER.fullmatch(text):
        # Python refuses to read thousands of digits. As a float they are infinite, which no key accepts.
        return int(text) if len(text) < _MOST_DIGITS else float(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _too_deep(origin: str) -> str:
    return f"{origin} must have at most {MOST_LEVELS} levels of lists and mappings inside each other, and it has more"


class _Conversion:
    """The conversion of a tree to values. An alias is a node that is met again."""

    def __init__(self, origin: str) -> None:
        self.problems: list[str] = []
        self._origin = origin
        self._values = 0

    def value(self, node: Any, path: tuple[str, ...]) -> Any:
        # An alias counts as what it repeats: a short text can describe more values than the memory takes.
        self._values += 1
        if len(path) > MOST_LEVELS:
            raise NotReadError([_too_deep(self._origin)])
        if self._values > MOST_VALUES:
            too_many = f"must have at most {MOST_VALUES:,} values, those that aliases repeat included, and it has more"
            raise NotReadError([f"{self._origin} {too_many}"])
        if node.tag not in _STANDARD_TAGS:
            self._add(node, f"{'.'.join(path)} has the tag {node.tag}; only plain values are read")
            return None
        if node.id == "sequence":
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        if node.id == "scalar":
            return node.value if node.style in _QUOTED else yaml_scalar(node.value)
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.id != "scalar":
                self._add(key_node, "a key must be a word")
                continue
            key_path = (*path, key_node.value)
            if key_node.value in mapping:
                self._add(key_node, f"{'.'.join(key_path)} is given twice")
            mapping[key_node.value] = self.value(value_node, key_path)
        return mapping

    def _add(self, node: yaml.Node, problem: str) -> None:
        self.problems.append(f"{self._origin}, line {node.start_mark.line + 1}: {problem}")


def _reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else problem


_T = TypeVar("_T")
# Beyond any step, byte or FLOP; arithmetic with them stays exact, and finite.
_LARGEST_COUNT = 10**18
_LARGEST_AMOUNT = 1e30
_NOT_FINITE = ("nan", "inf", "-inf")


def record_of_json(text: str | bytes, loads: Callable[[str | bytes], Any] = json.loads) -> dict[str, Any]:
    """The record in a JSON text of a run's folder, by a parser such as Python's; ValueError if it is no JSON object."""
    value = json_value(text, loads)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return typed_record(value)


def read_record(path: Path) -> dict[str, Any]:
    """The record that a JSON file of a run's folder holds; OSError if it cannot be read, ValueError if it is none."""
    return record_of_json(read_plain(path))


def typed_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without the fields that have another type than a run writes; unknown fields stay as they are."""
    kept = {}
    for name, value in record.items():
        kind = _KINDS.get(name)
        if kind is None or value is None:
            kept[name] = value
        elif (known := kind(value)) is not None:
            kept[name] = known
    return kept


# ---- the types of fields: each function gives the value, or None where it is of another type


def count_of(value: Any) -> int | None:
    """A value of JSON if it is a whole number from 0 on; None for anything else."""
    return value if type(value) is int and 0 <= value <= _LARGEST_COUNT else None


def whole_number(text: str) -> int | None:
    """The whole number from 0 on that a text of digits gives; None for anything else."""
    return count_of(int(text)) if text.isdecimal() and len(text) < _MOST_DIGITS else None


def _amount(value: Any) -> float | None:
    """A finite number from 0 on: seconds, bytes, a share."""
    return value if type(value) in (int, float) and 0 <= value <= _LARGEST_AMOUNT else None


def _number(value: Any) -> float | str | None:
    """Any number of a training, which may be NaN or infinite, also as the texts that stand for these."""
    if type(value) is float or (type(value) is int and abs(value) <= _LARGEST_AMOUNT):
        return value
    return value if value in _NOT_FINITE else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: Any) -> list[str] | None:
    return value if isinstance(value, list) and all(isinstance(text, str) for text in value) else None


def _mapping_of(kind: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any] | None]:
    """The type of mappings with values of a type; entries with values of another type are left out."""

    def mapping(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, Mapping):
            return None
        return {str(name): inner for name, inner in value.items() if kind(inner) is not None}

    return mapping


def _stages(value: Any) -> list[dict[str, Any]] | None:
    """Seconds of the passes of each pipeline stage."""
    if not isinstance(value, list):
        return None
    stages = [_mapping_of(_amount)(stage) or {} for stage in value]
    return stages if stages and all({"forward", "backward"} <= stage.keys() for stage in stages) else None


def _record(value: Any) -> dict[str, Any] | None:
    return typed_record(value) if isinstance(value, Mapping) else None


_FIELDS: dict[Callable[[Any], Any], str] = {
    count_of: """
        bytes cores data devices format graphs hits host_memory_bytes local_rank memory_in_use_bytes memory_total_bytes
        misses nodes parameters peak_memory_bytes pid pipeline rank ranks step steps steps_before tensor zero
    """,
    _amount: """
        began blocked_seconds bubble device_utilization flops_per_token host_cpu input_seconds load_seconds own
        peak_flops_per_device relative seconds seconds_before_training step_seconds time_to_train_seconds work_seconds
    """,
    _number: """
        bits_per_byte grad_norm loss loss_spike lr mfu param_norm peak_tokens_per_second perplexity samples
        samples_per_second tokens tokens_per_second tokens_per_second_per_device
    """,
    _text: "attention by device event host how id job kind path reason set started task text time",
    _mapping_of(_amount): """
        allocator_bytes communication_bytes memory_bytes memory_expected_bytes split_seconds waited_seconds
    """,
    _mapping_of(_number): "metrics",
    _mapping_of(count_of): "place",
    _mapping_of(_text): "precision tensors",
    _mapping_of(_texts): "names",
    _record: "layout mfu_terms straggler",
    _stages: "stage_seconds",
}
_KINDS = {name: kind for kind, names in _FIELDS.items() for name in names.split()}
"""The type of each field by its name. A name means the same in all files of a run's folder."""


# ---- records as dataclasses


def record_instance(cls: type[_T], record: Mapping[str, Any]) -> _T:
    """A dataclass whose fields are those of a JSON record; ValueError if one is missing, or has another type."""
    read: _T = _adapter(cast(Any, cls)).validate_json(json.dumps(record), strict=True)
    return read


@cache
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    # Costly to import for commands that read none of these records.
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def record_instances(cls: type[_T], path: Path) -> list[_T]:
    """The records of a file of JSON lines as dataclasses; none if the file cannot be read.

    A line that is damaged is left out, such as one that a crash cut short.
    """
    records: list[_T] = []
    with suppress(OSError):
        for line in read_plain(path).splitlines():
            with suppress(ValueError):
                records.append(record_instance(cls, record_of_json(line)))
    return records


_DEEPEST = 20
"""Levels of a configuration that are compared key by key: one from an unknown source may be nested without end."""


def by_dotted_key(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and prefix.count(".") < _DEEPEST:
            flat |= by_dotted_key(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
