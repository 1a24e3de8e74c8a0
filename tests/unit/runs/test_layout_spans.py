"""The layouts of a run's starts, of which only those count whose steps do."""

from typing import Any

import pytest

from shardwise.runs.layout_spans import layout_spans, spans_text


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
