"""`shardwise report` of several runs: what is laid over each other, differences, and the choices on the page."""

import math
from pathlib import Path

import pytest

from shardwise.runs.folder import json_text
from tests.command_line import CommandLine
from tests.monitor_runs import Start, loss_of, write_run
from tests.unit.watch import pages
from tests.unit.watch.pages import DATA_PARALLEL, TENSOR_PARALLEL, Page, by_batch, page_of


def test_many_runs_are_laid_over_each_other(tmp_path: Path, cli: CommandLine) -> None:
    """Of ten runs, one diverged, one has experts, one has a step, one began as a branch; two have the same name."""
    a = write_run(tmp_path / "a", [Start(0, 24)], mesh=DATA_PARALLEL)
    lost = dict.fromkeys(range(21, 25), math.nan)
    odd = write_run(tmp_path / "odd", [Start(0, 24)], mesh=TENSOR_PARALLEL, losses=lost)
    one = write_run(tmp_path / "one", [Start(0, 1)], mesh=DATA_PARALLEL, losses={1: 9.0})
    sparse = write_run(tmp_path / "sparse", [Start(0, 24)], mesh=DATA_PARALLEL, experts=True)
    branch = write_run(tmp_path / "deep/a", [Start(10, 24)], mesh=DATA_PARALLEL, losses={24: 3.5})
    (branch / "branch.json").write_text(json_text({"parent": str(a), "step": 10, "changes": ["lr 1 → 2"]}))
    others = [write_run(tmp_path / f"more-{number}", [Start(0, 24)], mesh=DATA_PARALLEL) for number in range(5)]
    runs = [a, odd, one, sparse, branch, *others]
    cli("report", *runs, "--output", tmp_path / "many.html")
    written = (tmp_path / "many.html").read_text()
    page = Page(written)
    page.says("10 runs, compared with a", "E: a: branch of a at step 10:lr 1 → 2.", "not finite from step 21")
    page.says(f"C: onefinished1 of 1{9.0:.4f}–{abs(loss_of(1) - 9) / 9:.3g} at step 1", "train.steps24241242424")
    charts = [data for data in page.charts if "percent" in data]
    assert [*charts[0]["curves"]] == [*"ABCDEFGHIJ"], "the page opens with the loss of all"
    assert charts[0]["breaks"] == {"B": [21, 24]}
    of_experts = [data for data in charts if [*data["curves"]] == ["D"]]
    assert of_experts
    assert all(data["looks"]["D"] == "c3" for data in of_experts), "a curve has the same colour in all charts"
    assert 'class="key c3">D</span>' in written, "and its name"
    for look in ("c0", "c7", "c0 d1", "c1 d1"):
        assert f'class="curve {look}"' in written, "the ninth curve is dashed"
    (minus,) = (data["by"] for data in page.charts if "by" in data)
    assert [*minus["step"]] == [*"BCDEFGHIJ"]
    assert minus["step"]["B"] == [[step, 0] for step in range(1, 21)]
    assert minus["step"]["C"] == [[1, 9 - loss_of(1)]]
    assert minus["tokens"]["E"][-1] == [24 * 8192, pytest.approx(3.5 - loss_of(24), abs=1e-4)]
    found = cli.facts("report", *runs)
    assert [report["run"] for report in found["runs"]] == [run.name for run in runs]
    assert [pair["steps"] for pair in found["compared"]["pairs"]] == [24, 1, 24, 14, *[24] * 5]
    assert found["compared"]["pairs"][0]["not_finite"]["step"] == 21
    assert found["compared"]["layouts"] == ["DP 2", "TP 2 + SP", *["DP 2"] * 8]
    assert ["train.steps", 24, 24, 1, *[24] * 7] in found["compared"]["config"]
    cli("report", *runs[:4])
    assert (a / "report-with-odd-one-sparse.html").exists()
    cli("report", one, *(write_run(tmp_path / (letter * 90), [Start(0, 1)], mesh=DATA_PARALLEL) for letter in "bc"))
    assert (one / f"report-with-{'b' * 90}-and-1-more.html").exists()


