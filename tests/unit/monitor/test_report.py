"""`shardwise report`: the page has the numbers that `--json` prints, whatever is in the run's folder."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.monitor.report.chart import line_chart, short
from shardwise.monitor.report.numbers import thinned
from tests.monitor_runs import Mesh, Start, loss_of, write_run

HOSTILE = "<script>alert('x')</script>"
BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


class Text(HTMLParser):
    """The text that a reader sees, the tags, and what the page would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags, self.loaded = "", list[str](), list[str]()
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def report(run: Path, *more: str) -> str:
    assert main(["report", str(run), *more]) == 0
    return (run / "report.html").read_text(encoding="utf-8")


def numbers(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert main(["report", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_page_has_the_numbers_and_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "one", [Start(0, 25, None), Start(20, 60)], mesh=Mesh(2, 2, 4, 2), straggler=5, spike=33)
    page = Text(report(run))
    found = numbers(capsys, str(run))
    assert page.loaded == ["data:,"], "nothing but an empty icon"
    assert found["numbers"]["final_loss"] == loss_of(60)
    for text in (f"{loss_of(60):.4f}", "2 starts", "5 steps were done again", "16 ranks on 2 hosts", "is a spike"):
        assert text in page.text, text
    assert f"{100 * found['goodput']:.1f} % in steps that count" in page.text
    assert found["lost_steps"] == 5
    assert sum(found["lost_seconds"].values()) + found["useful_seconds"] == pytest.approx(found["seconds"])
    assert [point[0] for point in found["curves"]["loss"]] == [*range(1, 61)]
    worst = max(found["ranks"], key=lambda rank: rank["relative"])
    assert (worst["rank"], worst["relative"]) == (5, pytest.approx(2.0))


def test_two_runs_are_laid_over_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", losses={7: loss_of(7) * 1.5})
    b = write_run(tmp_path / "b", [Start(0, 12)], mesh=Mesh(1, 1, 2, 1))
    page = Text(report(a, str(b)))
    assert "|A − B| / |B|, is 0.5 at step\n7:" in page.text
    assert "(12 steps in common)" in page.text
    assert "train.steps" in page.text
    assert page.text.count("A: a") >= 2, "each chart names both"
    compared = numbers(capsys, str(a), str(b))["compared"]
    largest = {"difference": pytest.approx(0.5), "step": 7, "a": loss_of(7) * 1.5, "b": loss_of(7)}
    assert compared["largest"] == largest
    assert not (b / "report.html").exists()


def test_what_the_run_says_is_text_and_no_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path / "odd & <b>")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"event": "warning", "time": "2026-01-01T00:00:30.000+00:00", "step": 3, "text": HOSTILE}) + "\n"
        )
    secrets = f"data:\n  path: s3://me:hunter2@bucket/{HOSTILE}\nlaunch:\n  environment: {{HF_TOKEN: hunter2}}\n"
    (run / "config.yaml").write_text(secrets)
    written = report(run)
    page = Text(written)
    assert page.tags.count("script") == 1, "the page's own"
    assert HOSTILE in page.text
    assert "hunter2" not in written
    assert "odd & <b>" in page.text


@pytest.mark.parametrize("case", ["empty", "cut", "one step", "nan", "old"])
def test_odd_runs_have_a_report(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [Start(0, 1 if case == "one step" else 5)], losses={3: math.nan})
    metrics = run / "metrics.jsonl"
    if case == "empty":
        shutil.rmtree(run / "ranks")
        metrics.write_text("")
    if case == "cut":
        metrics.write_bytes(metrics.read_bytes()[:-40])
    if case == "nan":
        event = {
            "event": "eval",
            "time": "2026-01-01T00:00:40.000+00:00",
            "step": 5,
            "loss": "nan",
            "perplexity": "nan",
        }
        with metrics.open("a") as file:
            file.write(json.dumps(event) + "\n")
    if case == "old":
        kept = ("event", "step", "loss")
        events = [json.loads(line) for line in metrics.read_text().splitlines()]
        metrics.write_text("".join(json.dumps({k: v for k, v in e.items() if k in kept}) + "\n" for e in events))
    assert "</html>" in report(run)
    found = numbers(capsys, str(run))
    assert all(math.isfinite(value) for points in found["curves"].values() for _, value in points)
    if case == "nan":
        assert [step for step, _ in found["curves"]["loss"]] == [1, 2, 4, 5]


