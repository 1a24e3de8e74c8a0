"""`shardwise report`: the page has the numbers that `--json` prints, whatever is in the run's folder."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from shardwise.runs.failure_record import FailureRecord
from shardwise.runs.folder import RunDirectory, json_text
from shardwise_watch.report.chart import line_chart
from shardwise_watch.report.numbers import curve_columns, verdict
from shardwise_watch.step_metrics import PARTS, CurveColumn, StepCurve
from tests.command_line import CommandLine
from tests.monitor_runs import FIRST, LOADING, SPLIT, Mesh, Start, ending, loss_of, stamp, write_big, write_run
from tests.unit.watch import pages
from tests.unit.watch.pages import HOSTILE, events_of, page_of, report, write_events


@pytest.fixture(scope="module")
def sixteen_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 16 ranks with a restart, a straggler, a spike and a sample."""
    path = tmp_path_factory.mktemp("runs") / "one"
    run = write_run(path, [Start(0, 25, None), Start(20, 60)], mesh=Mesh(2, 2, 4, 2), straggler=5, spike=33)
    return pages.with_results(run, sample=f"To be {HOSTILE}")


@pytest.fixture(scope="module")
def page(sixteen_ranks: Path) -> pages.Page:
    return page_of(sixteen_ranks)


def test_the_page_has_the_numbers_and_loads_nothing(sixteen_ranks: Path, page: pages.Page, cli: CommandLine) -> None:
    found = cli.facts("report", sixteen_ranks)
    assert page.loaded == ["data:,"], "nothing but an empty icon"
    assert found["numbers"]["final_loss"] == loss_of(60)
    page.says(f"{loss_of(60):.4f}", "2 starts", "5 steps were done again", "16 ranks on 2 hosts", "is a spike")
    page.says(f"{found['goodput']:.1%} in steps that count", "mean of the last 20", "Tokens per secondmean of 10 steps")
    assert re.search(r"mean of the last 10 steps, at most [\d.]+ ?\w* of the last start", page.text)
    assert found["lost_steps"] == 5
    assert sum(found["lost_seconds"].values()) + found["useful_seconds"] == pytest.approx(found["seconds"])
    assert [row[0] for row in found["curves"]["loss"]] == [*range(1, 61)]
    assert found["split_by_step"][-1] == pytest.approx([60, *(SPLIT.get(part, 0.0) for part in PARTS)])
    worst = max(found["ranks"], key=lambda rank: rank["relative"])
    assert (worst["rank"], worst["relative"]) == (5, pytest.approx(2.0))


def test_two_runs_are_laid_over_each_other(tmp_path: Path, cli: CommandLine) -> None:
    a = write_run(tmp_path / "a", losses={7: loss_of(7) * 1.5})
    b = write_run(tmp_path / "b", [Start(0, 12)], mesh=Mesh(1, 1, 2, 1))
    page = page_of(a, b)
    page.says("|A − B| / |B|, is 0.5 at step7:", "(12 steps in common)", "train.steps")
    page.says(f"loss at step 12, the last in common{loss_of(12):.5f}{loss_of(12):.5f}")
    page.says(f"final loss (step 20 and 12){loss_of(20):.5f}{loss_of(12):.5f}")
    charts = [data["curves"] for data in page.charts if "percent" in data]
    assert charts
    assert all(list(curves) == ["A", "B"] for curves in charts), "each chart has both"
    assert page.dots == 5, "evaluations of both at step 10 in the common part; with that of A at step 20 in the whole"
    assert {name: rows[-1][0] for name, rows in charts[0].items()} == {"A": 12, "B": 12}
    compared = cli.facts("report", a, b)["compared"]
    assert compared["losses"][-1] == ["last evaluation", loss_of(20) + 0.1, loss_of(10) + 0.1]
    assert ["train.steps", 20, 12] in compared["config"]
    assert compared["largest"] == {"difference": pytest.approx(0.5), "step": 7, "a": loss_of(7) * 1.5, "b": loss_of(7)}
    assert not [*a.glob("report.html"), *b.glob("report*.html")], "the page of one run stays"


def write_resharded(path: Path) -> Path:
    """A run that a person stopped after step 10, and that went on at another layout."""
    change = f"parallel.tensor 2 → 1 {HOSTILE}"
    starts = [
        Start(0, 10, "stopped by Ctrl-C (SIGINT)", mesh=pages.TENSOR_PARALLEL),
        Start(10, 20, mesh=pages.DATA_PARALLEL, changes=(change, "train.steps 10 → 20")),
    ]
    run = write_run(path, starts, mesh=pages.DATA_PARALLEL)
    events = events_of(run)
    for event in events:
        if event["event"] == "step" and event["step"] <= 10:
            event["split_seconds"]["forward"] = 9.0
    return write_events(run, events)