def test_runs_with_other_batches_differ_by_tokens_and_time(tmp_path: Path, cli: CommandLine) -> None:
    """The loss is a function of the tokens: by them the difference is 0."""
    small = by_batch(tmp_path / "small", 1, 40)
    large = by_batch(tmp_path / "large", 2, 20)
    compared = cli.facts("report", small, large)["compared"]
    assert [column[0] for column in compared["differences"]["tokens"][0]] == [2 * 8192 * step for step in range(1, 21)]
    assert {column[2] for column in compared["differences"]["tokens"][0]} == {0.0}
    assert compared["differences"]["step"][0][-1] == [20, *[loss_of(40) - loss_of(20)] * 3]
    assert compared["pairs"] == [{name: compared[name] for name in ("steps", "largest", "not_finite")}]
    # A second a step, and half a second more after each checkpoint.
    assert compared["differences"]["time"][0][-1][0] == pytest.approx(20.5)
    page = page_of(small, large)
    page.says("Training loss of B minus A")
    assert page.places["places"]["B"][-1] == [20, 40 * 8192, 20.5]


@pytest.mark.slow
def test_a_reader_chooses_axes_and_smoothing(tmp_path: Path, cli: CommandLine) -> None:
    """The script draws by tokens, by time, smoothed, on logarithmic axes, and by steps again."""
    small = by_batch(tmp_path / "small", 1, 40, [Start(0, 20, None), Start(20, 40)])
    runs = [small, by_batch(tmp_path / "large", 2, 20), by_batch(tmp_path / "odd", 3, 10)]
    cli("report", *runs, "--output", tmp_path / "report.html")
    told = pages.browsed(tmp_path / "report.html", Path(__file__).with_name("report_choices.js"), (1280, 900))
    _, hidden, loss, minus, by_tokens, by_time, smoothed, by_steps, *counts = told
    assert not hidden
    assert loss == f"step 40: A {loss_of(40):.5g}, B –, C –"
    assert minus == f"step 20: B {loss_of(40) - loss_of(20):.5g}, C –"
    assert by_tokens[0] == f"tokens 8,192: A {loss_of(1):.5g}, B {loss_of(2):.5g}, C {loss_of(3):.5g}"
    assert by_tokens[1] == "tokens 16,380: B 0, C 0", "four digits, as on the axis"
    assert {"tokens", "100 k", "200 k", "300 k"} <= {*by_tokens[2]}
    a, b, c = by_tokens[3]
    assert [len(line) for line in (a, b, c)] == [40, 20, 10]
    assert b == a[1::2], "equal losses at equal tokens lie upon each other"
    assert c == [a[at] for at in range(2, 30, 3)]
    assert by_time[0].startswith(f"time 1 s: A {loss_of(1):.5g}, B {loss_of(2):.5g}, C")
    assert {"time", "10 s", "20 s"} <= {*by_time[2]}
    places = [x for x, _ in by_time[3][0]]
    # A checkpoint after the steps 10 and 30 takes half a second; that after the step 20 is before the second start.
    times = [at - 1 + 0.5 * (at > 10) + 0.5 * (at > 30) for at in range(1, 41)]
    assert places == pytest.approx([62 + 568 * time / 40 for time in times], abs=0.06)
    assert {"tokens", "10,000", "100 k"} <= {*smoothed[2]}
    xs = [x for x, _ in smoothed[3][0]]
    assert xs == pytest.approx([62 + 568 * math.log(at) / math.log(40) for at in range(1, 41)], abs=0.06)
    # Places lie 2.5 hundredths of the axis apart, so a value weighs by 0.5 ** 2.5 for each step that it is older.
    kept = 0.5 ** (100 / 39)
    weights = [kept**at for at in range(40)][::-1]
    last = sum(weight * loss_of(at) for at, weight in enumerate(weights, 1)) / sum(weights)
    ends = [math.log(value) for value in (loss_of(40), loss_of(1))]
    assert smoothed[3][0][-1][1] == pytest.approx(10 + 264 * (ends[1] - math.log(last)) / (ends[1] - ends[0]), abs=0.1)
    assert by_steps[0] == f"step 1: A {loss_of(1):.5g}, B {loss_of(2):.5g}, C {loss_of(3):.5g}"
    assert counts == [7, 1, 1], "evaluations, the continuation of the first run, the cursor"
