"""The numbers of a run that must be equal to the bit, as they are read from its events."""

import json
from pathlib import Path
from typing import Any

from shardwise.runs.folder import RunDirectory
from shardwise.runs.state_records import StateRecords


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
