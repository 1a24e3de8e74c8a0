"""Pages of `shardwise report` as a reader and a browser see them, and runs with changed events."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from tests.monitor_runs import Mesh, Start, loss_of, write_run

HOSTILE = "<script>alert('x')</script>"
BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
TENSOR_PARALLEL = Mesh(1, 1, 2, 1, sequence=True)
DATA_PARALLEL = Mesh(1, 2, 1, 1)


class Page(HTMLParser):
    """The text that a reader sees, the tags, what the page would load, and the numbers in its charts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags, self.loaded = "", list[str](), list[str]()
        self.charts, self.ranks, self.dots, self.places = list[Any](), list[Any](), 0, {}
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.charts += [json.loads(found["data-chart"] or "")] if "data-chart" in found else []
        self.ranks += [json.loads(found["data-ranks"] or "")] if "data-ranks" in found else []
        self.places = json.loads(found.get("data-places") or "null") or self.places
        self.dots += str(found.get("class")).startswith("dots")
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def says(self, *texts: str) -> None:
        """Require each of these texts, wherever lines are broken."""
        text = self.text.replace("\n", "")
        assert [each for each in texts if each.replace("\n", "") not in text] == []


def report(run: Path, *more: object) -> str:
    """The file that `shardwise report` writes beside the first run; `more`: one other run, or options."""
    words = [*map(str, more)]
    assert main(["report", str(run), *words]) == 0
    is_compared = bool(words) and not words[0].startswith("--")
    name = f"report-with-{Path(words[0]).name}.html" if is_compared else "report.html"
    return (run / name).read_text(encoding="utf-8")


def page_of(run: Path, *more: object) -> Page:
    return Page(report(run, *more))


def events_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_events(run: Path, events: Iterable[dict[str, Any]]) -> Path:
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return run


def set_written(file: Path, seconds: float) -> None:
    """When the file was written, in seconds since the epoch."""
    os.utime(file, (seconds, seconds))


def with_results(run: Path, **results: Any) -> Path:
    file = run / "results.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | results))
    return run


def with_evaluations(run: Path) -> Path:
    """Add evaluations of a set and of tasks: at step 10, at step 18, which a resume after step 10 undoes, and at 20."""
    written = []
    for event in events_of(run):
        written.append(event)
        step = event.get("step")
        if event["event"] == "step" and step in (10, 18, 20):
            facts = {"time": event["time"], "step": step}
            written.append({"event": "eval_set", "set": "code", "loss": step / 10, "perplexity": 2.0, **facts})
            scores = {"acc,none": step / 40, "acc_stderr,none": 0.1, "exact_match,strict": 0.5}
            written.append({"event": "eval_task", "task": HOSTILE, "metrics": scores, **facts})
    return write_events(run, written)


def by_batch(path: Path | str, factor: int, until: int, start: Sequence[Start] | None = None) -> Path:
    """A run whose batch has `factor` times the tokens, and whose loss is a function of the tokens."""
    losses = {step: loss_of(factor * step) for step in range(1, until + 1)}
    run = write_run(Path(path), start or [Start(0, until)], losses=losses, mesh=DATA_PARALLEL)
    events = events_of(run)
    for event in events:
        if event["event"] == "step":
            event["tokens"] *= factor
    return write_events(run, events)


def browsed(file: Path, script: Path, *sizes: tuple[int, int]) -> list[Any]:
    """Whether a browser is dark, and what `script` tells of a page in each size; a browser's start takes seconds."""
    if not BROWSER:
        assert "CI" not in os.environ, "Chromium is missing: scripts/test_packages.sh installs it"
        pytest.skip("Chromium is not installed")
    folder = file.parent
    frames = Path(__file__).with_name("frames.html").read_text()
    (folder / "probe.html").write_text(frames % (json.dumps(sizes), file.name, script.read_text()))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    options += ["--enable-logging=stderr", "--blink-settings=preferredColorScheme=0"]
    # Without what a browser does besides for its user, and in one process: its start takes a second.
    options += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    options += ["--disable-default-apps", "--disable-extensions", "--no-zygote", "--single-process"]
    command = [BROWSER, *options, f"--user-data-dir={folder / 'profile'}", f"file://{folder / 'probe.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    told: list[Any] = json.loads(done.stdout.partition("PROBE")[2].partition("EBORP")[0])
    return told
