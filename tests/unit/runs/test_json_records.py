"""What is read of a run's events: JSON with bounds, numbers that must be equal to the bit, the last event, layouts."""

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from shardwise.base.errors import see
from shardwise.base.files import read_plain
from shardwise.base.yaml_and_json import json_value
from shardwise.runs import events
from shardwise.runs.events import last_event
from shardwise.runs.failure_record import FailureRecord, failure_of
from shardwise.runs.folder import RunDirectory
from shardwise.runs.json_records import record_instance, record_of_json, typed_record
from shardwise.runs.layout_spans import layout_spans, spans_text
from shardwise.runs.state_records import StateRecords
from shardwise_jobs.restarts import AttemptEnding
from shardwise_watch.run import open_run
from tests.monitor_runs import FIRST, Start, ending, stamp, write_run
from tests.rows import rows_of

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
    for field in ["seconds", "how"]:
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


def records(folder: Path, *events: dict[str, Any]) -> StateRecords:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return StateRecords.of(RunDirectory(folder))


def step(number: int, loss: float) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": loss, "grad_norm": loss / 2}


def state(number: int, text: str, digests: str, **fields: Any) -> dict[str, Any]:
    return {"event": "state_hash", "step": number, "hash": text, "tensors": {"model": digests}, **fields}


NAMES = {"names": {"model": ["a", "b"]}}


def test_steps_that_were_undone_are_left_out(tmp_path: Path) -> None:
    found = records(
        tmp_path / "run",
        {"event": "start", "ranks": 2, "steps_before": 0},
        step(1, 4.0),
        state(1, "one", "0000000011111111", **NAMES),
        step(2, 3.0),
        state(2, "two", "0000000022222222"),
        {"event": "start", "ranks": 2, "steps_before": 2},
        {"event": "resume", "step": 2, "changes": ["optimizer.lr 1 → 2"]},
        {"event": "start", "ranks": 4, "steps_before": 1},
        {"event": "resume", "step": 1, "changes": ["parallel.tensor 1 → 2"]},
        step(2, 2.5),
    )
    assert found.losses == {1: 4.0, 2: 2.5}
    assert found.norms == {1: 2.0, 2: 1.25}
    assert list(found.hashes) == [1]
    assert found.hashes[1].tensors == {"model/a": "00000000", "model/b": "11111111"}
    assert found.ranks == 4
    assert found.begin == 0
    # The first of them has been in force since the second.
    assert found.changes == [(1, "optimizer.lr 1 → 2"), (1, "parallel.tensor 1 → 2")]


@pytest.mark.parametrize(("until", "step"), [(-1.0, None), (0.0, 0), (100.0, 99), (700.2, 700), (1e9, 999)])
def test_the_last_event_until_a_time_is_found_by_few_reads(until: float, step: int | None, tmp_path: Path) -> None:
    lines = [
        json.dumps({"event": "step", "step": second, "time": f"1970-01-01T00:{second // 60:02}:{second % 60:02}+00:00"})
        for second in range(1000)
    ]
    lines[100] = lines[100][:30]  # a crash
    RunDirectory(tmp_path).metrics.write_text("\n".join(lines) + "\n")
    with patch.object(events, "record_of_json", side_effect=events.record_of_json) as read:
        event = last_event(tmp_path, "step", until=until)
    assert (event and event["step"]) == step
    assert read.call_count < 40


def start(tensor: Any, data: int, steps_before: int | None = None) -> dict[str, Any]:
    layout = {"tensor": tensor, "pipeline": 1, "data": data, "sequence": True}
    event = {"event": "start", "layout": layout}
    return event if steps_before is None else event | {"steps_before": steps_before}