def test_a_change_of_the_layout_is_told_and_marked(tmp_path: Path, cli: CommandLine) -> None:
    run = write_resharded(tmp_path / "run")
    written = report(run)
    page = pages.Page(written)
    found = cli.facts("report", run)
    assert found["layouts"] == [[0, "TP 2 + SP"], [10, "DP 2"]]
    events = {(event["kind"], event["step"]): event["text"] for event in found["events"]}
    assert events["resume", 10] == (
        f"loaded in {LOADING:.2f} s, changed: parallel.tensor 2 → 1 {HOSTILE}; train.steps 10 → 20"
    )
    assert [event["text"] for event in found["events"] if event["kind"] == "start"] == [
        "TP 2 + SP, training began after 10.0 s",
        "DP 2, training began after 10.0 s",
    ]
    change = "layout after step 10: TP 2 + SP → DP 2"
    assert page.text.count(f"dots: evaluation{change}") == 1, "the chart of the loss has no note"
    assert written.count(f"<title>{change}</title>") == len([chart for chart in page.charts if "axis" not in chart])
    page.says("A step on rank 0, mean of steps 11 to 20 at DP 2")
    page.says("Memory of rank 0 at TP 2 + SP", "Memory of rank 0 at DP 2")
    assert found["split_seconds"]["forward"] == pytest.approx(SPLIT["forward"]), "steps of the former layout count"
    assert (found["split_steps"], found["split_layout"]) == ([11, 20], "DP 2")
    assert page.tags.count("script") == 1
    assert found["lost_seconds"]["restart"] == 0
    assert "1 continuation;" in found["verdict"]
    assert re.search(r'<text x="[^"]+" y="\d+" text-anchor="end">DP 2</text>', written), "the line has no label"
    other = write_run(tmp_path / "other", mesh=pages.DATA_PARALLEL)
    compared = cli.facts("report", run, other)["compared"]
    assert (compared["config"], compared["layouts"]) == ([], ["TP 2 + SP to step 10, then DP 2", "DP 2"])


def test_the_page_opens_with_the_verdict_and_has_all_ranks(page: pages.Page) -> None:
    text = page.text
    first = "Finished 60 steps in 1 min 58 s at loss 2.516 (evaluation 2.616); 1 restart; 49.7% of the time was lost."
    curve = "Training loss, dots: evaluation"
    parts = (first, curve, "in steps that count", f"To be {HOSTILE}", "goodput", "Learning rate")
    places = [text.index(part) for part in parts]
    assert places == sorted(places), "the order of the page"
    assert (text.count("The run: "), text.count(curve)) == (1, 1)
    # The degrees are named; memory is a bar for each rank; every fact of a rank is reachable without a mouse.
    page.says("Layout: TP 4 × PP 2 × DP 2, ZeRO-1, schedule 1f1b; 16 ranks on 2 hosts")
    page.says("from 14.0 GiB on rank 0 to 14.2 GiB on rank 15", "5node-000pp 0 dp 1 tp 12.00 ×14.1 GiB")
    (bars,) = (chart for chart in page.charts if chart.get("axis") == "rank")
    assert bars["suffix"] == " GiB"
    assert bars["curves"][""] == [[rank, pytest.approx(14 + rank / 64, rel=1e-4)] for rank in range(16)]
    (told,) = page.ranks
    assert (told["axes"], told["ranks"][5]) == (["pp", "dp", "tp"], [5, 0, 2.0, 14.08, 0, 1, 1])


def test_a_failure_stands_at_the_top(tmp_path: Path, cli: CommandLine) -> None:
    run = write_run(tmp_path / "odd & <b>", [Start(0, 25, None)], steps=60)
    cause = f"rank 1 failed: ValueError: {HOSTILE}"
    FailureRecord(stamp(FIRST + 40), cause, step=25, checkpoint=20).write(RunDirectory(run))
    page = page_of(run)
    block = f"FAILED at step 25: {cause}.\n5 steps since checkpoint 20 are lost"
    page.says(block, "Failed after 25 of 60 steps in ", "odd & <b>")
    assert (page.text.count(cause), page.tags.count("script")) == (1, 1)
    assert cli.facts("report", run)["failure"] == block.splitlines()