def test_wrong_input_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("shardwise: RUN (")
    run = write_run(tmp_path / "run")
    assert main(["report", str(run), "--output", str(tmp_path / "no" / "r.html")]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'no' / 'r.html'} cannot be written: " in error
    assert main(["report", str(run), "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("must be a file, it is a folder: name a file in it\n")
    assert "Traceback" not in error


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "run")
    report(run, "--png", str(tmp_path / "png"))
    assert (tmp_path / "png/loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_long_curve_keeps_its_spikes() -> None:
    values = [1.0] * 100_000
    values[54_321] = 9.0
    points = thinned(range(1, 100_001), values)
    assert len(points) <= 600
    assert [54_322, 9.0] in points
    assert (points[0][0], points[-1][0]) == (1, 100_000)


def test_axes_have_round_numbers() -> None:
    chart = line_chart("x", {"a": [[1, 2.13], [900, 5.9]]})
    assert all(f">{tick}<" in chart for tick in ("2", "3", "4", "5", "6", "250", "500", "750"))
    assert line_chart("x", {"a": []}) == ""
    assert "circle" in line_chart("x", {"a": [[1, 3.0]]}), "of a single step a line shows nothing"
    texts = {1200.0: "1,200", 12_500.0: "12.5 k", 1.2e6: "1.2 M", 3e-5: "3e-05", 0.5: "0.5", 0.0: "0"}
    assert {value: short(value) for value in texts} == texts


PROBE = """<body><script>
const told = [matchMedia("(prefers-color-scheme: dark)").matches];
for (const width of [390, 1280]) {
  const frame = document.createElement("iframe");
  frame.width = width;
  frame.height = 900;
  frame.src = "report.html";
  frame.onload = () => {
    const page = frame.contentDocument, loaded = frame.contentWindow.performance.getEntriesByType("resource").length;
    page.querySelector(".chart svg").dispatchEvent(new KeyboardEvent("keydown", {key: "Home"}));
    const fits = page.documentElement.scrollWidth <= width, shown = page.querySelector("output").textContent;
    told.push([width, fits, shown, loaded, getComputedStyle(page.body).backgroundColor]);
    if (told.length === 3) document.body.textContent = "PROBE" + JSON.stringify(told) + "EBORP";
  };
  document.body.append(frame);
}
</script></body>"""


def test_a_browser_shows_it_without_an_error(tmp_path: Path) -> None:
    """On a phone and a desktop, in the dark, and by the keyboard; in one browser, whose start takes seconds."""
    if BROWSER is None:
        assert "CI" not in os.environ, "Chromium is missing: scripts/test_packages.sh installs it"
        pytest.skip("Chromium is not installed")
    run = write_run(tmp_path / "run", [Start(0, 24)], mesh=Mesh(4, 16, 16, 128), straggler=77)
    page = tmp_path / "report.html"
    page.write_text(report(run), encoding="utf-8")
    (tmp_path / "probe.html").write_text(PROBE)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    options += ["--enable-logging=stderr", "--blink-settings=preferredColorScheme=0"]
    # Without what a browser does besides for its user, and in one process: its start takes a second.
    options += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    options += ["--disable-default-apps", "--disable-extensions", "--no-zygote", "--single-process"]
    command = [BROWSER, *options, f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'probe.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    is_dark, *frames = json.loads(done.stdout.partition("PROBE")[2].partition("EBORP")[0])
    assert is_dark
    assert sorted(frame[0] for frame in frames) == [390, 1280]
    for width, fits, shown, loaded, background in frames:
        assert fits, f"it is wider than {width} pixels"
        assert shown == f"step 1: {loss_of(1):.0f}"
        assert loaded == 0, "it asks the network for something"
        assert background == "rgb(16, 21, 27)", "the dark page"
    assert "CONSOLE" not in done.stderr, done.stderr
    assert page.stat().st_size < 400 * 1024