def resume(step: int) -> dict[str, Any]:
    return {"event": "resume", "step": step}


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([], ""),
        ([start(1, 1, 0)], "one process"),
        ([start(2, 1, 0), start(1, 2, 60)], "TP 2 + SP to step 60, then DP 2"),
        ([start(2, 1, 0), start(2, 1, 30), start(1, 2, 60)], "TP 2 + SP to step 60, then DP 2"),
        ([start(2, 1, 0), start(1, 2, 1000), start(1, 1, 2000)],
         "TP 2 + SP to step 1,000, DP 2 to step 2,000, then one process"),
        ([start(2, 1, 0), start(1, 2, 60), start(1, 1, 60)], "TP 2 + SP to step 60, then one process"),
        ([start(2, 1, 0), start(1, 2, 60), start(2, 1, 40)], "TP 2 + SP"),
        ([start(2, 1), start(1, 2), resume(60)], "TP 2 + SP to step 60, then DP 2"),
        ([start("2", 1, 0), start(1, 2, 60)], ""),
    ],
    ids=["none", "one", "two", "merged", "three", "no step", "back", "older", "text"],
)  # fmt: skip
def test_layouts_of_the_steps_that_count(events: list[dict[str, Any]], text: str) -> None:
    assert spans_text(layout_spans(events)) == text


ROWS = rows_of(__file__)

KILLED = FailureRecord(
    time=stamp(FIRST + 1000),
    cause=f"rank 1 was killed (SIGKILL; usually out of memory){see('training#killed-rank')}",
    rank=1,
    log="logs/rank-0001.log",
    step=731,
    checkpoint=600,
    every=200,
    resume="shardwise train quickstart --nproc 2 --run-dir runs/live",
)


def test_a_record_is_a_block_of_lines_without_secrets_or_none(tmp_path: Path) -> None:
    assert KILLED.lines(Path("runs/live")) == [
        "FAILED at step 731: rank 1 was killed (SIGKILL; usually out of memory).",
        "log: runs/live/logs/rank-0001.log",
        "131 steps since checkpoint 600 are lost",
        "resume: shardwise train quickstart --nproc 2 --run-dir runs/live",
        f"see: {see('training#killed-rank').strip(' ()`')}",
    ]
    directory = RunDirectory(tmp_path)
    replace(KILLED, cause="https://me:word@host/x cannot be read").write(directory)
    assert "word" not in directory.failure.read_text()
    assert directory.recorded_failure()["step"] == 731
    facts = asdict(KILLED)
    assert failure_of(facts, {"time": stamp(FIRST + 999)}) == KILLED
    assert failure_of(facts, {}) == KILLED
    assert failure_of(facts, {"time": stamp(FIRST + 1001)}) is None
    assert failure_of({**facts, "step": "many"}, {}) is None
    assert failure_of({**facts, "time": "yesterday"}, {}) is None
    assert failure_of({}, {}) is None


LOST: list[tuple[dict[str, object], str, str | None]] = ROWS["lost"]


@pytest.mark.parametrize(("changes", "heading", "lost"), LOST)
def test_lines_that_do_not_apply_are_left_out(changes: dict[str, object], heading: str, lost: str | None) -> None:
    record = replace(FailureRecord(KILLED.time, "x", step=731, checkpoint=600, every=200), **changes)
    assert record.lines(Path("run")) == [f"FAILED {heading}", *([] if lost is None else [lost])]
    waited = "rank 0 waited for x, and lost the connection"
    assert replace(record, details=waited).lines(Path("run"))[1] == waited


def test_the_state_of_a_run_whose_launcher_recorded_a_failure(tmp_path: Path) -> None:
    """Of a killed rank, rank 0 records nothing, or that it lost a connection."""
    path = write_run(tmp_path / "run", [Start(0, 20, None)])
    run = open_run(path, all_steps=False)
    assert (run.state, run.failure) == ("killed", None)
    KILLED.write(run.directory)
    run.refresh()
    assert (run.state, run.reason) == ("failed", f"failed: {KILLED.cause}")
    replace(KILLED, time=stamp(FIRST)).write(run.directory)
    run.refresh()
    assert run.state == "killed"