NUMBERS = {"final_loss": 0.9321, "final_eval_loss": None}
FACTS = {
    "state": "finished", "step": 480, "steps": 480, "seconds": 182.0, "useful_seconds": 178.4, "starts": 1,
    "later_starts_text": "",
}  # fmt: skip


def test_verdict() -> None:
    rows = yaml.safe_load(Path(__file__).with_name("verdicts.yaml").read_text(encoding="utf-8"))
    for changes, numbers, sentence in rows:
        assert verdict({**FACTS, **changes, "numbers": {**NUMBERS, **numbers}}) == sentence


def test_loads_of_experts_have_maps(tmp_path: Path, cli: CommandLine) -> None:
    """Without the steps 21 to 25 of the first start, which the second one undoes, whether it does them again or not."""
    run = write_run(tmp_path / "sparse", [Start(0, 25, None), Start(20, 23)], experts=True)
    damaged = ['{"step": 23, "lo', '{"step": 9, "loads": {"0": "x"}}', '{"step": [1], "loads": 3}', '{"step": 9}']
    with (run / "experts.jsonl").open("a") as file:
        file.write("\n".join([*damaged, '{"step": 8, "loads": {"0": [0, 0, 0, 0], "1": [1, 1, 1, 1]}}', ""]))
    found = cli.facts("report", run)
    assert found["curves"]["expert_load_max"][-1] == [23, 2.5, 2.5, 2.5]
    assert found["balance_curves"]["switch"][-1][-1] == 0.0125
    loads, largest = (found["load_maps"][name]["rows"] for name in ("expert_loads", "largest_loads"))
    # 17 steps of the first start, in which the third expert has all tokens, and 3 of the second one.
    sums = [sum(10 + step for step in (21, 22, 23)), sum(90 - step for step in (21, 22, 23)), 17 * 120, 60]
    assert loads["0"] == [[at, 1.0] for at in range(4)]
    assert [load for _, load in loads["1"]] == pytest.approx([load * 4 / (20 * 120) for load in sums], abs=1e-3)
    assert [step for step, _ in largest["1"]] == [*range(1, 24)]
    assert [load for _, load in largest["1"]] == pytest.approx([4.0] * 20 + [69 / 30, 68 / 30, 67 / 30], abs=1e-3)
    page = page_of(run)
    maps = [data for data in page.charts if data.get("is_map")]
    assert [data["axis"] for data in maps] == ["expert", "step"]
    assert maps[0]["curves"]["block 1,"] == loads["1"]
    page.says("mean of steps 4 to 23", "Balance losses")


def test_evaluation_sets_and_tasks_have_curves(tmp_path: Path, cli: CommandLine) -> None:
    run = pages.with_evaluations(write_run(tmp_path / "run", [Start(0, 19, None), Start(10, 20)]))
    found = cli.facts("report", run)
    assert found["set_curves"] == {"code": [[10, 1.0, 1.0, 1.0], [18, 1.8, 1.8, 1.8], [20, 2.0, 2.0, 2.0]]}
    curves = {metric: list(curves) for metric, curves in found["task_curves"].items()}
    assert curves == {"acc": [HOSTILE], "exact_match (strict)": [HOSTILE]}
    assert [column[:2] for column in found["task_curves"]["acc"][HOSTILE]] == [[10, 0.25], [18, 0.45], [20, 0.5]]
    page = page_of(run)
    page.says("Loss of evaluation sets", "Tasks: acc", "Tasks: exact_match (strict)")
    assert {"curves": {"code": [[10, 1], [18, 1.8], [20, 2]]}, "ends": [10, 20], "percent": False} in page.charts
    assert page.tags.count("script") == 1
    undone = pages.with_evaluations(write_run(tmp_path / "undone", [Start(0, 19, None), Start(10, 16)]))
    found = cli.facts("report", undone)
    assert [column[0] for column in found["set_curves"]["code"]] == [10]
    assert [column[0] for column in found["task_curves"]["acc"][HOSTILE]] == [10]


