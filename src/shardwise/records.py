"""The records in a run's folder: mappings whose fields have the types that a run writes, or are not there.

A crash, another program or another version may have left anything in these files. A field of another type counts as one
that was never recorded, which every reader of an older run's folder has to bear anyway.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from shardwise.files import read_plain
from shardwise.parsing import json_value

_T = TypeVar("_T")
_LARGEST_COUNT, _LARGEST_AMOUNT = 10**18, 1e30
"""Beyond any step, byte or FLOP; arithmetic with them stays exact, and finite."""
_NOT_FINITE = ("nan", "inf", "-inf")


def count_of(value: Any) -> int | None:
    """A whole number from 0 on; None of anything else."""
    return value if type(value) is int and 0 <= value <= _LARGEST_COUNT else None


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


def _mapping_of(kind: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any] | None]:
    def mapping(value: Any) -> dict[str, Any] | None:
        is_mapping = isinstance(value, Mapping)
        return {str(name): one for name, one in value.items() if kind(one) is not None} if is_mapping else None

    return mapping


def _stages(value: Any) -> list[dict[str, Any]] | None:
    stages = [_mapping_of(_amount)(stage) or {} for stage in value] if isinstance(value, list) else []
    return stages if stages and all({"forward", "backward"} <= stage.keys() for stage in stages) else None


def typed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without the fields that have another type than a run writes; unknown fields stay as they are."""
    kept = {}
    for name, value in record.items():
        kind = _KINDS.get(name)
        if kind is None or value is None:
            kept[name] = value
        elif (known := kind(value)) is not None:
            kept[name] = known
    return kept


def _record(value: Any) -> dict[str, Any] | None:
    return typed(value) if isinstance(value, Mapping) else None


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
        grad_norm loss loss_spike lr mfu param_norm peak_tokens_per_second perplexity samples samples_per_second tokens
        tokens_per_second tokens_per_second_per_device
    """,
    _text: "attention by device event host how id job kind path reason started text time",
    _mapping_of(_amount): """
        allocator_bytes communication_bytes memory_bytes memory_expected_bytes split_seconds waited_seconds
    """,
    _mapping_of(count_of): "place",
    _mapping_of(_text): "precision",
    _record: "layout mfu_terms straggler",
    _stages: "stage_seconds",
}
_KINDS = {name: kind for kind, names in _FIELDS.items() for name in names.split()}
"""By name of a field what it holds. A name means the same in all files of a run's folder."""


def record_of(text: str | bytes, loads: Callable[[str | bytes], Any] = json.loads) -> dict[str, Any]:
    """The record in a text, which is a file or a line, by a parser such as Python's.

    Raises:
        ValueError: it is no JSON object.
    """
    value = json_value(text, loads)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return typed(value)


def read_record(path: Path) -> dict[str, Any]:
    """The record that is a file's whole content.

    Raises:
        OSError: it cannot be read. ValueError: it is no JSON object.
    """
    return record_of(read_plain(path))


def instance(cls: type[_T], record: Mapping[str, Any]) -> _T:
    """A dataclass whose fields are those of a record.

    Raises:
        ValueError: a field is missing, or has another type than the class says.
    """
    hints, values = get_type_hints(cls), {}
    for field in fields(cls):  # type: ignore[arg-type]
        if field.name in record and _matches(record[field.name], hints[field.name]):
            values[field.name] = record[field.name]
        elif field.name in record or field.default is MISSING:
            raise ValueError(f"{field.name} must be {hints[field.name]}")
    return cls(**values)


def _matches(value: Any, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(_matches(value, one) for one in get_args(hint))
    if hint is int:
        return count_of(value) is not None
    if hint is float:
        return _amount(value) is not None
    return value in get_args(hint) if get_args(hint) else type(value) is (NoneType if hint is None else hint)
