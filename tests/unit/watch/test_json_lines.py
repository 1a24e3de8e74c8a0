"""Reading of files that grow, are cut, are replaced, or end in half a line."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise_watch import json_lines
from shardwise_watch.json_lines import GrowingFile, last_lines
from shardwise_watch.run import RunView
from tests import monitor_runs


def text_of(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def step(number: int) -> dict[str, Any]:
    return {"event": "step", "step": number}


START, EVAL = {"event": "start"}, {"event": "eval", "step": 3}


def test_a_line_is_read_once_and_only_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_CHUNK_BYTES", 7)
    file = GrowingFile(tmp_path / "metrics.jsonl", all_steps=True)
    assert not file.was_replaced()
    assert list(file.new()) == []  # it is not there yet
    content, seen = text_of(START, step(1), step(2)), []
    for length in (5, 20, 31, 40, len(content)):
        file.path.write_text(content[:length])
        assert not file.was_replaced()
        seen.append([record["event"] for record in file.new()])
    assert seen == [[], ["start"], [], [], ["step", "step"]]
    assert list(file.new()) == []


@pytest.mark.parametrize(
    "other",
    [text_of(START), text_of(START | {"time": "later"}, step(1), step(2), step(3)), None],
    ids=["cut", "replaced by a longer one", "removed"],
)
def test_a_file_that_is_another_one_is_read_from_its_beginning(other: str | None, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text_of(START, step(1), step(2)))
    file = GrowingFile(path, all_steps=True)
    assert len(list(file.new())) == 3
    assert not file.was_replaced()
    if other is None:
        path.unlink()
    else:
        path.write_text(other)
    assert file.was_replaced()
    assert len(list(file.new())) == (other or "").count("\n")


def test_the_last_steps_and_lines_of_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first, second = [step(number) for number in range(1, 101)], [step(number) for number in range(51, 201)]
    path.write_text(text_of(START, *first, EVAL, START, *second[:120], EVAL, *second[120:]))
    found = list(GrowingFile(path, all_steps=False).new())
    assert found == [START, step(100), EVAL, START, *second[86:120], EVAL, *second[120:]]
    path = tmp_path / "restarts.jsonl"
    path.write_text(text_of(*map(step, range(1, 10))) + '{"half')
    assert list(last_lines(path, 80)) == [step(9), step(8)]
    assert len(list(last_lines(path, 10_000))) == 9
    assert list(last_lines(tmp_path / "none", 80)) == []


@pytest.mark.parametrize("steps", [3, 400])
def test_the_last_start_of_a_rank_is_found_wherever_it_is(steps: int, tmp_path: Path) -> None:
    starts = [monitor_runs.Start(0, 300, "failed: x"), monitor_runs.Start(10, 10 + steps)]
    path = monitor_runs.write_run(tmp_path / "run", starts, mesh=monitor_runs.Mesh(1, 1, 1, 1))
    file = path / "ranks/rank-0000.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    later = [record for record in records if record.get("event") == "start"][-1] | {"host": "moved"}
    records[-1 - steps] = later
    file.write_text(text_of(*records))
    (rank,) = RunView(path, all_steps=False).ranks()
    assert (rank.host, rank.last) == ("moved", records[-1])
    works = sorted(record["work_seconds"] for record in records[-min(steps, 20) :])
    assert rank.work_seconds == works[len(works) // 2], "the steps of the former start do not count"
