"""The loads of experts over a run, from the file of its folder that has a line for each logged step."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Mapping
from typing import Any

from shardwise_watch.json_lines import GrowingFile
from shardwise_watch.run import RunView
from shardwise_watch.step_metrics import ranges_of_equal_counts

_RECENT_STEPS = 20
_COLUMNS = 60


def load_maps(run: RunView) -> dict[str, dict[str, Any]]:
    """Return by name the arguments of `chart.load_map` on loads over the mean of their block; {} without loads.

    `expert_loads` is of the last 20 recorded steps, and `largest_loads` the mean of a block's largest loads in each
    part of the run. Steps that were undone are left out, as they are in `run`.
    """
    loads: dict[int, Mapping[str, list[int]]] = {}
    largest: dict[int, array[float]] = {}
    shape: Mapping[str, int] = {}
    recent = {*run.series.steps[-_RECENT_STEPS:]}
    with contextlib.suppress(OSError):
        for line in GrowingFile(run.directory.path / "experts.jsonl", all_steps=True).new():
            # Another program may have changed the file.
            with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError, ArithmeticError):
                step, blocks = line["step"], line["loads"]
                sizes = {name: len(block) for name, block in blocks.items()}
                if sizes == (shape := shape or sizes):
                    largest[step] = array("f", [max(block) * len(block) / sum(block) for block in blocks.values()])
                    loads |= {step: blocks} if step in recent else {}
    steps = [step for step in run.series.steps if step in largest]
    shown = [step for step in steps if step in loads]
    if not shown:
        return {}
    columns = [steps[begin:stop] for begin, stop in ranges_of_equal_counts(len(steps), _COLUMNS)]
    return {
        "expert_loads": {
            "title": "Load of each expert over the mean of its block",
            "axis": "expert",
            "note": f"mean of steps {shown[0]:,} to {shown[-1]:,}; a row for each block",
            "rows": {name: _over_the_mean([loads[step][name] for step in shown]) for name in shape},
        },
        "largest_loads": {
            "title": "Largest load of a block over its mean",
            "axis": "step",
            "note": "a row for each block",
            "rows": {
                name: [
                    (column[-1], round(sum(largest[step][row] for step in column) / len(column), 3))
                    for column in columns
                ]
                for row, name in enumerate(shape)
            },
        },
    }


def _over_the_mean(loads: list[list[int]]) -> list[tuple[int, float]]:
    sums = [sum(of_expert) for of_expert in zip(*loads, strict=True)]
    return [(expert, round(load * len(sums) / sum(sums), 3)) for expert, load in enumerate(sums)]