@pytest.mark.parametrize("case", ["empty", "nan", "old"])
def test_odd_runs_have_a_report(case: str, tmp_path: Path, cli: CommandLine) -> None:
    run = write_run(tmp_path / "run", [Start(0, 5)], losses={3: math.nan})
    if case == "empty":
        shutil.rmtree(run / "ranks")
        write_events(run, [])
    if case == "nan":
        evaluation = {"event": "eval", "time": "2026-01-01T00:00:40.000+00:00", "step": 5, "loss": "nan"}
        write_events(run, [*events_of(run), evaluation])
    if case == "old":
        kept = ("event", "step", "loss")
        write_events(run, [{name: event[name] for name in kept if name in event} for event in events_of(run)])
    assert "</html>" in report(run)
    found = cli.facts("report", run)
    assert all(math.isfinite(value) for rows in found["curves"].values() for row in rows for value in row)
    if case == "nan":
        assert [row[0] for row in found["curves"]["loss"]] == [1, 2, 4, 5]
        assert found["not_finite"] == {"loss": {"steps": 1, "first": 3, "last": 3}}
        assert "not finite at 1 step, first 3" in page_of(run).text


def test_wrong_input_is_a_sentence(tmp_path: Path, cli: CommandLine) -> None:
    run = write_run(tmp_path / "run")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for arguments, told in (
        ([tmp_path / "none"], r"RUN \(.*none\) must be"),
        ([run, run], r"RUN \(.*run\) must be named once: it is there twice"),
        ([run, tmp_path / "none"], r"RUN \(.*none\) must be"),
        ([run, "--output", tmp_path / "no/r.html"], "r.html cannot be written: .*; --output chooses another file"),
        ([run, "--output", tmp_path / "pipe"], "and it is a device or a pipe: name another file"),
        ([run, "--price", "2.50"], r"--price \(2\.50\) must name its currency"),
        ([run, "--png", tmp_path / "file"], r"--png \(.*file\) cannot be written: File exists"),
    ):
        assert re.search(told, cli.refused("report", *arguments))
    assert not (run / "report.html").exists()


