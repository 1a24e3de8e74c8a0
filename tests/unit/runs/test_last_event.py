"""The last event of a kind, of a run that may have had several jobs and have gigabytes of lines."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from shardwise.runs import events
from shardwise.runs.events import last_event
from shardwise.runs.folder import RunDirectory


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
