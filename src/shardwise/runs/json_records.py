"""The JSON records in a run's folder: mappings whose fields have the types that a run writes, or are missing.

A crash, another program or another version may have left anything in these files. A field of another type counts as one
that was never recorded, which every reader of an older run's folder has to bear anyway.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shardwise.base.files import read_plain
from shardwise.base.yaml_and_json import count_of, json_value

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_T = TypeVar("_T")
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