def test_pictures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the marks of the page: the change of the layout after step 10, and the restart after step 15."""
    axes = pytest.importorskip("matplotlib.axes").Axes
    places: list[float] = []
    labels: list[str] = []
    monkeypatch.setattr(axes, "axvline", lambda _, place, **__: places.append(place))
    monkeypatch.setattr(axes, "text", lambda _, x, y, text, **__: labels.append(text))
    starts = [Start(0, 10, mesh=pages.TENSOR_PARALLEL), Start(10, 18, None), Start(15, 20)]
    run = write_run(tmp_path / "run", starts, mesh=pages.DATA_PARALLEL, experts=True)
    report(run, "--png", tmp_path / "png")
    drawn = {file.stem for file in (tmp_path / "png").iterdir()}
    assert drawn >= {"expert_loads", "largest_loads", "expert_entropy"}
    assert (set(places), set(labels)) == ({10.5, 15.5}, {" DP 2"})
    assert (tmp_path / "png/loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_diverged_does_not_look_good(tmp_path: Path, cli: CommandLine) -> None:
    a = write_run(tmp_path / "a", losses=dict.fromkeys(range(14, 21), math.nan))
    b = write_run(tmp_path / "b", losses={17: math.inf})
    told = cli.facts("report", a)["numbers"]
    assert (told["final_loss"], told["least_loss"]) == ("nan", loss_of(13))
    page = page_of(a)
    page.says("NaN", "first not finite at step 14")
    assert f"{loss_of(13):.4f}" not in page.text, "the last good loss is not the final one"
    compared = cli.facts("report", a, b)["compared"]
    assert compared["largest"]["difference"] == 0.0
    assert compared["not_finite"] == {"steps": 7, "step": 14, "a": "nan", "b": loss_of(14)}
    both = page_of(a, b)
    both.says("7 of these steps cannot be compared, first step 14", f"the loss is NaN in A and {loss_of(14):.8g} in B")


def test_what_is_unknown_is_no_zero(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    events = events_of(run)
    write_events(run, [{key: value for key, value in event.items() if key != "time"} for event in events])
    page = page_of(run)
    page.says("The run: – in steps that countnot recorded")
    assert "0.0%" not in re.sub(r"\d ms\d+\.\d%", "", page.text), "other than in the bar of a step's parts"
    write_events(run, [{key: event.get(key) for key in ("event", "step")} for event in events])
    assert "0.00 s" not in page_of(run).text, "no time is told of a checkpoint"


def test_restarts_tell_their_causes(tmp_path: Path, cli: CommandLine) -> None:
    run = write_run(tmp_path / "run", [Start(0, 8, None), Start(5, 20)])
    lost = ending("lost node", FIRST, 19.0, 8, text="node-001 does not answer\nand more", job="17")
    (run / "restarts.jsonl").write_text(json_text(lost) + "\n")
    found = cli.facts("report", run)
    (event,) = (event for event in found["events"] if event["kind"] == "ended")
    text = "job 17, lost node, node-001 does not answer"
    assert (event["text"], event["step"], event["at"]) == (text, 8, FIRST + 19.0)
    assert [event["kind"] for event in found["events"]][:3] == ["start", "ended", "start"], "in the order of time"
    began = found["events"][0]["at"]
    assert found["timeline"]["training"][0] == pytest.approx([0.0, 8.0]), "up to its last step, though that was undone"
    assert found["timeline"]["marks"]["ended"] == pytest.approx([FIRST + 19.0 - began])
    page_of(run).says(text)


def test_long_and_steep_curves_keep_their_shape() -> None:
    values = [1.0] * 100_000
    values[54_321] = 9.0
    rows = curve_columns(range(1, 100_001), values)
    assert len(rows) <= 300
    assert rows[-1] == (100_000, 1.0, 1.0, 1.0)
    (spike,) = (row for row in rows if row.largest > 1.0)
    assert spike[1:] == (1.0, pytest.approx(1 + 8 / (spike.step - rows[rows.index(spike) - 1].step)), 9.0)
    assert curve_columns([1, 2, 3], [math.nan, 2.0, math.inf]) == [(2, 2.0, 2.0, 2.0)]
    # The steep beginning leaves the chart, which says how far; a curve without one is shown whole.
    falling = [CurveColumn(step, value, value, value) for step in range(1, 101) for value in [2 + 9 / step**2]]
    chart = line_chart("x", {"a": StepCurve(falling)})
    assert "axis cut: values reach to 11<" in chart
    assert ">10<" not in chart
    assert "axis cut" not in line_chart("x", {"a": StepCurve(falling)}, is_cut=False)
    straight = [CurveColumn(step, step / 10, step / 10, step / 10) for step in range(1, 101)]
    assert "axis cut" not in line_chart("x", {"a": StepCurve(straight)})


@pytest.mark.slow
def test_two_long_runs_fit_into_a_mail(tmp_path: Path) -> None:
    runs = [write_big(tmp_path / name, ranks=1024, steps=20_000, tail=1) for name in "ab"]
    report(*runs)
    assert (runs[0] / "report-with-b.html").stat().st_size < 400_000


@pytest.mark.slow
def test_a_browser_shows_it_without_an_error(tmp_path: Path) -> None:
    """On a phone and a desktop, in the dark, and by the keyboard; in one browser."""
    run = write_run(tmp_path / "run", [Start(0, 24)], mesh=Mesh(4, 16, 16, 128), straggler=77, experts=True)
    pages.with_results(pages.with_evaluations(run), sample="word " * 400 + "x" * 400)
    page = tmp_path / "report.html"
    page.write_text(report(run, "--price", "2.50 USD"), encoding="utf-8")
    is_dark, *frames = pages.browsed(page, Path(__file__).with_name("report_page.js"), (390, 900), (1280, 900))
    assert is_dark
    assert sorted(frame[1] for frame in frames) == [390, 1280]
    for is_whole, width, fits, shown, loaded, background, last, touched, is_open, load in frames:
        assert is_whole, "the text scrolls, or the first table is not that of tasks"
        assert fits, f"it is wider than {width} pixels"
        assert shown == f"step 1: {loss_of(1):.0f}"
        assert loaded == 0, "it asks the network for something"
        assert background == "rgb(16, 21, 27)", "the dark page"
        assert last == "rank 1023 on node-127, pp 3 dp 15 tp 15, 29.98 GiB, 1.00 × the work of the best", "by key"
        assert touched == "rank 77 on node-009, pp 0 dp 4 tp 13, 15.20 GiB, 2.00 × the work of the best", "by touch"
        assert is_open, "on paper the configuration is hidden"
        assert load == "expert 2: block 1, 4 × the mean"
    assert page.stat().st_size < 400 * 1024


def test_scores_of_tasks_are_the_first_table(tmp_path: Path, cli: CommandLine) -> None:
    run = pages.with_evaluations(write_run(tmp_path / "run", [Start(0, 20)]))
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
    run = pages.with_results(write_run(tmp_path / "run"), sample=sample)
    text = f"To be\n\nor\nnot {long}<div></div>"
    assert cli.facts("report", run)["sample"].replace("\n\n", "\n") == text.replace("\n\n", "\n")
    page = report(run)
    assert "not a &lt; b" in page
    assert long.strip() in pages.Page(page).text
    style = re.search(r"\.sample \{([^}]*)\}", page)
    assert "max-height" not in style[1]
