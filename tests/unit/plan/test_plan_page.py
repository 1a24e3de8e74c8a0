"""The page of `shardwise plan --html`: what it tells first, its charts, and how a browser shows it."""

import math
import re
import shlex
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import load_config
from tests.command_line import CommandLine
from tests.unit.watch.pages import browsed

COMMAND = ["llama2-7b", "train.global_batch=256", "parallel.pipeline=1", "--device", "h100:8", "--price", "2.50 USD"]


def planned(at: Path, cli: CommandLine, *options: str) -> tuple[str, dict[str, Any]]:
    """The page, and the facts of the same plan."""
    file = at / "plan.html"
    facts = cli.facts("plan", *COMMAND, *options, "--html", file)
    return file.read_text(encoding="utf-8"), facts


def test_the_answer_fits_and_is_written(tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A faster layout that may not fit is told, and neither proposed nor written."""
    monkeypatch.chdir(tmp_path)
    page, facts = planned(tmp_path, cli)
    plans = facts["plans"]
    proposed = {name: each for each in facts["proposals"] for name in each["names"]}
    assert not any(each["may_not_fit"] for each in proposed.values())
    fastest = proposed["fastest"]["layout"]
    assert fastest == facts["recommended"] > 1
    assert all(plan["may_not_fit"] for plan in plans[: fastest - 1])
    reason = proposed["fastest"]["reason"]
    assert re.search(r"layout 1 takes .*, but leaves [\d.]+ .iB and may not fit", reason)
    (text,) = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
    lines = re.sub("</?span>", "", text.replace("&#39;", "'")).splitlines()
    first, second = (line.rstrip() for line in lines if line)
    assert f": {second}\n" in cli(*shlex.split(first)[1:]).err
    chosen = plans[fastest - 1]
    assert load_config("planned.yaml").optimizer.zero == chosen["layout"]["zero"]
    shown = (
        f'<p class="answer">Layout {fastest}: ', f"<b>{chosen['cost']:,.0f} USD</b>", "ZeRO-",
        "Passes of one pipeline rank", "(docs/planner.md, section How far off it is)",
    )  # fmt: skip
    assert [text for text in shown if text not in page] == []
    assert not re.search(r"\bZ[0-3]\b|planner\.md#", page)


def test_each_layout_is_a_dot_that_tells_of_it(tmp_path: Path, cli: CommandLine) -> None:
    page, facts = planned(tmp_path, cli, "--nodes", "1,2,4", "optimizer.zero=1")
    layouts, sizes = re.findall(r'<figure class="dotted">.*?</figure>', page, re.DOTALL)
    assert layouts.count('<g class="point"') >= len(facts["plans"]) == layouts.count('tabindex="0"')
    for number, each in ((proposal["layout"], proposal["names"][0]) for proposal in facts["proposals"]):
        assert re.search(rf'class="key c\d">[^<]*{each}[^<]*: layout {number}<', layouts, re.IGNORECASE)
        assert f'aria-label="Layout {number}: TP ' in layouts
    assert "may not fit: less than a tenth of the memory is free" in layouts
    circle = r'tabindex="0".*?<circle [^>]*cx="([\d.]+)" cy="([\d.]+)" r="([\d.]+)"'
    numbered = [tuple(map(float, found)) for found in re.findall(circle, layouts)]
    assert len(numbered) == len(facts["plans"])
    assert all(math.hypot(x - u, y - v) > r + s - 0.2 for (x, y, r), (u, v, s) in combinations(numbered, 2))
    labels = re.findall(r'aria-label="(\d nodes?): TP .*?<text [^>]*>(\d)</text>', sizes)
    assert labels == [("1 node", "1"), ("2 nodes", "2"), ("4 nodes", "4")]
    days = 1.2 * max(plan["days"] for plan in facts["plans"] if plan["nodes"] == 2)
    (tmp_path / "plan.html").unlink()
    page, facts = planned(tmp_path, cli, "--budget", f"{days:.2f} days", "optimizer.zero=1")
    assert "the answer: 2 nodes" in page
    assert "<polyline" in page, "numbers of nodes that the budget excludes are drawn too"


@pytest.mark.slow
def test_a_browser_shows_it_without_an_error(tmp_path: Path, cli: CommandLine) -> None:
    """On a phone with cards in place of a table, and on a desktop, in the dark; the answer is in the first screen."""
    planned(tmp_path, cli, "--nodes", "1,2")
    is_dark, *frames = browsed(
        tmp_path / "plan.html", Path(__file__).with_name("plan_page.js"), (390, 844), (1280, 800)
    )
    assert is_dark
    dark = "rgb(16, 21, 27)"
    assert sorted(frames) == [
        [390, True, 0, True, "visible", "flex", dark],
        [1280, True, 0, True, "visible", "table-cell", dark],
    ]
