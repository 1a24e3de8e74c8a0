"""A faster search gives the plans of a slower one, to the last digit, and asks few layouts what costs much.

`python tests/unit/plan/test_plans_stay.py` writes the plans anew, where a change of the predictions is meant.
"""

import cProfile
import json
import pstats
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.config import load_config
from shardwise_plan.device_specs import parse_cluster
from shardwise_plan.layout_choices import number_of_choices
from shardwise_plan.search import Search, search_layouts
from tests.command_line import CommandLine
from tests.screens import Log, Screen

PLANS = Path(__file__).with_name("plans.yaml")
PIPELINE = ("parallel.pipeline", "parallel.schedule")
CASES: dict[str, tuple[str, list[str], str, int, tuple[str, ...]]] = {
    "dense, in a pipeline": ("gpt3-23b", ["parallel.pipeline=4", "parallel.schedule=1f1b"], "trn2:16", 2, PIPELINE),
    "with all schedules": ("gpt3-23b", ["train.micro_batch=1"], "h100:8", 2, ("train.micro_batch", "parallel.context")),
    "experts": ("glm4-moe-tiny", [], "h100:8", 1, ("train.micro_batch", "parallel.sequence")),
    "on a CPU": ("llama2-tiny", [], "cpu:4", 1, ("parallel.sequence",)),
}


def plans(name: str) -> list[list[Any]]:
    """The choice of each of the best layouts, the parts of its time in seconds, and those of its memory in bytes."""
    recipe, keys, device, nodes, fixed = CASES[name]
    found = search_layouts(load_config(recipe, keys), parse_cluster(device, nodes), best=4, fixed=fixed).plans
    return [
        [plan.text(), {part: seconds for part, seconds in plan.time.rows() if seconds}, dict(plan.memory.rows())]
        for plan in found
    ]


@pytest.mark.parametrize("name", CASES)
def test_the_plans_stay(name: str) -> None:
    expected = yaml.safe_load(PLANS.read_text(encoding="utf-8"))[name]
    found = plans(name)
    assert [text for text, *_ in found] == [text for text, *_ in expected]
    for (_, seconds, memory), (_, expected_seconds, expected_memory) in zip(found, expected, strict=True):
        assert seconds == pytest.approx(expected_seconds, rel=1e-12), "beyond what another machine's pow() explains"
        assert memory == expected_memory


def test_few_layouts_are_asked_what_costs_much() -> None:
    """Calls of functions, with a quarter more than there are; without bounds and shared results it was 2.5 times."""
    config = load_config("gpt3-23b", ["train.micro_batch=1"])
    fixed = ("train.micro_batch", "parallel.context")
    profile = cProfile.Profile()
    found: Search = profile.runcall(search_layouts, config, parse_cluster("h200:8", 4), best=30, fixed=fixed)
    assert (found.valid, len(found.plans)) == (834, 30)
    stats = pstats.Stats(profile, stream=StringIO())
    counts = {
        name: calls for (_, _, name), (calls, *_) in stats.stats.items() if name in ("makespan", "estimated_memory")
    }
    assert 0 < counts["estimated_memory"] <= 95, counts
    assert 0 < counts["makespan"] <= 95, counts
    assert stats.total_calls <= 1_500_000


def test_how_far_a_search_is(shown: Log, cli: CommandLine) -> None:
    """With the best layout on each number of nodes as it is found; JSON stays one document."""
    out, err = cli("plan", "llama2-tiny", "--device", "h100:2", "--nodes", "1,2", "--json", "parallel.tensor=1")
    assert {plan["nodes"] for plan in json.loads(out)["plans"]} == {1, 2}
    config = load_config("llama2-tiny", ["parallel.tensor=1"])
    number = sum(number_of_choices(config, world, 2, ("parallel.tensor",)) for world in (2, 4))
    assert f"planning on 2 nodes: {number} of {number} choices, 100%" in shown.text()
    on_each = shown.text() if isinstance(shown, Screen) and not err else err
    assert [f"{count}: " in on_each for count in ("1 node", "2 nodes")] == [True, True]


if __name__ == "__main__":
    found = {name: plans(name) for name in CASES}
    text = yaml.safe_dump(found, width=90, default_flow_style=None, allow_unicode=True, sort_keys=False)
    PLANS.write_text(text, encoding="utf-8")
