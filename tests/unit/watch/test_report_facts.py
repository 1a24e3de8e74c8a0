"""What a report tells of tasks, of cost, of the commit, and the text that the model generated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.monitor_runs import Mesh, Start, write_run
from tests.unit.watch.pages import HOSTILE, Page, page_of, report, with_evaluations, with_results


def test_scores_of_tasks_are_the_first_table(tmp_path: Path, cli: CommandLine) -> None:
    run = with_evaluations(write_run(tmp_path / "run", [Start(0, 20)]))
    found = cli.facts("report", run)["tasks"]
    acc = {"task": HOSTILE, "metric": "acc", "step": 20, "score": 0.5, "stderr": 0.1, "first_step": 10, "first": 0.25}
    strict = {"metric": "exact_match (strict)", "score": 0.5, "first": 0.5, "stderr": None}
    assert found == [acc, acc | strict]
    page = page_of(run)
    table = page.text[page.text.index("Scores of tasks") : page.text.index("logarithmic axis")]
    rows = ("acc0.5000 ± 0.1000200.2500 at step 10", "exact_match (strict)0.5000200.5000 at step 10")
    assert [row for row in rows if HOSTILE + row not in table] == []
    assert page.tags.index("table") < page.tags.index("form") < page.tags.index("figure")
    assert page.tags.count("script") == 1
    other = write_run(tmp_path / "other", [Start(0, 20)])
    page_of(other, run).says(f"taskmetricAB{HOSTILE}acc–0.5000 ± 0.1000")
    assert "Scores" not in page_of(other).text


@pytest.mark.parametrize(("price", "paid", "shown"), [(None, 0, ""), ("30 usd/node", 2 * 30, "30 USD/node")])
def test_all_devices_are_paid(price: str | None, paid: float, shown: str, tmp_path: Path, cli: CommandLine) -> None:
    """Of 16 ranks on two hosts: 10 s before 20 steps, and after a stop by Ctrl-C 10 s before 10 more steps."""
    starts = [Start(0, 20, "stopped by Ctrl-C (SIGINT)"), Start(20, 30)]
    run = write_run(tmp_path / "run", starts, mesh=Mesh(2, 2, 4, 2))
    hours = 30 / 3600 + 20 / 3600
    option = [] if price is None else ["--price", price]
    found = cli.facts("report", run, *option)
    assert found["device_hours"] == pytest.approx(16 * hours, rel=0.05)
    page = page_of(run, *option)
    if price is None:
        assert found["cost"] is None
        page.says(f"device-hours{found['device_hours']:.3g}--price adds the cost")
        return
    assert found["cost"] == {
        "amount": pytest.approx(found["device_hours"] / 16 * paid),
        "currency": price.split()[1][:3].upper(),
        "price": shown,
    }
    amount, currency = found["cost"]["amount"], found["cost"]["currency"]
    page.says(f"cost, {currency}{amount:.2f}{found['device_hours']:.3g} device-hours at {shown}")
    assert page_of(run).text.count(f"device-hours at {shown}") == 1, "that of the report which is replaced"
    (run / "report.html").write_text('<meta name="price" content="2.5">', encoding="utf-8")
    assert f"give --price: that in {run / 'report.html'} (2.5) must name its currency" in cli.refused("report", run)
    (run / "report.html").unlink()
    assert cli.facts("report", run)["cost"] is None
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("log: {", f"log: {{price: {price}, "))
    assert cli.facts("report", run)["cost"] == found["cost"], "that of the recipe"
    assert cli.facts("report", run, "--price", "0 CHF")["cost"]["currency"] == "CHF", "--price replaces it"


def test_a_chip_of_several_devices_is_paid_as_a_whole(tmp_path: Path, cli: CommandLine) -> None:
    run = write_run(tmp_path / "run", [Start(0, 20)], mesh=Mesh(1, 6, 1, 2))
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("NVIDIA H100 80GB HBM3", "trn2"))
    found = cli.facts("report", run, "--price", "4 USD/chip")
    assert found["cost"]["amount"] == pytest.approx(found["device_hours"] / 6 * 2 * 4), "three devices of each host"


def test_the_page_names_the_commit_of_its_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for git, told in (
        ({"commit": "0123456789abcdef", "modified": True}, "; trained from commit 0123456789ab with changes"),
        (None, ""),
        ({"commit": [HOSTILE]}, '; trained from commit ["<script>al'),
    ):
        environment = json.loads((run / "environment.json").read_text()) | {"git": git}
        (run / "environment.json").write_text(json.dumps(environment))
        first = next(line for line in page_of(run).text.splitlines() if line.startswith("shardwise report of"))
        assert first.endswith(f" UTC{told}")


def test_the_text_is_whole_and_has_no_marks(tmp_path: Path, cli: CommandLine) -> None:
    long = "a < b and c > d; " * 200
    sample = f"<s>To be</s><s> or <|endoftext|>not {long}<div></div><eos>[PAD][PAD]"
    run = with_results(write_run(tmp_path / "run"), sample=sample)
    text = f"To be\n\nor\nnot {long}<div></div>"
    assert cli.facts("report", run)["sample"].replace("\n\n", "\n") == text.replace("\n\n", "\n")
    page = report(run)
    assert "not a &lt; b" in page
    assert long.strip() in Page(page).text
    style = re.search(r"\.sample \{([^}]*)\}", page)
    assert "max-height" not in style[1]
