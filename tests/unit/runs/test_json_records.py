"""Records of a run's folder: JSON with bounds, and fields of the types that a run writes."""

import math
import os
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.files import read_plain
from shardwise.base.parsing import json_value
from shardwise.runs.json_records import record_instance, record_of_json, typed_record
from shardwise_jobs.restarts import AttemptEnding
from tests.monitor_runs import ending

WRONG: list[Any] = ["12", [1], {}, True, -1, 10**400, math.nan]


def test_fault_21_json_has_bounds_and_fields_have_types() -> None:
    for text in ["[" * 65 + "]" * 65, '{"a": ' * 100_000, "[" * 100_000, "9" * 5000, "", "{"]:
        for given in (text, text.encode()):
            with pytest.raises(ValueError, match=r"it has more than 64 levels of lists and mappings|line 1|4300"):
                json_value(given)
    for value in WRONG:
        names = ["step", "step_seconds", "event", "split_seconds", "place", "stage_seconds"]
        fits = {"split_seconds": [{}], "place": [{}], "event": ["12"]}
        found = typed_record(dict.fromkeys(names, value))
        assert found == {name: value for name in names if value in fits.get(name, [])}
    event = {
        "event": "step", "step": 3, "loss": "nan", "grad_norm": math.inf, "lr": 0, "mfu": None, "custom": [1],
        "split_seconds": {"data": 0.5}, "place": {"pp": 0},
        "stage_seconds": [{"stage": 0, "forward": 1, "backward": 2.0}],
    }  # fmt: skip
    assert typed_record(event) == event
    assert typed_record({"split_seconds": {"data": 0.5, "other": "x"}}) == {"split_seconds": {"data": 0.5}}
    with pytest.raises(ValueError, match="it is no JSON object"):
        record_of_json("[]")


@pytest.mark.parametrize("field", ["seconds", "how"])
def test_fault_21_a_class_takes_a_record_of_its_types_alone(field: str) -> None:
    record = ending("failed", 5.0, 9.0, 3)
    assert record_instance(AttemptEnding, record).step == 3
    with pytest.raises(ValueError, match=field):
        record_instance(AttemptEnding, record | {field: [1]})
    if field == "how":  # others have a default
        with pytest.raises(ValueError, match=field):
            record_instance(AttemptEnding, {name: value for name, value in record.items() if name != field})


def test_fault_21_large_files_and_pipes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.base.files.MOST_BYTES", 1 << 20)
    (tmp_path / "large").write_bytes(bytes((1 << 20) + 1))
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (
        ("pipe", "it is no plain file"),
        (".", "Is a directory"),
        ("none", "No such file"),
        ("large", "it has more than 1 MiB"),
    ):
        with pytest.raises(OSError, match=reason):
            read_plain(tmp_path / name)
